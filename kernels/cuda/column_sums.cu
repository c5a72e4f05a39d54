// Sums of 128 rows each of a matrix in bfloat16, for gradient_sums.cu: its bytes are read once, by
// loads that are all in flight before the first sum.
//
//     x:     bfloat16 [rows, columns], rows start at multiples of 16 bytes
//     parts: float32 [ceil(rows / 128), columns], contiguous; rows that are not there are 0
//
// The order is that of lokakern/sums.py: neighbors by twos, and their sums by twos. Columns are a
// multiple of CHUNK.
//
// Macros, from column_sums.py: CHUNK, the columns of 16 bytes; SIDE, the rows of a part; and WARPS of
// a block, each of which has SIDE / WARPS neighboring rows.
#include "ptx.cuh"
#include "quantize_sums.cuh"

constexpr int LANES = 32;
constexpr int HELD = SIDE / WARPS;      // rows of a thread
constexpr int SPAN = LANES * CHUNK;     // columns of a block
constexpr int THREADS = LANES * WARPS;
static_assert(SIDE % WARPS == 0 && (HELD & (HELD - 1)) == 0 && (WARPS & (WARPS - 1)) == 0);

extern "C" __global__ void __launch_bounds__(THREADS) column_sums(
    const unsigned short* x, float* parts, int rows, int columns, long long stride) {
    __shared__ float of_warps[WARPS][SPAN];

    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int spans = (columns + SPAN - 1) / SPAN;
    const int tile = blockIdx.x / spans, first_column = blockIdx.x % spans * SPAN;
    const int column = first_column + lane * CHUNK;
    const int row = tile * SIDE + warp * HELD;
    const bool inside = column < columns;
    begin_in_turn();

    unsigned word[HELD][CHUNK / 2];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
#pragma unroll
        for (int j = 0; j < CHUNK / 2; ++j) word[i][j] = 0;
        if (inside && row + i < rows) load_16_bytes(x + (row + i) * stride + column, word[i]);
    }
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
        float value[HELD];
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const unsigned both = word[i][j / 2];
            value[i] = __uint_as_float(j % 2 ? both & 0xffff0000u : both << 16);
        }
        // Lanes write to neighboring banks: column j of each lane.
        of_warps[warp][j * LANES + lane] = sum_by_twos<HELD>(value);
    }
    __syncthreads();
    for (int mine = threadIdx.x; mine < SPAN; mine += THREADS) {
        float value[WARPS];
#pragma unroll
        for (int i = 0; i < WARPS; ++i) value[i] = of_warps[i][mine % CHUNK * LANES + mine / CHUNK];
        const int to = first_column + mine;
        if (to < columns) {
            parts[static_cast<long long>(tile) * columns + to] = sum_by_twos<WARPS>(value);
        }
    }
}
