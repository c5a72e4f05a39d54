// Sums and largest values of the rows of a tile, over the 16 threads that share them, and of its
// columns: 8 rows of 8 columns a thread.
#pragma once
#include "norm_backward_ptx.cuh"
#include "ptx.cuh"

struct Sum {
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct Largest {
    static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

__device__ __forceinline__ float across_warp(float value, int distance) {
    return __uint_as_float(value_across(__float_as_uint(value), distance));
}

// Of two threads that differ by `distance`, the lower keeps the first half of the values and the
// upper the second, each with the other's.
template <class Way, int COUNT>
__device__ __forceinline__ void fold(float* value, int distance) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
        const float given = upper ? value[i] : value[i + COUNT / 2];
        const float kept = upper ? value[i + COUNT / 2] : value[i];
        value[i] = Way::of(kept, across_warp(given, distance));
    }
}

// Of each of 8 rows, over the 16 threads that share them: threads 2 i and 2 i + 1 have that of row i.
template <class Way>
__device__ __forceinline__ float of_rows(float (&value)[8]) {
    fold<Way, 8>(value, 8);
    fold<Way, 4>(value, 4);
    fold<Way, 2>(value, 2);
    return Way::of(value[0], across_warp(value[0], 1));
}

// What `of_rows` left in one thread of a row, in all of them.
__device__ __forceinline__ void spread(float value, float (&of_row)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        of_row[i] = value_of_lane(value, (threadIdx.x & 16) | 2 * i);
    }
}

// The sum of 8 values as they come, in the order of `sum_by_twos`: 3 are pending at most.
struct Adder {
    float pending[4];

    __device__ __forceinline__ void add(int index, float value) {
#pragma unroll
        for (int level = 0; level < 3; ++level) {
            if ((index >> level & 1) == 0) {
                pending[level] = value;
                return;
            }
            value = pending[level] + value;
        }
        pending[3] = value;
    }
};
