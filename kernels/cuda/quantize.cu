// Quantize to FP8, byte for byte as lokakern.numerics.quantize: a scale for each row, or for each
// 128 columns of it.
//
//     s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))
//
// A line is what one scale covers: SPAN columns of a row, the whole row or 128 of it. amax is over
// the finite values of the line.
//
//     x:      [rows, COLUMNS], bfloat16 or float32, rows x_stride elements apart
//     data:   [rows, COLUMNS], FP8 bytes, rows data_stride bytes apart
//     scale:  float32; of group g of row r at scale[g * scale_stride + r]
//
// TEAM threads of a block share a line, or of each block of a cluster, which hold it in pieces one
// after the other. A thread holds ACCESSES chunks of LINES lines at once; a line too long for that
// is read twice. Macros besides those of quantize.cuh, all set by quantize.py:
//
//     COLUMNS   of x
//     SPAN      columns of a line
//     TEAM      a power of two up to 32, or else a multiple of 32 and the whole block
//     CLUSTER   blocks of a line, with TEAM the whole block; 1 where a block has whole lines
//     ACCESSES, LINES
//     THREADS   of a block, at most; a multiple of 32
#include "quantize.cuh"

constexpr int STEP = TEAM * ACCESSES * CHUNK;  // columns that a team holds at once
constexpr bool AT_ONCE = SPAN <= static_cast<long long>(STEP) * CLUSTER;
constexpr bool RAGGED = COLUMNS % CHUNK != 0 || SPAN % CHUNK != 0;
constexpr bool EXACT = COLUMNS % SPAN == 0 && SPAN % STEP == 0 && (AT_ONCE || CLUSTER == 1);
constexpr int GROUPS = (COLUMNS - 1) / SPAN + 1;
constexpr int TEAMS = TEAM < 32 ? 32 / TEAM : 1;  // of a warp
constexpr int WARPS = TEAM > 32 ? TEAM / 32 : 1;  // of a team

static_assert(TEAM <= 32 || TEAM == THREADS, "a team of several warps is a block");
static_assert(CLUSTER == 1 || (TEAM == THREADS && AT_ONCE), "a cluster holds a line");
static_assert(LINES == 1 || (TEAM <= 32 && AT_ONCE), "a block has one line");

struct Held {
    unsigned word[ACCESSES][4];
};

// What a thread holds of a line, of which `columns` remain; 0 beyond them. All loads are on their
// way before the first is used.
__device__ __forceinline__ void load(
    const char* from, int position, int columns, unsigned (*words)[FETCHED]) {
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        const int column = (i * TEAM + position) * CHUNK;
        // Of an exact line there is all or nothing: one test instead of ACCESSES.
        fetch(from + column * INPUT_BYTES, EXACT ? columns : columns - column, words[i]);
    }
}

__device__ __forceinline__ void settle_all(
    const char* from, int position, int columns, unsigned (*words)[FETCHED], Held& held) {
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        const int column = (i * TEAM + position) * CHUNK;
        settle<RAGGED>(from + column * INPUT_BYTES, columns - column, words[i], held.word[i]);
    }
}

template <bool FINITE>
__device__ __forceinline__ unsigned magnitude(const Held& held) {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        largest = FINITE ? larger_finite_magnitude(held.word[i], largest)
                         : larger_magnitude(held.word[i], largest);
    }
    return largest;
}

// Largest value of a team. CALL tells apart the memory of two calls, which saves a barrier.
template <int CALL>
__device__ __forceinline__ unsigned largest_of_team(unsigned value) {
    if constexpr (TEAM < 32) {
#pragma unroll
        for (int distance = TEAM / 2; distance > 0; distance /= 2) {
            value = max(value, value_across(value, distance));
        }
        return value;
    }
    value = largest_of_warp(value);
    if constexpr (WARPS > 1) {
        __shared__ unsigned largest[2][WARPS];
        if (threadIdx.x % 32 == 0) largest[CALL][threadIdx.x / 32] = value;
        __syncthreads();
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) value = max(value, largest[CALL][warp]);
    }
    return value;
}

