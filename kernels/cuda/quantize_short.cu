// Quantize short dense rows to FP8, byte for byte as lokakern.numerics.quantize, each with a scale.
//
//     s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))
//
//     x:      [rows, COLUMNS], bfloat16 or float32, without gaps, from a multiple of 16 bytes on
//     data:   [rows, COLUMNS], FP8 bytes, rows PITCH bytes apart, from a multiple of 16 bytes on; the
//             gaps, of at most 15 bytes, get zeros
//     scale:  [rows], float32
//
// Rows of 39 columns start askew, and 16 bytes hold parts of two. But x is one array: 8 rows of it
// are always whole pieces of 16 bytes. A warp takes ROWS rows, a multiple of 8, and waits for no
// other: it copies their pieces into shared memory, all at once, and TEAM threads take a row each
// from there into registers. FP8 bytes leave through the same memory in whole pieces too, gaps
// included: of sectors of 32 bytes written in part, memory must supply the rest. 1310720 x 39 took
// 45.9 us of an H200 so, with one thread a row, and 80.8 with bytes of rows alone. Bulk stores of
// boxes took 46.7, and write gaps as well: they store whole pieces.
//
// Blocks are not persistent, and warps have no ring of rows: 64 warps fit into a multiprocessor (32
// registers), with 80 KB of rows of 39, and 4.25 TB/s times 1 us need 20 KB on their way. By one
// thread, rows of 39 take about 12 instructions an element (counted in machine code), of 22 that 4
// TB/s leave time for.
//
// Macros besides those of quantize.cuh (IN_PLACE and WHOLE are 1), set by quantize_short.py:
//
//     COLUMNS  of x
//     TEAM     threads that share a row: 1, 2 or 4
//     WARPS    of a block
#include "quantize.cuh"
#include "quantize_short_ptx.cuh"

constexpr int ROWS = 32 / TEAM;                       // of a warp
constexpr int CHUNKS = (COLUMNS - 1) / CHUNK + 1;     // of a row
constexpr int HELD = (CHUNKS - 1) / TEAM + 1;         // chunks of a thread, one after the other
constexpr int ROW_BYTES = COLUMNS * INPUT_BYTES;
constexpr int PIECE = 16;
constexpr int PIECES = ROWS * ROW_BYTES / PIECE;      // that a warp copies
constexpr int WRITTEN = (COLUMNS - 1) / PIECE + 1;    // pieces of a row of data
constexpr int PITCH = WRITTEN * PIECE;
// Of a staged row. An odd number of pieces, against conflicts of threads with neighboring rows.
constexpr int STAGED = (WRITTEN | 1) * PIECE;
constexpr int READ_BYTES = ROWS * ROW_BYTES + PIECE;  // the last row is read beyond its end
constexpr int WARP_BYTES = READ_BYTES > ROWS * STAGED ? READ_BYTES : ROWS * STAGED;
constexpr bool ODD = HALVES && COLUMNS % 2 != 0;      // every second row starts inside a word

static_assert(ROWS % 8 == 0, "whole pieces of 16 bytes");
static_assert(WRITTEN <= 32, "a warp stores whole rows");

struct alignas(PIECE) Piece {
    unsigned word[4];
};

// Every 32nd piece from FIRST on of a thread whose own place `to` and `from` are.
template <int FIRST>
__device__ __forceinline__ void copy_pieces(unsigned to, const char* from, int lane) {
    if constexpr (FIRST < PIECES) {
        if (FIRST + 32 <= PIECES || FIRST + lane < PIECES) copy_piece<FIRST * PIECE>(to, from);
        copy_pieces<FIRST + 32>(to, from, lane);
    }
}

// The rows of a warp, of which `bytes` are there.
__device__ __forceinline__ void copy_rows(const char* from, int bytes, char* rows, int lane) {
    const unsigned to = shared_place(rows) + lane * PIECE;
    from += lane * PIECE;
    if (bytes >= ROWS * ROW_BYTES) {
        copy_pieces<0>(to, from, lane);
    } else {
#pragma unroll 1
        for (int at = 0, left = bytes - lane * PIECE; left > 0; at += 32 * PIECE, left -= 32 * PIECE) {
            copy_part(to + at, from + at, min(left, PIECE));
        }
    }
    await_pieces();
    synchronize_warp();
}

