// activate_quantize.cu with GELU, see gelu.cuh.
#include "gelu.cuh"
#include "norm.cuh"
#define activated activated_by_gelu
#if HALF
#include "half_activate_quantize.cu"
#else
#include "activate_quantize.cu"
#endif
