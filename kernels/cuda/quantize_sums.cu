// Add up the sums of columns that quantize_tile.cu made of each 128 rows, in the order of
// lokakern/sums.py: the same bits whatever the grid and whichever block ends first.
//
//     parts: float32 [tiles, columns], contiguous
//     sums:  float32 [columns]
//
// LINES threads share a column, each adding every LINES-th tile: where rows are many and columns few,
// one thread would wait for thousands of loads one after the other. Macros, set by quantize_sums.py:
//
//     COLUMNS  of a block: 8, which are 32 bytes of a row of parts
//     LINES    of a block: 64
#include "ptx.cuh"
#include "quantize_sums.cuh"

constexpr int THREADS = COLUMNS * LINES;
constexpr int WARPS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS) quantize_sums(
    const float* parts, float* sums, int tiles, int columns) {
    __shared__ float of_warps[WARPS][COLUMNS];

    const int mine = threadIdx.x % COLUMNS, line = threadIdx.x / COLUMNS;
    const long long column = static_cast<long long>(blockIdx.x) * COLUMNS + mine;
    const float* from = parts + column;
    begin_in_turn();

    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int tile = line; tile < tiles; tile += LINES) {
            sum += from[static_cast<long long>(tile) * columns];
        }
    }
#pragma unroll
    for (int distance = COLUMNS; distance < 32; distance *= 2) {
        sum += __uint_as_float(value_across(__float_as_uint(sum), distance));
    }
    if (threadIdx.x % 32 < COLUMNS) of_warps[threadIdx.x / 32][mine] = sum;
    __syncthreads();
    if (threadIdx.x < COLUMNS && column < columns) {
        float of_column[WARPS];
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) of_column[warp] = of_warps[warp][mine];
        sums[column] = sum_by_twos<WARPS>(of_column);
    }
}
