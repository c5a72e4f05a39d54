// Products of float16, as whole_products.cuh has them of bfloat16, in whose place they are.
#pragma once
#include "whole_products.cuh"
#undef multiply_whole

#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R8(i) R4(i), R4(i + 4)
#define R16(i) R8(i), R8(i + 8)
#define R32(i) R16(i), R16(i + 16)
#define DEFINE_PRODUCT(COLUMNS, LIST, FIRST, SECOND, THIRD, ...)                                  \
    __device__ __forceinline__ void multiply_whole(                                               \
        float (&d)[COLUMNS / 2], unsigned long long a, unsigned long long b, int add) {           \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #THIRD ", 0;\n"                         \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.f16.f16 {" LIST "}, %" \
                     #FIRST ", %" #SECOND ", p, 1, 1, 0, 0;\n}"                                   \
                     : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));                                   \
    }
DEFINE_PRODUCT(8, L4_0, 4, 5, 6, R4(0))
DEFINE_PRODUCT(16, L8_0, 8, 9, 10, R8(0))
DEFINE_PRODUCT(24, L8_0 ", %8, %9, %10, %11", 12, 13, 14, R8(0), R4(8))
DEFINE_PRODUCT(32, L16_0, 16, 17, 18, R16(0))
DEFINE_PRODUCT(64, L16_0 L16_1, 32, 33, 34, R32(0))
DEFINE_PRODUCT(96, L16_0 L16_1 L16_2, 48, 49, 50, R32(0), R16(32))
DEFINE_PRODUCT(128, L16_0 L16_1 L16_2 L16_3, 64, 65, 66, R32(0), R32(32))
DEFINE_PRODUCT(
    256, L16_0 L16_1 L16_2 L16_3 L16_4 L16_5 L16_6 L16_7, 128, 129, 130, R32(0), R32(32), R32(64),
    R32(96))
#undef R4
#undef R8
#undef R16
#undef R32
#undef DEFINE_PRODUCT
