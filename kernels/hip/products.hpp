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

// 32 bytes of a row from local memory, of which some count where IS_LAST.
template <bool IS_LAST>
static __device__ inline Words8 fragment(const Words4* stage, int row, int quarter, int bytes) {
    const Words4 low = stage[place_of(row, 2 * quarter)];
    const Words4 high = stage[place_of(row, 2 * quarter + 1)];
    Words8 words;
    for (int i = 0; i < 4; ++i) {
        words[i] = static_cast<int>(low[i]);
        words[4 + i] = static_cast<int>(high[i]);
    }
    if (IS_LAST && bytes < 32) {  // past k, where anything lies
        for (int i = 0; i < 8; ++i) {
            const int left = bytes - 4 * i;
            const unsigned mask = left >= 4 ? ~0u : left <= 0 ? 0u : (1u << 8 * left) - 1;
            words[i] = static_cast<int>(static_cast<unsigned>(words[i]) & mask);
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
