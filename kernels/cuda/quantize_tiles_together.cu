// Quantize one or two matrices to FP8 in one launch, transposed, in tiles of 128 x 128; byte for byte
// as lokakern.numerics.
//
//     s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))
//
//     x:      [rows, columns], bfloat16 or float32, rows x_stride elements apart
//     data:   [columns, rows], FP8 bytes, rows data_stride bytes apart
//     scale:  float32, of column c and tile row h at scale[h * scale_stride + c]; with BLOCK of tile
//             column g and tile row h at scale[g * scale_stride + h]
//     end:    first block behind those of the first matrix
//
// Macros besides those of quantize.cuh, set by quantize_together.py:
//
//     JOBS             matrices
//     BLOCK0, BLOCK1   1 if all of a tile has one scale, 0 if a column of it has one
//     RAGGED           1 where columns of a matrix are no multiple of a chunk
#include "quantize_turned.cuh"

constexpr int SIDE = 128, CHUNKS = SIDE / CHUNK;
constexpr int PARTS = SIDE / (THREADS / CHUNKS * ROWS);  // that a thread holds: 1 of bfloat16, 2
constexpr int WORDS = CHUNKS * 4;

struct Matrix {
    const char* x;
    unsigned char* data;
    float* scale;
    int rows, columns;
    long long x_stride, data_stride, scale_stride;
};

template <bool BLOCK>
__device__ __forceinline__ void quantize_tile(const Matrix& of, unsigned tile) {
    __shared__ unsigned of_warps[WARPS][WORDS];
    __shared__ float column_scale[SIDE];
    __shared__ Piece turned[PARTS][SIDE * SIDE / 16 / PARTS];

    const int across = (of.columns + SIDE - 1) / SIDE;
    const int tile_row = tile / across, tile_column = tile % across;
    const int chunk = threadIdx.x % CHUNKS, band = threadIdx.x / CHUNKS;
    const int first_row = tile_row * SIDE, first_column = tile_column * SIDE;
    const int rows = of.rows - first_row, columns = of.columns - first_column;
    constexpr int TALL = SIDE / PARTS;
    Part part[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        const long long row = first_row + i * TALL + band * ROWS;
        load_part(part[i], of.x + (row * of.x_stride + first_column + chunk * CHUNK) * INPUT_BYTES,
                  of.x_stride * INPUT_BYTES, rows - i * TALL - band * ROWS,
                  columns - chunk * CHUNK);
    }
    unsigned magnitudes[4];
    const auto find = [&](bool finite) {
#pragma unroll
        for (int j = 0; j < 4; ++j) magnitudes[j] = 0;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) enlarge(magnitudes, part[i], finite);
    };
    find(false);
    if (any_infinite(magnitudes[0]) || any_infinite(magnitudes[1]) || any_infinite(magnitudes[2]) ||
        any_infinite(magnitudes[3])) {
        find(true);
    }
    write_largest<CHUNKS>(magnitudes, of_warps);
    __syncthreads();
    unsigned amax = 0;
    if (threadIdx.x < SIDE) {
        unsigned largest = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            largest = larger(largest, of_warps[warp][threadIdx.x / PER_WORD]);
        }
        amax = of_column(largest, threadIdx.x);
        if constexpr (!BLOCK) {
            const float decode = decode_scale(amax);
            column_scale[threadIdx.x] = decode;
            if (static_cast<int>(threadIdx.x) < columns) {
                of.scale[tile_row * of.scale_stride + first_column + threadIdx.x] = decode;
            }
        }
    }
    __syncthreads();
    if constexpr (BLOCK) {
        amax = largest_of_warp(amax);
        if (threadIdx.x % 32 == 0) of_warps[0][threadIdx.x / 32] = amax;
        __syncthreads();
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) amax = max(amax, of_warps[0][warp]);
        const float decode = decode_scale(amax);
        if (threadIdx.x < SIDE) column_scale[threadIdx.x] = decode;
        if (threadIdx.x == 0) of.scale[tile_column * of.scale_stride + tile_row] = decode;
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < PARTS; ++i) turn<CHUNKS>(part[i], column_scale, turned[i]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        write_turned<CHUNKS>(turned[i],
                             of.data + first_column * of.data_stride + first_row + i * TALL,
                             of.data_stride, columns, min(rows - i * TALL, TALL));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, HALVES ? 3 : 1) quantize_tiles_together(
    const char* x0, unsigned char* data0, float* scale0, const char* x1, unsigned char* data1,
    float* scale1, int rows0, int columns0, int rows1, int columns1, int end, long long x_stride0,
    long long data_stride0, long long scale_stride0, long long x_stride1, long long data_stride1,
    long long scale_stride1) {
    begin_in_turn();
    const int block = blockIdx.x;
    if (JOBS == 1 || block < end) {
        quantize_tile<BLOCK0>(
            {x0, data0, scale0, rows0, columns0, x_stride0, data_stride0, scale_stride0}, block);
        return;
    }
    if constexpr (JOBS > 1) {
        quantize_tile<BLOCK1>(
            {x1, data1, scale1, rows1, columns1, x_stride1, data_stride1, scale_stride1},
            block - end);
    }
}
