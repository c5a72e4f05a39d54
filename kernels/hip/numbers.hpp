// Numbers as they lie in memory: bfloat16 and float32.
#pragma once
#include "amd.hpp"

static __device__ inline float number(float value) { return value; }
static __device__ inline float number(unsigned short bits) {
    return float_of(static_cast<unsigned>(bits) << 16);
}

// To bfloat16, to nearest even.
static __device__ inline unsigned short rounded(float value) {
    const unsigned bits = bits_of(value);
    if (value != value) return 0x7fc0;
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
