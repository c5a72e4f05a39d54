// What kernels that multiply FP8 matrices have in common: how steps lie in local memory.
//
// A step is 128 of k: 8 parts of 16 bytes of each row. They are permuted by the row's number, so that
// the 16 rows that lanes read together lie in different banks.
#pragma once
#include "numbers.hpp"

constexpr int STEP = 128, PARTS = STEP / 16;
constexpr unsigned DICE = 8;  // of a GPU: neighboring blocks run on different ones, each with its own L2

// Blocks of a die make neighboring tiles.
static __device__ inline unsigned tile_of(unsigned block, unsigned count) {
    const unsigned die = block % DICE, turn = block / DICE, each = count / DICE, more = count % DICE;
    return die * each + (die < more ? die : more) + turn;
}

static __device__ inline int place_of(int row, int part) { return row * PARTS + (part ^ row % PARTS); }

// What a lane of `multiply` holds of a row in local memory: 16 bytes, and the 16 that are 64 further.
static __device__ inline Words8 fragment(const Words4* stage, int row, int quarter) {
    Words8 words;
    for (int half = 0; half < 2; ++half) {
        const Words4 part = stage[place_of(row, 4 * half + quarter)];
        for (int i = 0; i < 4; ++i) words[4 * half + i] = static_cast<int>(part[i]);
    }
    return words;
}

// Where `waves` waves that share rows put a number of each. With four, two take turns: else rows 8 apart
// would lie in the same of 32 banks.
static __device__ inline int exchange_place(int row, int wave, int waves) {
    return row * waves + (waves == 4 ? wave ^ row / 8 % 2 : wave);
}

// Zeros in rows of a step behind the first `count` bytes of each, where anything lies.
template <int ROWS, int THREADS>
static __device__ inline void clear_tail(Words4* stage, int count) {
    for (int row = thread_index(); row < ROWS; row += THREADS) {
        for (int part = count / 16; part < PARTS; ++part) {
            Words4& words = stage[place_of(row, part)];
            for (int i = 0; i < 4; ++i) {
                const int left = count - 16 * part - 4 * i;  // bytes of this word that count
                words[i] = left <= 0 ? 0 : left < 4 ? words[i] & ((1u << 8 * left) - 1) : words[i];
            }
        }
    }
    barrier();
}

// ROWS rows of a matrix on their way to local memory, 128 of k at a time, each wave with its part of
// them. Anything comes for rows past the last, and for what is past k in a row.
template <int ROWS, int WAVES>
class Rows {
public:
    // `count` rows from `data` on; `row_of` says which of them is which here.
    template <typename RowOf>
    __device__ inline Rows(
        const unsigned char* data, int count, int stride, int k, int wave, RowOf row_of)
        : start_(wave * COUNT * WAVE),
          copies_(data, (count - 1u) * stride + (k + 15u) / 16 * 16, [&](int i) {
              const int lane = lane_index();
              const int row = (wave * COUNT + i) * (WAVE / PARTS) + lane / PARTS;
              return product_of_24_bits(row_of(row), stride) + 16 * (lane % PARTS ^ row % PARTS);
          }) {}
    // Where it is the last, the next one reads nothing.
    __device__ inline void begin(Words4* stage, bool is_last) {
        copies_.begin(stage + start_, is_last ? NOWHERE : static_cast<unsigned>(STEP));
    }
    __device__ inline void put(Words4* stage) { copies_.put(stage + start_); }
    __device__ inline void wait() { copies_.wait(); }

private:
    static constexpr int COUNT = ROWS * PARTS / (WAVES * WAVE);
    int start_;
    Copies<COUNT> copies_;
};
