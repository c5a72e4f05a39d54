// Products of FP8 or bfloat16 whose sums stay in the tensor core's registers: of 32 bytes of each
// row, and of up to 256 columns at once, so that a is read from shared memory once.
//
//     d[64, COLUMNS] = a[64, 32 bytes] b[COLUMNS, 32 bytes]^T, plus d if `add`
#pragma once
#include "hopper.cuh"

#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R8(i) R4(i), R4(i + 4)
#define R16(i) R8(i), R8(i + 8)
#define R32(i) R16(i), R16(i + 16)
#define DEFINE_PRODUCT(NAME, KIND, ORDERS, COLUMNS, LIST, FIRST, SECOND, THIRD, ...)               \
    __device__ __forceinline__ void NAME(                                                         \
        float (&d)[COLUMNS / 2], unsigned long long a, unsigned long long b, int add) {           \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #THIRD ", 0;\n"                         \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS KIND " {" LIST "}, %" #FIRST    \
                     ", %" #SECOND ", p, 1, 1" ORDERS ";\n}"                                      \
                     : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));                                   \
    }
#define DEFINE_PRODUCTS(NAME, KIND, ORDERS)                                                       \
    DEFINE_PRODUCT(NAME, KIND, ORDERS, 8, L4_0, 4, 5, 6, R4(0))                                   \
    DEFINE_PRODUCT(NAME, KIND, ORDERS, 16, L8_0, 8, 9, 10, R8(0))                                 \
    DEFINE_PRODUCT(                                                                               \
        NAME, KIND, ORDERS, 24, L8_0 ", %8, %9, %10, %11", 12, 13, 14, R8(0), R4(8))              \
    DEFINE_PRODUCT(NAME, KIND, ORDERS, 32, L16_0, 16, 17, 18, R16(0))                             \
    DEFINE_PRODUCT(NAME, KIND, ORDERS, 64, L16_0 L16_1, 32, 33, 34, R32(0))                       \
    DEFINE_PRODUCT(NAME, KIND, ORDERS, 96, L16_0 L16_1 L16_2, 48, 49, 50, R32(0), R16(32))        \
    DEFINE_PRODUCT(                                                                               \
        NAME, KIND, ORDERS, 128, L16_0 L16_1 L16_2 L16_3, 64, 65, 66, R32(0), R32(32))            \
    DEFINE_PRODUCT(                                                                               \
        NAME, KIND, ORDERS, 256, L16_0 L16_1 L16_2 L16_3 L16_4 L16_5 L16_6 L16_7, 128, 129, 130,  \
        R32(0), R32(32), R32(64), R32(96))
#define L16_4 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define L16_5 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define L16_6                                                                                    \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define L16_7                                                                                    \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126" \
    ", %127"
DEFINE_PRODUCTS(multiply_bfloat16, "k16.f32.bf16.bf16", ", 0, 0")
#if BF16
#define multiply_whole multiply_bfloat16
#else
DEFINE_PRODUCTS(multiply_whole, "k32.f32." TEXT(A_TYPE) "." TEXT(B_TYPE), "")
#endif
#undef R4
#undef R8
#undef R16
#undef R32
#undef DEFINE_PRODUCT
#undef DEFINE_PRODUCTS

// A matrix whose blocks of 8 rows by 16 bytes each lie in one piece: the next along K `along` bytes
// on, the next 8 rows `down`. An address in a cluster has the block's rank above its 18 bits.
__device__ __forceinline__ unsigned long long plain_matrix(
    unsigned address, unsigned along, unsigned down) {
    return (address & 0x3ffff) >> 4 | static_cast<unsigned long long>(along >> 4) << 16 |
           static_cast<unsigned long long>(down >> 4) << 32;
}
