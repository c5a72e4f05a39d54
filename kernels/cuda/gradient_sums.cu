// quantize_sums.cu of gradients in bfloat16, as those of bfloat16 vectors are: the same sums in the
// same order, rounded once. Rounding them later would take a launch for each vector.
//
//     parts: float32 [tiles, columns], contiguous
//     sums:  bfloat16 [columns]
//
// Macros: COLUMNS and LINES of quantize_sums.cu, from gradient_sums.py.
#include "ptx.cuh"
#include "quantize_sums.cuh"

constexpr int THREADS = COLUMNS * LINES;
constexpr int WARPS = THREADS / 32;

// To the nearest, ties to even.
__device__ __forceinline__ unsigned short to_bfloat16(float value) {
    const unsigned bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

extern "C" __global__ void __launch_bounds__(THREADS) gradient_sums(
    const float* parts, unsigned short* sums, int tiles, int columns) {
    __shared__ float of_warps[COLUMNS][WARPS];

    const int mine = threadIdx.x % COLUMNS, line = threadIdx.x / COLUMNS;
    const long long column = static_cast<long long>(blockIdx.x) * COLUMNS + mine;
    begin_in_turn();

    float sum = 0.0f;
    if (column < columns) {
        const float* from = parts + column;
#pragma unroll 8
        for (int tile = line; tile < tiles; tile += LINES) {
            sum += from[static_cast<long long>(tile) * columns];
        }
    }
#pragma unroll
    for (int distance = COLUMNS; distance < 32; distance *= 2) {
        sum += __uint_as_float(value_across(__float_as_uint(sum), distance));
    }
    if (threadIdx.x % 32 < COLUMNS) of_warps[mine][threadIdx.x / 32] = sum;
    __syncthreads();
    if (line == 0 && column < columns) {
        sums[column] = to_bfloat16(sum_by_twos<WARPS>(of_warps[mine]));
    }
}
