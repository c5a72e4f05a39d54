// Parts of a matrix that a block reads by rows, and writes to FP8 by columns.
//
// A thread holds ROWS rows of a chunk, so that it has as many neighbors both ways. A tile has ACROSS
// chunks, and as many rows as the threads of a block hold.
#pragma once
#include "quantize.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, ROWS = 8;

struct alignas(16) Piece {
    unsigned word[4];
};

struct Part {
    unsigned word[ROWS][4];
};

// Magnitudes of a word, two bfloat16 or one float32; with FINITE 0 for what is not finite: a half of
// 0x7f80 or more carries into its highest bit. Not finite are the largest of all, so that a thread
// asks for finite ones, which take four instructions more, only if it met others.
template <bool FINITE>
__device__ __forceinline__ unsigned magnitudes_of(unsigned word) {
    if constexpr (HALVES) {
        const unsigned size = word & 0x7fff7fffu;
        if constexpr (!FINITE) return size;
        const unsigned over = (size + 0x00800080u & 0x80008000u) >> 15;
        return size & ~(over * 0xffffu);
    } else {
        const unsigned size = word & 0x7fffffffu;
        return FINITE && size >= INFINITY_BITS ? 0 : size;
    }
}

__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    return HALVES ? larger_halves(a, b) : max(a, b);
}

__device__ __forceinline__ bool any_infinite(unsigned magnitudes) {
    return HALVES ? (magnitudes + 0x00800080u & 0x80008000u) != 0 : magnitudes >= INFINITY_BITS;
}

// `rows` and `columns` remain of the matrix at this place; what is beyond them is 0.
__device__ __forceinline__ void load_part(
    Part& part, const char* from, long long stride, int rows, int columns) {
    unsigned words[ROWS][FETCHED];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) fetch(from + i * stride, i < rows ? columns : 0, words[i]);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        settle<RAGGED>(from + i * stride, i < rows ? columns : 0, words[i], part.word[i]);
    }
}

// Largest magnitudes of the columns of a chunk.
__device__ __forceinline__ void enlarge(unsigned (&magnitudes)[4], const Part& part, bool finite) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            magnitudes[j] = larger(magnitudes[j], finite ? magnitudes_of<true>(part.word[i][j])
                                                         : magnitudes_of<false>(part.word[i][j]));
        }
    }
}

// Largest magnitudes of the columns of a tile that the warps of a block share, of which the first
// ACROSS threads of each warp write those of the warp.
template <int ACROSS>
__device__ __forceinline__ void write_largest(
    unsigned (&magnitudes)[4], unsigned (&of_warps)[WARPS][ACROSS * 4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int distance = ACROSS; distance < 32; distance *= 2) {
            magnitudes[j] = larger(magnitudes[j], value_across(magnitudes[j], distance));
        }
    }
    if (threadIdx.x % 32 < ACROSS) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            of_warps[threadIdx.x / 32][threadIdx.x % ACROSS * 4 + j] = magnitudes[j];
        }
    }
}

// Magnitude of a column as float32 bits, from the words of a row of a tile.
__device__ __forceinline__ unsigned of_column(unsigned word, int column) {
    if constexpr (HALVES) return column % 2 ? word & 0xffff0000u : word << 16;
    return word;
}

// Where 8 bytes of a column are in the memory of a tile: permuted, so that no bank has two at once,
// and 16 bytes stay together.
template <int ACROSS>
__device__ __forceinline__ int turned_place(int column, int band) {
    constexpr int BANDS = THREADS / ACROSS;
    return column * BANDS + (band ^ column / CHUNK * (16 / ACROSS < 2 ? 2 : 16 / ACROSS) % BANDS);
}

template <int ACROSS>
__device__ __forceinline__ void turn(const Part& part, const float* column_scale, Piece* turned) {
    const int chunk = threadIdx.x % ACROSS, band = threadIdx.x / ACROSS;
    unsigned long long* const to = reinterpret_cast<unsigned long long*>(turned);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
        const Divisor divisor(column_scale[chunk * CHUNK + j]);
        float quotient[ROWS];
        if (HALVES && divisor.lift == 1.0f) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                quotient[i] = divisor.divide_short(element(part.word[i], j));
            }
        } else {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) quotient[i] = divisor.divide(element(part.word[i], j));
        }
        unsigned bytes[2];
#pragma unroll
        for (int i = 0; i < ROWS; i += 4) {
            bytes[i / 4] = encode_pair<IS_E5M2>(quotient[i], quotient[i + 1]) |
                           encode_pair<IS_E5M2>(quotient[i + 2], quotient[i + 3]) << 16;
        }
        to[turned_place<ACROSS>(chunk * CHUNK + j, band)] =
            bytes[0] | static_cast<unsigned long long>(bytes[1]) << 32;
    }
}

// `columns` and `rows` remain of the matrix; nothing beyond them is written.
template <int ACROSS>
__device__ __forceinline__ void write_turned(
    const Piece* turned, unsigned char* data, long long stride, int columns, int rows) {
    constexpr int PIECES = THREADS / ACROSS * ROWS / 16;  // of a column
#pragma unroll
    for (int place = threadIdx.x; place < ACROSS * CHUNK * PIECES; place += THREADS) {
        const int column = place / PIECES, piece = place % PIECES, left = rows - piece * 16;
        if (column >= columns || left <= 0) continue;
        const Piece found = turned[turned_place<ACROSS>(column, piece * 2) / 2];
        unsigned char* const to = data + column * stride + piece * 16;
        if (WHOLE && left >= 16) {
            *reinterpret_cast<Piece*>(to) = found;
        } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                if (i < left) to[i] = found.word[i / 4] >> i % 4 * 8 & 0xffu;
            }
        }
    }
}
