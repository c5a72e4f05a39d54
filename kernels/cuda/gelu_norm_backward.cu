// norm_backward.cu with GELU, see gelu.cuh.
#include "gelu.cuh"

static __device__ __forceinline__ float through_gelu(float dd, float z) {
    return dd * gelu_slope(z);
}

// The first word in the brackets of a definition is a type.
#define through_last(dd, z) THROUGH_##dd, z)
#define THROUGH_float through_last(float
#define THROUGH_dd through_gelu(dd
#if HALF
#include "half_norm_backward.cu"
#else
#include "norm_backward.cu"
#endif
