// Instructions that added_products.cu needs beside those of hopper.cuh.
//
//     d[64, WIDTH] = a[64, 16] b[16, WIDTH], plus d if `add`, where rows of b are contiguous
#pragma once
#define A_TYPE e4m3  // of products of FP8, of which there are none here
#define B_TYPE e4m3
#include "hopper.cuh"
#include "quantize_long_ptx.cuh"
#include "whole_products.cuh"

#if IS_FLOAT16
#define HALF "f16"
#else
#define HALF "bf16"
#endif
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define F64 F16(0), F16(16), F16(32), F16(48)
#define L64 L16_0 L16_1 L16_2 L16_3
#define DEFINE_PRODUCT(LIST, FIRST, SECOND, THIRD, ...)                                           \
    static __device__ __forceinline__ void multiply_as_they_lie(                                  \
        float (&d)[WIDTH / 2], unsigned long long a, unsigned long long b, int add) {             \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #THIRD ", 0;\n"                         \
                     "wgmma.mma_async.sync.aligned.m64n" TEXT(WIDTH) "k16.f32." HALF "." HALF     \
                     " {" LIST "}, %" #FIRST ", %" #SECOND ", p, 1, 1, 0, 1;\n}"                  \
                     : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));                                   \
    }
#if WIDTH == 32
DEFINE_PRODUCT(L16_0, 16, 17, 18, F16(0))
#elif WIDTH == 64
DEFINE_PRODUCT(L16_0 L16_1, 32, 33, 34, F16(0), F16(16))
#elif WIDTH == 96
DEFINE_PRODUCT(L16_0 L16_1 L16_2, 48, 49, 50, F16(0), F16(16), F16(32))
#elif WIDTH == 128
DEFINE_PRODUCT(L64, 64, 65, 66, F64)
#elif WIDTH == 160
DEFINE_PRODUCT(L64 L16_4, 80, 81, 82, F64, F16(64))
#elif WIDTH == 192
DEFINE_PRODUCT(L64 L16_4 L16_5, 96, 97, 98, F64, F16(64), F16(80))
#elif WIDTH == 224
DEFINE_PRODUCT(L64 L16_4 L16_5 L16_6, 112, 113, 114, F64, F16(64), F16(80), F16(96))
#elif WIDTH == 256
DEFINE_PRODUCT(L64 L16_4 L16_5 L16_6 L16_7, 128, 129, 130, F64, F16(64), F16(80), F16(96), F16(112))
#endif
#undef F4
#undef F16
#undef F64
#undef L64
#undef DEFINE_PRODUCT

// 16 rows of contiguous columns, in boxes of 64 rows of 64 columns whose 16-byte pieces are
// permuted (the copy's swizzle of 128 bytes): the next 64 columns are 8192 bytes on, the next 8 rows
// 1024.
static __device__ __forceinline__ unsigned long long columns_as_they_lie(unsigned address) {
    return 0x4000004000000000ull | (address >> 4 | 8192 / 16 << 16);
}

// Two sums rounded to what is stored, the first in the low half.
static __device__ __forceinline__ unsigned rounded_pair(float first, float second) {
    unsigned pair;
    asm("cvt.rn." HALF "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
