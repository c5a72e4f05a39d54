// FP8 scaled GEMM whose tiles are turned: fast_mainloop.cuh multiplies the weight by the data, so
// that a tile has 64, 128 or 192 columns of the output and 64 to 256 of its rows, in steps of 16.
//
//     d[m, n] = f((sum_k w[n, k] x[m, k]) * sx * sw + bias[n])
//
// 4736 x 512 is 111 tiles of 128 x 176, of the 132 that an H200 takes at a time, and 132 turned
// ones of 144 x 128.
//
// stmatrix turns blocks of 8 x 8 back on their way to shared memory, whose rows are 64 columns of d,
// the lines of 128 bytes that bulk copies write. Macros beside those of fast_mainloop.cuh, of which N
// is the number of columns of d:
//
//     TENSOR_SCALES, ROW_SCALES   1: scales that are applied here
//     OUT           2: bytes of an element of d
//     BIAS          0: none, 4: float32, 2: of d's type (half_scaled_gemm_turned.cu: float16)
//     RELU          1: f is relu
//     PIECE, CHUNKS rows of d that one bulk copy writes, and of how many a warpgroup stages at once
//     SHARED_BYTES  what the launch asks for
#define SM_BLOCKS 1
#include "fast_mainloop.cuh"

constexpr int LINE_BYTES = 128;  // 64 columns of d
constexpr int PIECE_BYTES = PIECE * LINE_BYTES;
constexpr int STAGING_BYTES = CHUNKS * PIECE_BYTES;  // of a warpgroup
constexpr int PIECES = BLOCK_N / PIECE;
constexpr int SMALL_AT = OPERAND_BYTES + WARPGROUPS * STAGING_BYTES;
constexpr int VECTORS_AT = (SMALL_AT + SMALL_BYTES + 15) / 16 * 16;
constexpr int VECTOR_BYTES = ROW_SCALES ? BLOCK_N * 4 : 0;  // of a warpgroup: scales of d's rows

static_assert(VECTORS_AT + WARPGROUPS * VECTOR_BYTES <= SHARED_BYTES, "shared memory");
static_assert(BLOCK_N % PIECE == 0 && PIECE % 8 == 0 && PIECE <= 256, "whole pieces");
static_assert(PIECES % CHUNKS == 0, "whole rounds");

static_assert(PARTS == 1 && !RESIDENT && !IN_TURN, "the walk knows of no other tiles");
static_assert(OUT == 2 && A_SLICES == 1 && N % 8 == 0, "one product, and whole copies of 16 bytes");

struct Output {
    const TensorMap& map;
    const float* row_scale;     // of d's rows, or one
    const float* column_scale;  // of its columns, or one
    const void* bias;
};

// The tiles of a block: all of the weight's rows in a band, then the next rows of d. `operands.m` is
// the number of these, and `row` and `column` of a tile are those of the transposed output.
struct TurnedWalk {
    static constexpr int HEIGHT = ABOVE * TILE_ROWS, WIDTH = ALONG * BLOCK_N;
    static constexpr int TILES = (N + HEIGHT - 1) / HEIGHT;  // of the weight
    int at, step, tiles_across;

    __device__ __forceinline__ explicit TurnedWalk(const Operands& operands) {
        tiles_across = (operands.m + WIDTH - 1) / WIDTH;
        at = blockIdx.x / PAIRS;
        step = gridDim.x / PAIRS;
    }

    __device__ __forceinline__ bool next(Part& tile) {
        int down, across;
        if constexpr (TILES <= BAND) {  // known divisors
            down = at % TILES, across = at / TILES;
        } else {
            const int band = at / (BAND * tiles_across), in_band = at % (BAND * tiles_across);
            const int height = min(BAND, TILES - band * BAND);
            down = band * BAND + in_band % height, across = in_band / height;
        }
        const int rank = PAIRS == 1 ? 0 : rank_in_pair();
        tile.row = (down * ABOVE + rank / ALONG) * TILE_ROWS;
        tile.column = (across * ALONG + rank % ALONG) * BLOCK_N;
        tile.batch = 0;
        tile.end = N;
        const bool is_there = at < TILES * tiles_across;
        at += step;
        return is_there;
    }
};

