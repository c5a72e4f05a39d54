// Instructions that C++ has no word for, and no header of CUDA's is needed for.
#pragma once

// 16 bytes of global memory, past the L1: every byte is used once and at once. Volatile, so that
// loads stay together and all of them are in flight before the first is used.
static __device__ __forceinline__ void load_16_bytes(const void* from, unsigned* word) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(from));
}

// The larger of each half of two words, as unsigned integers.
static __device__ __forceinline__ unsigned larger_halves(unsigned a, unsigned b) {
    unsigned larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// Largest value of the 32 threads of a warp, in one instruction.
static __device__ __forceinline__ unsigned largest_of_warp(unsigned value) {
    unsigned largest;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
    return largest;
}

// The value of the thread of the same warp whose number differs by exclusive or.
static __device__ __forceinline__ unsigned value_across(unsigned value, int distance) {
    return __shfl_xor_sync(0xffffffffu, value, distance);
}

static __device__ __forceinline__ bool any_of_warp(bool condition) {
    return __any_sync(0xffffffffu, condition);
}

// Two values as FP8 bytes, the first in the low byte: nearest even, saturating, NaN to 0x7f.
template <bool E5M2>
static __device__ __forceinline__ unsigned encode_pair(float first, float second) {
    unsigned short pair;
    if constexpr (E5M2) {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    } else {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    }
    return pair;
}
