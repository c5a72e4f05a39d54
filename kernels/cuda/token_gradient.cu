// The gradient of a weight that multiplies across tokens, on Hopper: a sum over samples and columns.
//
//     out[part][i, j] = sum_b sum_d grad[b, i, d] x[b, j, d]
//
// for the samples b of each part, in float32.
//
//     grad:  [batch, count, D], bfloat16 or float16, by a tensor map
//     x:     [batch, n, D]
//     out:   [parts, count, n]
//
// Both are read as they lie: rows of a sample are contiguous along what is summed. At 8192 samples,
// count 192, n 770 and D 160 they are 2.5 GB, 0.6 ms of an H200, and the products take 0.4. What
// counts is how often they pass the L2: Triton's tiles of 64 x 128 read x three times and grad seven
// times, 9.6 GB; a tile here has all of up to 192 rows, and up to 256 columns: 4 GB.
//
// A block owns a tile and a part. One thread copies boxes of 64 columns of a sample into a ring; each
// warpgroup multiplies 64 rows, with one step in flight. Blocks of a part lie side by side, so that
// they read grad at the same time.
//
// Macros, from token_gradient.py:
//
//     D           columns of a sample
//     WARPGROUPS  1 to 3, of 64 rows each
//     WIDTH       columns of a tile: 64, 96, 128, 160, 192, 224, or 256 of at most 2 warpgroups
//     STAGES      of the ring
//     IS_FLOAT16  1 where operands are float16, 0 for bfloat16
#define A_TYPE e4m3  // of products of FP8, of which there are none here
#define B_TYPE e4m3
#define BF16 1
#if IS_FLOAT16
#include "half_whole_products.cuh"
#else
#include "whole_products.cuh"
#endif

constexpr int DEPTH = 64, ROW_BYTES = DEPTH * 2;  // of a step: the span of the copies' swizzle
constexpr int STEPS = (D + DEPTH - 1) / DEPTH;
constexpr int LAST_PRODUCTS = (D - (STEPS - 1) * DEPTH + 15) / 16;  // of 16 columns, in the last step
constexpr int ROWS = 64 * WARPGROUPS;
constexpr int FIRST = WIDTH == 256 ? 256 : WIDTH < 128 ? WIDTH : 128;  // columns of one product
constexpr int SECOND = WIDTH - FIRST;                                 // and of another
constexpr int GRAD_BYTES = ROWS * ROW_BYTES, X_BYTES = WIDTH * ROW_BYTES;
constexpr int STAGE_BYTES = GRAD_BYTES + X_BYTES;
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES;
constexpr int MATH_THREADS = 128 * WARPGROUPS;
constexpr int THREADS = MATH_THREADS + (WARPGROUPS > 1 ? 128 : 32);
// Of a thread, where there is more than one warpgroup: 64512 of the SM's 65536 in all.
constexpr int MATH_REGISTERS = WARPGROUPS == 3 ? 160 : 232;
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 3 ? 24 : 40;
static_assert(STAGES >= 2 && STAGE_BYTES % 1024 == 0, "boxes are permuted from there");

using Sums = float[WIDTH / 2];

struct Ring {
    unsigned base;
    int stage = 0;
    unsigned parity = 0;

    __device__ __forceinline__ unsigned grad() const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ unsigned x() const { return grad() + GRAD_BYTES; }
    __device__ __forceinline__ unsigned full() const { return base + BARRIERS_AT + stage * 16; }
    __device__ __forceinline__ unsigned empty() const { return full() + 8; }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ void produce(
    Ring ring, const TensorMap& grad, const TensorMap& x, int row, int column, int first, int last) {
    for (int sample = first; sample < last; ++sample) {
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            wait(ring.empty(), ring.parity ^ 1);
            expect_bytes(ring.full(), STAGE_BYTES);  // what lies outside of a tensor reads as 0
            load_box(ring.grad(), grad, ring.full(), step * DEPTH, row, sample);
            load_box(ring.x(), x, ring.full(), step * DEPTH, column, sample);
            ring.advance();
        }
    }
}

// COLUMNS of a tile from AT on; none where there is no second product.
template <int AT, int COLUMNS>
__device__ __forceinline__ void multiply_columns(
    Sums& sums, unsigned long long left, unsigned long long right, bool adds) {
    if constexpr (COLUMNS > 0) {
        multiply_whole(reinterpret_cast<float (&)[COLUMNS / 2]>(sums[AT / 2]), left, right, adds);
    }
}

template <int PRODUCTS>
__device__ __forceinline__ void issue(Sums& sums, const Ring& ring, int warpgroup, bool adds) {
    const Matrix<ROW_BYTES> left(ring.grad() + warpgroup * 64 * ROW_BYTES), right(ring.x());
    begin_products();
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
        multiply_columns<0, FIRST>(sums, left.at(i * 32), right.at(i * 32), adds || i > 0);
        multiply_columns<FIRST, SECOND>(
            sums, left.at(i * 32), right.at(FIRST * ROW_BYTES + i * 32), adds || i > 0);
    }
    commit_products();
}

__device__ __forceinline__ void multiply(Sums& sums, Ring ring, int warpgroup, int steps) {
    Ring before = ring;
    int step = 0;  // of a sample
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
        wait(ring.full(), ring.parity);
        if (STEPS == 1 || step == STEPS - 1) {
            issue<LAST_PRODUCTS>(sums, ring, warpgroup, i > 0);
            step = 0;
        } else {
            issue<DEPTH / 16>(sums, ring, warpgroup, i > 0);
            ++step;
        }
        if (i > 0) {
            wait_for_products<1>();
            if (threadIdx.x % 32 == 0) arrive(before.empty());
            before.advance();
        }
        ring.advance();
    }
    wait_for_products<0>();
    pin(sums);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) token_gradient(
    float* out, int count, int n, int batch, int samples, int tiles_n, int tiles,
    const __grid_constant__ TensorMap grad, const __grid_constant__ TensorMap x) {
    extern __shared__ char shared[];
    const Ring ring{shared_address(shared)};
    if (ring.base % 1024) asm volatile("trap;");  // swizzles are counted from there
    const int part = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int row = tile / tiles_n * ROWS, column = tile % tiles_n * WIDTH;
    const int first = part * samples, last = min(first + samples, batch);
    if (threadIdx.x == MATH_THREADS) {
        prefetch_map(grad);
        prefetch_map(x);
        for (int stage = 0; stage < STAGES; ++stage) {
            initialize_barrier(ring.base + BARRIERS_AT + stage * 16, 1);
            initialize_barrier(ring.base + BARRIERS_AT + stage * 16 + 8, 4 * WARPGROUPS);  // warps
        }
        publish_barriers();
    }
    __syncthreads();
    begin_in_turn();

    if (threadIdx.x >= MATH_THREADS) {
        if constexpr (WARPGROUPS > 1) give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == MATH_THREADS) produce(ring, grad, x, row, column, first, last);
        return;
    }
    if constexpr (WARPGROUPS > 1) take_registers<MATH_REGISTERS>();
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be uniform
    Sums sums;
    multiply(sums, ring, warpgroup, (last - first) * STEPS);
    const int first_row = row + warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const int first_column = column + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) {
        const int at_row = first_row + i / 2 % 2 * 8;
        const int at_column = first_column + i / 4 * 8 + i % 2;
        if (at_row < count && at_column < n) {
            out[(static_cast<long long>(part) * count + at_row) * n + at_column] = sums[i];
        }
    }
}
