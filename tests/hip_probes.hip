// One kernel for each thing that amd.hpp asks a GPU for, small enough that its instructions are known:
// see test_hip_instructions.py.
#include "amd.hpp"

#define KERNEL extern "C" __global__ __launch_bounds__(256) void

KERNEL encodes(const float* x, unsigned* codes) { *codes = encode_pair(x[0], x[1]); }

KERNEL decodes(const unsigned* codes, float* x) {
    x[0] = decoded<0>(*codes);
    x[1] = decoded<1>(*codes);
    x[2] = decoded<2>(*codes);
    x[3] = decoded<3>(*codes);
}

KERNEL multiplies(const Words8* x, Floats4* sums) {
    const int i = lane_index();
    sums[i] = multiply(x[i], x[i + 64], sums[i]);
}

#ifndef __gfx942__
KERNEL multiplies_scaled(const Words8* x, Floats4* sums, const int* scales) {
    const int i = lane_index();
    sums[i] = multiply_scaled(x[i], x[i + 64], sums[i], scales[i], scales[i + 64]);
}
#endif

KERNEL copies(const Words4* from, Words4* to) {
    __shared__ Words4 stage[512];
    const int i = thread_index();
    Copies<2> two;
    two.begin(0, from + i, stage + i);
    two.begin(1, from + 256 + i, stage + 256 + i);
    two.end(0, stage + i);
    two.end(1, stage + 256 + i);
    barrier();
    to[i] = stage[511 - i];
}

KERNEL waits(const int* from, int* to) {
    __shared__ int stage[256];
    const int i = thread_index();
    stage[i] = from[i];
    barrier();
    to[i] = stage[255 - i];
}

KERNEL shuffles(float* x) { x[thread_index()] = value_across(x[thread_index()], 16); }

KERNEL computes(float* x) {
    x[thread_index()] = power_of_two(x[thread_index()]);
    x[thread_index() + 64] = square_root(x[thread_index() + 64]);
}