// As produce_for_pair of fast_mainloop.cuh, along this walk.
__device__ __forceinline__ void produce_turned(const Memory& memory, const Operands& operands) {
    TurnedWalk walk(operands);
    Place place;
    Part tile;
    const unsigned rank = PAIRS == 1 ? 0 : rank_in_pair();
    while (walk.next(tile)) {
        for (int step = 0; step < STEPS; ++step) {
            const unsigned full = memory.full(0, place.stage);
            wait(memory.empty(0, place.stage), place.parity ^ 1);
            expect_bytes(full, LOADED_BYTES);
            const unsigned a = memory.a(0, place.stage), b = memory.b(0, place.stage, step);
            const int x = step * DEPTH;
            if constexpr (ALONG == 2) {
                const int half = rank % ALONG * (TILE_ROWS / 2);
                load_box_for_two(a + half * DEPTH, *operands.a[0], full, x, tile.row + half, 1);
            } else {
                load_box(a, *operands.a[0], full, x, tile.row);
            }
            if constexpr (ABOVE == 2) {
                const int half = rank / ALONG * (BLOCK_N / 2);
                load_box_for_two(
                    b + half * DEPTH, *operands.b, full, x, tile.column + half, ALONG);
            } else {
                load_box(b, *operands.b, full, x, tile.column);
            }
            place.advance();
        }
    }
    if constexpr (PAIRS > 1) {
        // Others arrive at barriers here until they have read all.
        for (int stage = 0; stage < STAGES; ++stage) {
            wait(memory.empty(0, place.stage), place.parity ^ 1);
            place.advance();
        }
    }
}

// What a thread needs of its two columns of d.
struct Columns {
    float scale[2];
    float bias[2];

    __device__ __forceinline__ Columns(const Output& out, int first) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int n = first + half * 8;
            scale[half] = TENSOR_SCALES ? *out.column_scale : n < N ? out.column_scale[n] : 0.0f;
            bias[half] = BIAS && n < N ? bias_at(out.bias, n) : 0.0f;
        }
    }

    static __device__ __forceinline__ float bias_at(const void* bias, int n) {
        if constexpr (BIAS == 4) return static_cast<const float*>(bias)[n];
        const unsigned bits = static_cast<const unsigned short*>(bias)[n];
#if HALF
        return from_half(bits);
#else
        return __uint_as_float(bits << 16);
#endif
    }
};

__device__ __forceinline__ unsigned pair_of(float first, float second) {
#if HALF
    return half_pair(first, second);
#else
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#endif
}

// As store_blocks of hopper.cuh, each block turned.
__device__ __forceinline__ void store_turned(unsigned address, const unsigned (&block)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(block[0]), "r"(block[1]), "r"(block[2]), "r"(block[3])
                 : "memory");
}

__device__ __forceinline__ void store_turned(unsigned address, const unsigned (&block)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 ::"r"(address), "r"(block[0]), "r"(block[1]) : "memory");
}

// Scales of d's rows of a tile. A thread loads its own before the tile is multiplied: those of data
// are not in the L1, and to wait for them there took 0.4 us of each tile.
struct RowScales {
    static constexpr int COUNT = (BLOCK_N + 127) / 128;
    float mine[COUNT];

    __device__ __forceinline__ RowScales(const Output& out, const Part& tile, int m) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int place = i * 128 + threadIdx.x % 128, row = tile.column + place;
            mine[i] = ROW_SCALES && place < BLOCK_N && row < m ? out.row_scale[row] : 0.0f;
        }
    }

    // For the warpgroup, which reads them behind its next barrier.
    __device__ __forceinline__ void share(unsigned scales) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int place = i * 128 + threadIdx.x % 128;
            if (place >= BLOCK_N) break;
            asm volatile("st.shared.f32 [%0], %1;"
                         ::"r"(scales + place * 4), "f"(mine[i]) : "memory");
        }
    }
};

__device__ __forceinline__ float finished(
    float sum, float row_scale, const Columns& columns, int half) {
    float v = sum * row_scale * columns.scale[half];
    if constexpr (BIAS) v += columns.bias[half];
    if constexpr (RELU) v = v > 0.0f || v != v ? v : 0.0f;
    return v;
}

