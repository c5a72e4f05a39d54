// relu of float16, two in a word; NaN stays NaN.
#pragma once

static __device__ __forceinline__ unsigned relu_of_halves(unsigned word) {
    unsigned larger;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(word), "r"(0));
    return larger;
}
