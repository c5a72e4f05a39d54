// Stands in for kernels/cuda/half_ptx.cuh and half_relu_ptx.cuh where norm.cuh follows, which needs
// more of what NVRTC knows by itself.
#ifndef HALF_NORM_ON_HOST
#define HALF_NORM_ON_HOST
#include "ptx.cuh"
#include "half_on_host.hpp"

static float __int_as_float(int bits) { return __uint_as_float(bits); }
static float __fdividef(float a, float b) { return a / b; }
#define __expf(v) std::exp(v)  // the name of a function of glibc's
static float __saturatef(float v) { return v > 0.0f ? std::min(v, 1.0f) : 0.0f; }
static float rsqrtf(float v) { return 1.0f / std::sqrt(v); }

static float __shfl_xor_sync(unsigned, float value, int distance) {
    return __uint_as_float(value_across(__float_as_uint(value), distance));
}

struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};

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