// Cast and write what a thread holds.
__device__ __forceinline__ void store(
    const Held& held, const Divisor& divisor, unsigned char* to, int position, int columns) {
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        const int column = (i * TEAM + position) * CHUNK;
        if (EXACT ? columns <= 0 : column >= columns) continue;
        unsigned bytes[2];
        cast(held.word[i], divisor, bytes);
        write<RAGGED>(bytes, to + column, columns - column);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize(
    const char* x, unsigned char* data, float* scale, int rows, long long x_stride,
    long long data_stride, long long scale_stride) {
    if constexpr (CLUSTER > 1) begin_in_cluster();
    // A warp, or a block where a team is one, takes TEAMS * LINES rows of one group. Neighbors are
    // neighbors along a row, so that a block reads whole rows of memory.
    const unsigned tile = TEAM > 32 ? blockIdx.x / CLUSTER
                                    : blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int position = threadIdx.x % TEAM;
    const int group = tile % GROUPS;
    const long long first_row = static_cast<long long>(tile / GROUPS) * (TEAMS * LINES) +
                                threadIdx.x % 32 / TEAM % TEAMS;
    const long long first_column =
        static_cast<long long>(group) * SPAN + blockIdx.x % CLUSTER * static_cast<long long>(STEP);
    // Columns that remain from the first of this block on; negative where it has none of the last.
    const int span = COLUMNS % SPAN == 0 ? SPAN : min(SPAN, COLUMNS - group * SPAN);
    const int piece = span - static_cast<int>(blockIdx.x % CLUSTER) * STEP;
    const char* from = x + (first_row * x_stride + first_column) * INPUT_BYTES;
    unsigned char* to = data + first_row * data_stride + first_column;
    begin_in_turn();

    if constexpr (AT_ONCE) {
        unsigned words[LINES][ACCESSES][FETCHED];
#pragma unroll
        for (int line = 0; line < LINES; ++line) {
            const int columns = first_row + line * TEAMS < rows ? piece : 0;
            load(from + line * TEAMS * x_stride * INPUT_BYTES, position, columns, words[line]);
        }
#pragma unroll
        for (int line = 0; line < LINES; ++line) {
            const long long row = first_row + line * TEAMS;
            const int columns = row < rows ? piece : 0;
            Held held;
            settle_all(
                from + line * TEAMS * x_stride * INPUT_BYTES, position, columns, words[line], held);
            unsigned amax = largest_of_team<0>(magnitude<false>(held));
            if (any_of_warp(amax >= INFINITY_BITS)) {  // seldom; alike in all warps of a team
                amax = largest_of_team<1>(magnitude<true>(held));
            }
            if constexpr (CLUSTER > 1) {
                __shared__ unsigned slots[CLUSTER];
                amax = largest_of_cluster<CLUSTER>(amax, slots);
            }
            const float decode = decode_scale(amax);
            store(held, Divisor(decode), to + line * TEAMS * data_stride, position, columns);
            if (position == 0 && row < rows && blockIdx.x % CLUSTER == 0) {
                scale[group * scale_stride + row] = decode;
            }
        }
    } else {
        const int columns = first_row < rows ? span : 0;
        unsigned largest = 0;
        Held held;
        for (long long start = 0; start < span; start += STEP) {
            const int left = max(columns - start, 0LL);
            unsigned words[ACCESSES][FETCHED];
            load(from + start * INPUT_BYTES, position, left, words);
            settle_all(from + start * INPUT_BYTES, position, left, words, held);
            largest = max(largest, magnitude<true>(held));
        }
        const float decode = decode_scale(largest_of_team<0>(largest));
        const Divisor divisor(decode);
        for (long long start = 0; start < span; start += STEP) {
            const int left = max(columns - start, 0LL);
            unsigned words[ACCESSES][FETCHED];
            load(from + start * INPUT_BYTES, position, left, words);
            settle_all(from + start * INPUT_BYTES, position, left, words, held);
            store(held, divisor, to + start, position, left);
        }
        if (position == 0 && first_row < rows) scale[group * scale_stride + first_row] = decode;
    }
}
