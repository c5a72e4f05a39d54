// scaled_gemm_turned.cu with an output, and a bias of two bytes, in float16.
#include "half_ptx.cuh"
#define HALF 1
#include "scaled_gemm_turned.cu"
