// norm_quantize.cu with GELU, see gelu.cuh.
#include "gelu.cuh"
#include "norm.cuh"
#define activated activated_by_gelu
#if HALF
#include "half_norm_quantize.cu"
#else
#include "norm_quantize.cu"
#endif
