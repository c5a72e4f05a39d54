// Instructions of gelu.cuh without the care for subnormals that __expf and __fdividef take.
#pragma once

// 2^v within 2^-22.
static __device__ __forceinline__ float power_of_two(float v) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}

static __device__ __forceinline__ float reciprocal(float v) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(v));
    return inverse;
}
