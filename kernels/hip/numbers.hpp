// Numbers as they lie in memory: bfloat16 and float32.
#pragma once
#include "amd.hpp"

static __device__ inline float number(float value) { return value; }
static __device__ inline float number(unsigned short bits) {
    return float_of(static_cast<unsigned>(bits) << 16);
}

static __device__ inline unsigned short rounded(float value) {
    return static_cast<unsigned short>(bfloat16_pair(value, 0.0f));
}
