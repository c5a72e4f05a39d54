// What kernels with a norm share: activations, conversions, scales of outputs.
#pragma once

#define INFINITE __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)

static __device__ __forceinline__ float from_bfloat16(unsigned bits) {
    return __uint_as_float(bits << 16);
}

static __device__ __forceinline__ unsigned bfloat16_pair(float first, float second) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

static __device__ __forceinline__ float sigmoid(float v) {
    return __fdividef(1.0f, 1.0f + __expf(-v));
}

// 0: nothing; 1: relu; 2: hardswish; 3: silu. NaN stays NaN, which saturating would make 0.
template <int WHICH>
static __device__ __forceinline__ float activated(float v) {
    if constexpr (WHICH == 1) return v > 0.0f || v != v ? v : 0.0f;
    if constexpr (WHICH == 2) return v * __saturatef(fmaf(v, 1.0f / 6.0f, 0.5f));
    if constexpr (WHICH == 3) return v * sigmoid(v);
    return v;
}

// A quotient by this scale is its product with the reciprocal, which differs by a rounding of
// float32: as statistics do, added up in any order, long before FP8 tells.
static __device__ __forceinline__ float scale_for(float amax) {
    return amax == 0.0f ? 1.0f : fmaxf(__fdiv_rn(amax, 448.0f), 1.17549435e-38f);
}

// Makes the scale of a row that of the row times `factor`, and leaves its elements as they are.
// Where there is no such scale they are multiplied: by 0 or NaN, which is what becomes of them.
static __device__ __forceinline__ void fold(
    float factor, float amax, float& scale, float& inverse) {
    const bool usual = factor > 0.0f && factor < INFINITE && amax > 0.0f;
    scale = usual ? scale * factor : 1.0f;
    inverse = usual ? inverse : factor;
}
