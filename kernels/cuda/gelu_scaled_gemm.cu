// scaled_gemm.cu with GELU, see gelu.cuh.
#include "gelu_products.cuh"
#if HALF
#include "half_scaled_gemm.cu"
#else
#include "scaled_gemm.cu"
#endif
