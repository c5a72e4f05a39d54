// gemm_norm.cu with GELU, see gelu.cuh.
#include "gelu.cuh"
#include "norm.cuh"
#define activated activated_by_gelu
#if HALF
#include "half_gemm_norm.cu"
#else
#include "gemm_norm.cu"
#endif
