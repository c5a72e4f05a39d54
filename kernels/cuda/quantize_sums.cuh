// What quantize_tile.cu and quantize_sums.cu share: sums in the order of lokakern/sums.py.
#pragma once

// The sum of a power of two of values: neighbors by twos, then their sums by twos, in their place.
template <int COUNT>
__device__ __forceinline__ float sum_by_twos(float* value) {
#pragma unroll
    for (int count = COUNT; count > 1; count /= 2) {
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            if (i < count / 2) value[i] = value[2 * i] + value[2 * i + 1];
        }
    }
    return value[0];
}

// What was made from a value is made anew from then on, not kept in registers.
__device__ __forceinline__ void forget(unsigned& value) { asm volatile("" : "+r"(value)); }
