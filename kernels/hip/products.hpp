// What kernels that multiply FP8 matrices have in common: how steps lie in local memory.
//
// A step is 128 of k: 8 parts of 16 bytes of each row. They are permuted by the row's number, so that
// the 16 rows that lanes read together lie in different banks.
#pragma once
#include "numbers.hpp"

template <int NUMBER>
struct Constant {
    static constexpr int VALUE = NUMBER;
};

constexpr int STEP = 128, PARTS = STEP / 16;
constexpr unsigned DICE = 8;  // of a GPU: neighboring blocks run on different ones, each with its own L2

// Blocks of a die make neighboring tiles.
static __device__ inline unsigned tile_of(unsigned block, unsigned count) {
    const unsigned die = block % DICE, turn = block / DICE, each = count / DICE, more = count % DICE;
    return die * each + (die < more ? die : more) + turn;
}

static __device__ inline int place_of(int row, int part) { return row * PARTS + (part ^ row % PARTS); }

static __device__ inline Words8 joined(Words4 first, Words4 second) {
    Words8 words;
    for (int i = 0; i < 8; ++i) words[i] = static_cast<int>(i < 4 ? first[i] : second[i - 4]);
    return words;
}
// What a lane of `multiply` holds of a row in local memory: 16 bytes, and the 16 that are 64 further.
static __device__ inline Words8 fragment(const Words4* stage, int row, int quarter) {
    return joined(stage[place_of(row, quarter)], stage[place_of(row, 4 + quarter)]);
}

// Where `waves` waves that share rows put a number of each. With four, two take turns: else rows 8 apart
// would lie in the same of 32 banks.
static __device__ inline int exchange_place(int row, int wave, int waves) {
    return row * waves + (waves == 4 ? wave ^ row / 8 % 2 : wave);
}

// Zeros in 16 bytes behind the first `count` of them.
static __device__ inline void clear_behind(Words4& words, int count) {
    for (int i = 0; i < 4; ++i) {
        const int left = count - 4 * i;  // bytes of this word that count
        words[i] = left <= 0 ? 0 : left < 4 ? words[i] & ((1u << 8 * left) - 1) : words[i];
    }
}

// Zeros in rows of a step behind the first `count` bytes of each, where anything lies.
template <int ROWS, int THREADS>
static __device__ inline void clear_tail(Words4* stage, int count) {
    for (int row = thread_index(); row < ROWS; row += THREADS) {
        for (int part = count / 16; part < PARTS; ++part)
            clear_behind(stage[place_of(row, part)], count - 16 * part);
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
              constexpr int EACH = WAVE / PARTS;  // rows of a copy
              const int lane = lane_index(), first = wave * COUNT * EACH + lane / PARTS;
              const unsigned part = 16 * (lane % PARTS ^ first % PARTS);
              if (COUNT & (COUNT - 1))
                  return product_of_24_bits(row_of(first + EACH * i), stride) + part;
              // A copy sets bits of the row that no wave or lane does, and `row_of` moves bits: between
              // two copies lies the same in all lanes.
              return product_of_24_bits(row_of(first), stride) + part +
                     (row_of(EACH * i) - row_of(0)) * stride;
          }) {}
    __device__ inline void begin(Words4* stage) { copies_.begin(stage + start_); }
    // To the next step. Behind the last one, it reads nothing.
    __device__ inline void advance(bool is_last = false) {
        copies_.advance(further(is_last));
    }
    // One of COUNT loads of the next step, and where the one behind it begins.
    __device__ inline void begin(Words4* stage, int number, bool is_last) {
        copies_.begin(stage + start_, number);
        copies_.advance(further(is_last), number);
    }
    __device__ inline void put(Words4* stage) { copies_.put(stage + start_); }
    __device__ inline void put(Words4* stage, int number) { copies_.put(stage + start_, number); }
    // For all but the LATER loads that a lane began last.
    template <int LATER = 0>
    __device__ inline void wait() { copies_.template wait<LATER>(); }

    static constexpr int COUNT = ROWS * PARTS / (WAVES * WAVE);

private:
    static __device__ inline unsigned further(bool is_last) { return is_last ? NOWHERE : STEP; }
    int start_;
    Copies<COUNT> copies_;
};

// COUNT fragments of rows that no other wave reads: from memory to registers, 128 of k at a time.
template <int COUNT>
class Fragments {
public:
    static constexpr int LOADS = 2 * COUNT;

    template <typename RowOf>
    __device__ inline Fragments(
        const unsigned char* data, int count, int stride, int k, RowOf row_of)
        : from_(data, (count - 1u) * stride + (k + 15u) / 16 * 16) {
        for (int j = 0; j < COUNT; ++j)
            offsets_[j] = product_of_24_bits(row_of(j), stride) + start();
    }
    // That of the next step, into the registers of this one.
    __device__ inline void load(int j) {
        for (int half = 0; half < 2; ++half)
            halves_[j][half] = from_.load_16_bytes(offsets_[j] + STEP / 2 * half);
        offsets_[j] += STEP;
    }
    __device__ inline void clear_tail(int count) {
        for (auto& halves : halves_)
            for (int half = 0; half < 2; ++half)
                clear_behind(halves[half], count - STEP / 2 * half - start());
    }
    __device__ inline Words8 fragment(int j) const { return joined(halves_[j][0], halves_[j][1]); }

private:
    static __device__ inline int start() { return lane_index() / 16 * 16; }
    Buffer from_;
    unsigned offsets_[COUNT];
    Words4 halves_[COUNT][2];
};