// Writes a warpgroup's sums, whose first column of d is `column`.
__device__ __forceinline__ void finish(
    const Sums& sums, const Output& out, const Part& tile, const Columns& columns, unsigned staging,
    unsigned scales, int warpgroup, int column, int m) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool elected = threadIdx.x % 128 == 0;
    const float row_scale = TENSOR_SCALES ? *out.row_scale : 1.0f;
    // Of the row of d that this lane addresses in a block of 8: its 8 columns of this warp's 16.
    const unsigned row = lane / 16 * 8 + lane % 8;
    const unsigned offset = row * LINE_BYTES + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
    for (int start = 0; start < PIECES; start += CHUNKS) {
        if (elected) wait_until_stores_have_read();
        synchronize_warpgroup(warpgroup);
#pragma unroll
        for (int group = start * PIECE / 8; group < (start + CHUNKS) * PIECE / 8; group += 2) {
            constexpr int ROUND = CHUNKS * PIECE / 8;
            const bool is_whole = (group - start * PIECE / 8) + 1 < ROUND;
            unsigned blocks[4];
#pragma unroll
            for (int i = 0; i < (is_whole ? 4 : 2); ++i) {
                const int half = i % 2, at = group + i / 2;
                float2 scale = make_float2(row_scale, row_scale);
                if constexpr (ROW_SCALES) {
                    scale = load_shared_pair(scales + (at * 8 + lane % 4 * 2) * 4);
                }
                blocks[i] = pair_of(finished(sums[at * 4 + half * 2], scale.x, columns, half),
                                    finished(sums[at * 4 + half * 2 + 1], scale.y, columns, half));
            }
            const unsigned to = staging + (group * 8 - start * PIECE) * LINE_BYTES + offset;
            if (is_whole) {
                store_turned(to, blocks);
            } else {
                const unsigned two[2] = {blocks[0], blocks[1]};
                store_turned(to, two);
            }
        }
        publish_shared_memory();
        synchronize_warpgroup(warpgroup);
        if (elected) {
#pragma unroll
            for (int piece = start; piece < start + CHUNKS; ++piece) {
                const int first = tile.column + piece * PIECE;
                if (column >= N || first >= m) break;
                store_box(out.map, staging + (piece - start) * PIECE_BYTES, column, first);
            }
            commit_stores();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, SM_BLOCKS) scaled_gemm(
    const float* row_scale, const float* column_scale,
#if BIAS
    const void* bias,
#endif
    int m, const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap d_map,
    const __grid_constant__ TensorMap data_map) {
    extern __shared__ char shared[];
    const unsigned base = shared_address(shared);
    if (base % 1024) asm volatile("trap;");  // swizzles are counted from there
    const Memory memory{base, base + SMALL_AT};
    const Operands operands{{&weight_map}, {}, &data_map, nullptr, nullptr, 0, 0, nullptr, m, 1};
    const Output out{
        d_map, row_scale, column_scale,
#if BIAS
        bias,
#else
        nullptr,
#endif
    };
    if (threadIdx.x == MATH_THREADS) initialize(memory, operands);
    __syncthreads();
    begin_in_turn();

    if (threadIdx.x >= MATH_THREADS) {
        if constexpr (WARPGROUPS > 1) give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == MATH_THREADS) produce_turned(memory, operands);
        __syncwarp();
    } else {
        if constexpr (WARPGROUPS > 1) take_registers<MATH_REGISTERS>();
        const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be uniform
        const unsigned staging = base + OPERAND_BYTES + warpgroup * STAGING_BYTES;
        const unsigned scales = base + VECTORS_AT + warpgroup * VECTOR_BYTES;
        TurnedWalk walk(operands);
        Place place;
        Tile tile;
        Sums sums;
        bool first = true;
        while (walk.next(tile)) {
            const int column = tile.row + warpgroup * ROWS;
            const Columns columns(out, column + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
            const RowScales row_scales(out, tile, m);
            Multiplier{memory, operands, tile, 0, warpgroup, first}.multiply_tile(sums, place);
            first = false;
            if constexpr (ROW_SCALES) row_scales.share(scales);
            finish(sums, out, tile, columns, staging, scales, warpgroup, column, m);
        }
        if (threadIdx.x % 128 == 0) wait_until_stores_have_read();
        __syncwarp();
    }
}
