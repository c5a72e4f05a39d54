// scaled_gemm_fast.cu with an output in float16, see half_scaled_gemm.cuh.
#include "half_scaled_gemm.cuh"
#include "scaled_gemm_fast.cu"
