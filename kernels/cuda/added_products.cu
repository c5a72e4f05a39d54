// The sum of two products of each sample, of which one has a left operand for all samples, on
// Hopper.
//
//     out[s] = a[s] b[s] + w x[s]
//
//     a:    [batch, m, K], bfloat16 or float16, by a tensor map, as all operands
//     b:    [batch, K, n]
//     w:    [m, R]
//     x:    [batch, R, n]
//     out:  [batch, m, n], of the same type, without gaps; sums are float32, rounded once
//
// At 8192 samples, m 720, K 48, R 192 and n 160 these are 3.1 GB, 0.72 ms of an H200, and the
// products take 0.46. A block owns up to 192 rows of w, which stay in shared memory, and takes
// every so many-th sample; blocks of the same samples lie side by side, so that they read b and x
// at the same time. One thread copies, into a ring of slots: a of a sample, b, and x in steps of 64
// rows. Each warpgroup multiplies 64 rows. It may be a sample ahead of others, so that they
// multiply while it writes.
//
// b and x are multiplied as they lie, columns contiguous, in boxes of 64 rows of 64 columns. Output
// is written by way of a piece of shared memory of each warp: bulk copies were no faster.
//
// Macros, from added_products.py:
//
//     K, R        length of both sums, up to 64 and 256
//     WARPGROUPS  1 to 3, of 64 rows each
//     WIDTH       columns of a sample, or more: a multiple of 32 up to 256
//     SLOTS       of the ring, at least 3
//     IS_FLOAT16  1 where operands are float16, 0 for bfloat16
#include "added_products_ptx.cuh"

constexpr int DEPTH = 64, LINE_BYTES = DEPTH * 2;  // of a step; of a row of a or w in it
constexpr int BOX_COLUMNS = 64, BOX_BYTES = DEPTH * BOX_COLUMNS * 2;
constexpr int BOXES = (WIDTH + BOX_COLUMNS - 1) / BOX_COLUMNS;
constexpr int STEPS = (R + DEPTH - 1) / DEPTH;
constexpr int A_PRODUCTS = (K + 15) / 16, LAST_PRODUCTS = (R - (STEPS - 1) * DEPTH + 15) / 16;
constexpr int ROWS = 64 * WARPGROUPS;
constexpr int LEFT_BYTES = ROWS * LINE_BYTES, RIGHT_BYTES = BOXES * BOX_BYTES;
constexpr int SLOT_BYTES = LEFT_BYTES > RIGHT_BYTES ? LEFT_BYTES : RIGHT_BYTES;
constexpr int PIECE_COLUMNS = 32, PIECE_BYTES = 16 * PIECE_COLUMNS * 2;  // of a warp's output
constexpr int RING_AT = STEPS * LEFT_BYTES;
constexpr int PIECES_AT = RING_AT + SLOTS * SLOT_BYTES;
constexpr int BARRIERS_AT = PIECES_AT + 4 * WARPGROUPS * PIECE_BYTES;
constexpr int MATH_THREADS = 128 * WARPGROUPS;
constexpr int THREADS = MATH_THREADS + (WARPGROUPS > 1 ? 128 : 32);
// Of a thread, where there is more than one warpgroup: 64512 of the SM's 65536 in all.
constexpr int MATH_REGISTERS = WARPGROUPS == 3 ? 160 : 232;
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 3 ? 24 : 40;
static_assert(K <= DEPTH && R <= 256, "one step of a");
static_assert(WIDTH <= 256 && WIDTH % PIECE_COLUMNS == 0, "one product of all columns");
static_assert(SLOTS >= 3, "a, b, and a step of x");

using Sums = float[WIDTH / 2];

struct Ring {
    unsigned base;
    int slot = 0;
    unsigned parity = 0;

    __device__ __forceinline__ unsigned at() const { return base + RING_AT + slot * SLOT_BYTES; }
    __device__ __forceinline__ unsigned full() const { return base + BARRIERS_AT + 16 + slot * 16; }
    __device__ __forceinline__ unsigned empty() const { return full() + 8; }
    __device__ __forceinline__ void advance() {
        if (++slot == SLOTS) {
            slot = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ unsigned weight_barrier(unsigned base) { return base + BARRIERS_AT; }

__device__ __forceinline__ void bring_right(Ring& ring, const TensorMap& map, int row, int sample) {
    wait(ring.empty(), ring.parity ^ 1);
    expect_bytes(ring.full(), RIGHT_BYTES);  // what lies outside of a tensor reads as 0
#pragma unroll
    for (int box = 0; box < BOXES; ++box) {
        load_box(ring.at() + box * BOX_BYTES, map, ring.full(), box * BOX_COLUMNS, row, sample);
    }
    ring.advance();
}

__device__ __forceinline__ void produce(
    Ring ring, const TensorMap& a, const TensorMap& b, const TensorMap& w, const TensorMap& x,
    int row, int first, int batch, int groups) {
    expect_bytes(weight_barrier(ring.base), STEPS * LEFT_BYTES);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        load_box(ring.base + step * LEFT_BYTES, w, weight_barrier(ring.base), step * DEPTH, row);
    }
    for (int sample = first; sample < batch; sample += groups) {
        wait(ring.empty(), ring.parity ^ 1);
        expect_bytes(ring.full(), LEFT_BYTES);
        load_box(ring.at(), a, ring.full(), 0, row, sample);
        ring.advance();
        bring_right(ring, b, 0, sample);
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) bring_right(ring, x, step * DEPTH, sample);
    }
}

template <int PRODUCTS>
__device__ __forceinline__ void issue(Sums& sums, unsigned left, unsigned right, bool adds) {
    const Matrix<LINE_BYTES> rows(left);
    begin_products();
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
        multiply_as_they_lie(
            sums, rows.at(i * 32), columns_as_they_lie(right + i * 16 * BOX_COLUMNS * 2),
            adds || i > 0);
    }
    commit_products();
}

