// What kernels that multiply FP8 matrices have in common: how steps lie in local memory.
//
// A step is 128 of k: 8 parts of 16 bytes of each row. They are permuted by the row's number, so that
// the 16 rows that lanes read together lie in different banks.
#pragma once
#include "numbers.hpp"

constexpr int STEP = 128, PARTS = STEP / 16;
constexpr int DICE = 8;  // of a GPU: neighboring blocks run on different ones, each with its own L2

// Blocks of a die make neighboring tiles.
static __device__ inline int tile_of(int block, int count) {
    const int die = block % DICE, turn = block / DICE, each = count / DICE, more = count % DICE;
    return die * each + (die < more ? die : more) + turn;
}

static __device__ inline int place_of(int row, int part) { return row * PARTS + (part ^ row % PARTS); }

// What a lane of `multiply` holds of a row in local memory: 16 bytes, and the 16 that are 64 further.
// Where IS_LAST, so many of the row's 128 count.
template <bool IS_LAST>
static __device__ inline Words8 fragment(const Words4* stage, int row, int quarter, int count) {
    Words8 words;
    for (int half = 0; half < 2; ++half) {
        const Words4 part = stage[place_of(row, 4 * half + quarter)];
        const int left = count - 64 * half - 16 * quarter;
        for (int i = 0; i < 4; ++i) {
            unsigned word = part[i];
            if (IS_LAST && left < 4 * (i + 1))  // past k, where anything lies
                word = left <= 4 * i ? 0 : word & ((1u << 8 * (left - 4 * i)) - 1);
            words[4 * half + i] = static_cast<int>(word);
        }
    }
    return words;
}

template <bool VALUE>
struct Flag {
    static constexpr bool value = VALUE;
};

// Where thread's copy begins: 16 bytes of a row of a or, past TILE_M rows, of b. Rows past the last
// are the last again, parts past k the first: neither counts.
struct Operand {
    const unsigned char* data;
    int first, last, stride;  // row of the tile, last row, bytes between rows
};

static __device__ inline const unsigned char* source_of(
    const Operand& a, const Operand& b, int tile_m, int place, int step, int k) {
    const int row = place / PARTS, column = step * STEP + 16 * (place % PARTS ^ row % PARTS);
    const Operand& of = row < tile_m ? a : b;
    const int wanted = of.first + row - (row < tile_m ? 0 : tile_m);
    const long start = static_cast<long>(wanted < of.last ? wanted : of.last) * of.stride;
    return of.data + start + (column < k ? column : 0);
}
