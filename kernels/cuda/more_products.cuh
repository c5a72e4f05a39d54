// Products of PRODUCT_N columns that whole_products.cuh has not.
#pragma once
#include "whole_products.cuh"

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F8(i) F4(i), F4(i + 4)
#define F16(i) F8(i), F8(i + 8)
#define F64 F16(0), F16(16), F16(32), F16(48)
#define L64 L16_0 L16_1 L16_2 L16_3
#define DEFINE_PRODUCT(COLUMNS, LIST, FIRST, SECOND, THIRD, ...)                                  \
    __device__ __forceinline__ void multiply_whole(                                               \
        float (&d)[COLUMNS / 2], unsigned long long a, unsigned long long b, int add) {           \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #THIRD ", 0;\n"                         \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32." TEXT(A_TYPE) "."     \
                     TEXT(B_TYPE) " {" LIST "}, %" #FIRST ", %" #SECOND ", p, 1, 1;\n}"           \
                     : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));                                   \
    }
#if PRODUCT_N == 48
DEFINE_PRODUCT(48, L16_0 ", %16, %17, %18, %19, %20, %21, %22, %23", 24, 25, 26, F16(0), F8(16))
#elif PRODUCT_N == 80
DEFINE_PRODUCT(80, L16_0 L16_1 ", %32, %33, %34, %35, %36, %37, %38, %39", 40, 41, 42,
               F16(0), F16(16), F8(32))
#elif PRODUCT_N == 112
DEFINE_PRODUCT(112, L16_0 L16_1 L16_2 ", %48, %49, %50, %51, %52, %53, %54, %55", 56, 57, 58,
               F16(0), F16(16), F16(32), F8(48))
#elif PRODUCT_N == 144
DEFINE_PRODUCT(144, L64 ", %64, %65, %66, %67, %68, %69, %70, %71", 72, 73, 74, F64, F8(64))
#elif PRODUCT_N == 160
DEFINE_PRODUCT(160, L64 L16_4, 80, 81, 82, F64, F16(64))
#elif PRODUCT_N == 176
DEFINE_PRODUCT(176, L64 L16_4 ", %80, %81, %82, %83, %84, %85, %86, %87", 88, 89, 90,
               F64, F16(64), F8(80))
#elif PRODUCT_N == 192
DEFINE_PRODUCT(192, L64 L16_4 L16_5, 96, 97, 98, F64, F16(64), F16(80))
#elif PRODUCT_N == 208
DEFINE_PRODUCT(208, L64 L16_4 L16_5 ", %96, %97, %98, %99, %100, %101, %102, %103", 104, 105, 106,
               F64, F16(64), F16(80), F8(96))
#elif PRODUCT_N == 224
DEFINE_PRODUCT(224, L64 L16_4 L16_5 L16_6, 112, 113, 114, F64, F16(64), F16(80), F16(96))
#endif
#undef F4
#undef F8
#undef F16
#undef F64
#undef L64
#undef DEFINE_PRODUCT