__device__ __forceinline__ void give_back(const Ring& ring) {
    if (threadIdx.x % 32 == 0) arrive(ring.empty());
}

// The sums of a warpgroup's rows of one sample; `weight` is where its rows of w are.
__device__ __forceinline__ void multiply(Sums& sums, Ring& ring, unsigned weight, int warpgroup) {
    const Ring left = ring;
    ring.advance();
    Ring before = ring;
    ring.advance();
    wait(left.full(), left.parity);
    wait(before.full(), before.parity);
    issue<A_PRODUCTS>(sums, left.at() + warpgroup * 64 * LINE_BYTES, before.at(), false);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        wait(ring.full(), ring.parity);
        const unsigned rows = weight + step * LEFT_BYTES;
        if (step == STEPS - 1) {
            issue<LAST_PRODUCTS>(sums, rows, ring.at(), true);
        } else {
            issue<DEPTH / 16>(sums, rows, ring.at(), true);
        }
        wait_for_products<1>();
        if (step == 0) give_back(left);
        give_back(before);
        before = ring;
        ring.advance();
    }
    wait_for_products<0>();
    give_back(before);
    pin(sums);
}

// Rows of a warp leave in pieces of 32 columns, 16 bytes of a row at a time.
__device__ __forceinline__ void write(
    const Sums& sums, unsigned short* out, unsigned piece, int rows, int n) {
    const int lane = threadIdx.x % 32, in_warp = lane % 16;
    const auto place = [&](int row, int chunk) {  // permuted, against conflicts of banks
        const unsigned offset = row * PIECE_COLUMNS * 2 + chunk * 16;
        return piece + (offset ^ (offset >> 7 & 3) << 4);
    };
#pragma unroll
    for (int column = 0; column < WIDTH; column += PIECE_COLUMNS) {
        unsigned pairs[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            pairs[i] = rounded_pair(sums[column / 2 + i * 2], sums[column / 2 + i * 2 + 1]);
        }
        __syncwarp();  // the piece before is read
#pragma unroll
        for (int group = 0; group < 4; group += 2) {
            const unsigned four[4] = {pairs[group * 2], pairs[group * 2 + 1], pairs[group * 2 + 2],
                                      pairs[group * 2 + 3]};
            store_blocks(place(in_warp, group + lane / 16), four);
        }
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 16; half += 8) {
            const int row = half + lane / 4, at = column + lane % 4 * 8;
            unsigned words[4];
            load_shared_16_bytes(place(row, lane % 4), words);
            if (row < rows && at < n) store_16_bytes(out + row * n + at, words);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) added_products(
    unsigned short* out, int batch, int m, int n, int tiles, int groups,
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
    const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x) {
    extern __shared__ char shared[];
    Ring ring{shared_address(shared)};
    if (ring.base % 1024) asm volatile("trap;");  // swizzles are counted from there
    const int first_row = blockIdx.x % tiles * ROWS, first = blockIdx.x / tiles;
    if (threadIdx.x == MATH_THREADS) {
        prefetch_map(a);
        prefetch_map(b);
        prefetch_map(w);
        prefetch_map(x);
        initialize_barrier(weight_barrier(ring.base), 1);
        for (int slot = 0; slot < SLOTS; ++slot) {
            initialize_barrier(ring.base + BARRIERS_AT + 16 + slot * 16, 1);
            initialize_barrier(ring.base + BARRIERS_AT + 24 + slot * 16, 4 * WARPGROUPS);  // warps
        }
        publish_barriers();
    }
    __syncthreads();
    begin_in_turn();

    if (threadIdx.x >= MATH_THREADS) {
        if constexpr (WARPGROUPS > 1) give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == MATH_THREADS) {
            produce(ring, a, b, w, x, first_row, first, batch, groups);
        }
        return;
    }
    if constexpr (WARPGROUPS > 1) take_registers<MATH_REGISTERS>();
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be uniform
    const int warp = threadIdx.x / 32;
    const unsigned weight = ring.base + warpgroup * 64 * LINE_BYTES;
    const unsigned piece = ring.base + PIECES_AT + warp * PIECE_BYTES;
    const int row = first_row + warp * 16;
    wait(weight_barrier(ring.base), 0);
    for (int sample = first; sample < batch; sample += groups) {
        Sums sums;
        multiply(sums, ring, weight, warpgroup);
        write(sums, out + (static_cast<long long>(sample) * m + row) * n, piece, m - row, n);
    }
}
