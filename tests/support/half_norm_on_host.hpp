// Stands in for kernels/cuda/half_ptx.cuh and half_relu_ptx.cuh where norm.cuh follows.
#ifndef HALF_NORM_ON_HOST
#define HALF_NORM_ON_HOST
#include "ptx.cuh"
#include "half_on_host.hpp"

static unsigned relu_of_halves(unsigned word) {
    unsigned larger = 0;
    for (int i = 0; i < 32; i += 16) {
        const unsigned half = word >> i & 0xffff;
        if ((half & 0x7fff) > 0x7c00) larger |= 0x7fffu << i;
        else if (!(half & 0x8000)) larger |= half << i;
    }
    return larger;
}
#endif
