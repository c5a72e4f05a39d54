// scaled_gemm.cu with sums that are not promoted, see fast_mainloop.cuh.
#include "fast_mainloop.cuh"
#include "scaled_gemm.cu"
