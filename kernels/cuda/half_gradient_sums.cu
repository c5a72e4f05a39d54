// gradient_sums.cu of gradients in float16: the same sums, infinite from 65520 on.
#include "half_ptx.cuh"
#include "ptx.cuh"
#include "quantize_sums.cuh"

__device__ __forceinline__ unsigned short to_float16(float value) {
    return static_cast<unsigned short>(half_pair(value, 0.0f));
}

// The first word in the brackets tells the definition, whose word is a type, from the call.
#define to_bfloat16(value) TO_##value)
#define TO_float to_unused(float
#define TO_sum_by_twos to_float16(sum_by_twos
#include "gradient_sums.cu"
