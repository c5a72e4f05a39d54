// GELU in the place of silu: included before a source that was written without it, whose text is part
// of the digest of rows and stays as it is. What such a program calls silu, 3, is GELU.
//
//     BY_TANH  0: v Phi(v), of the normal distribution; 1: its approximation by tanh
#pragma once

#include "gelu_ptx.cuh"

// GELU of v over v, as 1 / (1 + 2^(v p(v^2))): 12 instructions of an element, and 7 by tanh.
static __device__ __forceinline__ float gelu_factor(float v) {
    const float square = v * v;
#if BY_TANH
    // (1 + tanh(u / 2)) / 2 = 1 / (1 + exp(-u)), u = 2 sqrt(2 / pi) (v + 0.044715 v^3).
    const float p = fmaf(square, -0.10294324f, -2.3022082f);
#else
    // log2(1 / Phi(v) - 1) over v within 0.001 to |v| = 4.8, where its share in Phi is largest best:
    // GELU is within 6e-7 of float64's, and relatively within 0.0008 down to v = -4.5. Beyond, it goes
    // to 0 a little sooner.
    float p = fmaf(square, -4.25724256e-9f, 3.38525126e-7f);
    p = fmaf(square, p, -1.06554126e-5f);
    p = fmaf(square, p, 1.53404442e-4f);
    p = fmaf(square, p, 1.15744762e-4f);
    p = fmaf(square, p, -0.10486605f);
    p = fmaf(square, p, -2.3021965f);
#endif
    return reciprocal(1.0f + power_of_two(v * p));
}

static __device__ __forceinline__ float gelu(float v) {
    return v * gelu_factor(v);
}

// Its derivative; NaN at infinity, as torch's is.
static __device__ __forceinline__ float gelu_slope(float v) {
    const float factor = gelu_factor(v);
#if BY_TANH
    return factor * fmaf(v * fmaf(v * v, 0.21406445f, 1.5957691f), 1.0f - factor, 1.0f);
#else
    return fmaf(v, 0.39894228f * power_of_two(v * v * -0.72134752f), factor);  // v times the density
#endif
}

// As `activated` of norm.cuh.
template <int WHICH>
static __device__ __forceinline__ float activated_by_gelu(float v) {
    static_assert(WHICH == 3, "GELU has the number of silu");
    return gelu(v);
}
