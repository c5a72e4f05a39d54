// Instructions of dequantize.cu beside those of ptx.cuh.
#pragma once
#include "half_ptx.cuh"

// 8 or 4 bytes of global memory, past the L1: every byte is used once and at once. Volatile, so that
// loads stay together and all of them are in flight before the first is used.
static __device__ __forceinline__ void load_word(const void* from, unsigned long long& word) {
    asm volatile("ld.global.L1::no_allocate.u64 %0, [%1];" : "=l"(word) : "l"(from));
}
static __device__ __forceinline__ void load_word(const void* from, unsigned& word) {
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(from));
}

// The same where neighbors read it again soon.
static __device__ __forceinline__ void load_cached_word(
    const void* from, unsigned long long& word) {
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(word) : "l"(from));
}
static __device__ __forceinline__ void load_cached_word(const void* from, unsigned& word) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(from));
}

static __device__ __forceinline__ void store_16_bytes(void* to, const unsigned* word) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
}

// Two FP8 bytes as float16, the first in the low half, exactly; NaN stays NaN.
template <bool E5M2>
static __device__ __forceinline__ unsigned decode_pair(unsigned bytes) {
    unsigned pair;
    if constexpr (E5M2) {
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(static_cast<unsigned short>(bytes)));
    } else {
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<unsigned short>(bytes)));
    }
    return pair;
}

// Two values as bfloat16, the first in the low half: nearest even.
static __device__ __forceinline__ unsigned bfloat16_pair(float first, float second) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
