// quantize_tensor.cu for x in float16, see half_quantize.cuh.
#include "half_quantize.cuh"

// What is not finite is seldom, and masked only then: threads wait for the maxima of all.
__device__ __forceinline__ unsigned larger_finite_half(const unsigned* word, unsigned so_far) {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = larger_halves(largest, word[i] & 0x7fff7fffu);
    if (any_infinite_half(largest)) return larger_finite_magnitude(word, so_far);
    return max(so_far, max(largest << 16, largest & 0xffff0000u));
}

#define larger_finite_magnitude larger_finite_half
#include "quantize_tensor.cu"
