// scaled_gemm_unaligned.cu with GELU, see gelu.cuh.
#include "gelu_products.cuh"
#if HALF
#include "half_scaled_gemm_unaligned.cu"
#else
#include "scaled_gemm_unaligned.cu"
#endif