// What a thread takes of a row; 0 beyond it.
__device__ __forceinline__ void hold(
    const unsigned* row, int shift, int position, unsigned (*held)[4]) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int column = (position * HELD + i) * CHUNK, left = COLUMNS - column;
        const bool whole = ((TEAM - 1) * HELD + i + 1) * CHUNK <= COLUMNS;  // of every thread
        const unsigned* from = row + column / PER_WORD;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            held[i][j] = 0;
            if (!whole && left <= 0) continue;
            held[i][j] = ODD ? shifted_words(from[j], from[j + 1], shift) : from[j];
        }
        if (whole) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int rest = left - j * PER_WORD;
            if (rest < PER_WORD) held[i][j] = HALVES && rest == 1 ? held[i][j] & 0xffffu : 0;
        }
    }
}

// Largest magnitude of a row, in all threads that share it.
template <bool FINITE>
__device__ __forceinline__ unsigned magnitude(const unsigned (*held)[4]) {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        largest = FINITE ? larger_finite_magnitude(held[i], largest)
                         : larger_magnitude(held[i], largest);
    }
#pragma unroll
    for (int distance = TEAM / 2; distance > 0; distance /= 2) {
        largest = max(largest, value_across(largest, distance));
    }
    return largest;
}

__device__ __forceinline__ void put_chunk(char* to, const unsigned* bytes) {
    if constexpr (HALVES) {
        *reinterpret_cast<unsigned long long*>(to) =
            bytes[0] | static_cast<unsigned long long>(bytes[1]) << 32;
    } else {
        *reinterpret_cast<unsigned*>(to) = bytes[0];
    }
}

// Casts what a thread holds of a row.
__device__ __forceinline__ void stage(
    const unsigned (*held)[4], const Divisor& divisor, char* to, int position) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int column = (position * HELD + i) * CHUNK;
        if (column >= COLUMNS) continue;
        unsigned bytes[2];
        cast(held[i], divisor, bytes);
        put_chunk(to + column, bytes);
    }
}

// Chunks of a staged row beyond its last.
__device__ __forceinline__ void clear_gap(char* to) {
    const unsigned zeros[2] = {0, 0};
#pragma unroll
    for (int column = CHUNKS * CHUNK; column < PITCH; column += CHUNK) put_chunk(to + column, zeros);
}

// A store of the warp covers whole rows. Places are constants but for one sum.
__device__ __forceinline__ void write_rows(
    const char* staged, unsigned char* to, int rows, int lane) {
    constexpr int AT_ONCE = 32 / WRITTEN;
    const int first = lane / WRITTEN, inside = lane % WRITTEN * PIECE;
    staged += first * STAGED + inside;
    to += first * PITCH + inside;
    if (first >= AT_ONCE) rows = 0;
#pragma unroll
    for (int row = 0; row < ROWS; row += AT_ONCE) {
        if (first + row < rows) {
            *reinterpret_cast<Piece*>(to + row * PITCH) =
                *reinterpret_cast<const Piece*>(staged + row * STAGED);
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) quantize_short(
    const char* x, unsigned char* data, float* scale, int rows) {
    alignas(PIECE) __shared__ char memory[WARPS * WARP_BYTES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    char* const mine = memory + warp * WARP_BYTES;
    const unsigned first = (blockIdx.x * WARPS + warp) * ROWS, count = rows;
    const int there = first < count ? min(count - first, static_cast<unsigned>(ROWS)) : 0;
    begin_in_turn();
    copy_rows(x + static_cast<long long>(first) * ROW_BYTES, there * ROW_BYTES, mine, lane);

    const int row = lane / TEAM, position = lane % TEAM;
    const int shift = ODD ? row % 2 * 16 : 0;
    const char* from = mine + row * ROW_BYTES - shift / 8;
    unsigned held[HELD][4];
    hold(reinterpret_cast<const unsigned*>(from), shift, position, held);
    synchronize_warp();  // bytes take the place of what was read
    unsigned amax = magnitude<false>(held);
    if (any_of_warp(amax >= INFINITY_BITS)) amax = magnitude<true>(held);  // seldom
    const float decode = decode_scale(amax);
    const Divisor divisor(decode);
    char* const to = mine + row * STAGED;
    // One branch for a row, not one for each chunk: chunks are cast side by side.
    if (!HALVES || divisor.lift == 1.0f) {
        stage(held, divisor, to, position);
    } else {
        stage(held, divisor, to, position);
    }
    if (position == 0) clear_gap(to);
    if (position == 0 && row < there) scale[first + row] = decode;
    synchronize_warp();
    write_rows(mine, data + static_cast<long long>(first) * PITCH, there, lane);
}
