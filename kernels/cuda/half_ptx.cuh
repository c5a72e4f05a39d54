// Conversions of float16, which C++ has no word for without a header of CUDA's.
#pragma once

// The float16 in the lower half of a word as float32, exactly; NaN stays NaN.
static __device__ __forceinline__ float from_half(unsigned bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
    return value;
}

// Two values as float16, the first in the low half: nearest even, infinity from 65520 on.
static __device__ __forceinline__ unsigned half_pair(float first, float second) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
