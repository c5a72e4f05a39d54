// Rows from shared memory to rows of global memory that start at any multiple of an element.
//
// A row leaves in pieces of 16 bytes from its first address that is a multiple of 16 on. Elements
// before that (the head) and after the last whole piece (the tail) leave one at a time: together
// they are at most 30 bytes of a row. In shared memory a row starts at a multiple of 16 bytes, so a
// piece there is read from two, and shifted by the length of the head.
//
// Needs of its includer: load_shared_piece, load_shared_element, store_piece, store_element and
// shifted_words, which the tests replace on the CPU.
#pragma once

constexpr int PIECE = 16;  // bytes

// The bytes of a row before its first whole piece: as many as are missing to a multiple of 16.
__device__ __forceinline__ int head_of(const char* row) {
    return static_cast<int>(-static_cast<unsigned>(reinterpret_cast<unsigned long long>(row)) & 15);
}

// Where the tail of a row of so many bytes begins.
__device__ __forceinline__ int tail_of(int head, int bytes) {
    return head < bytes ? bytes - ((bytes - head) & (PIECE - 1)) : bytes;
}

// 16 of 32 bytes, from one of the first 16 on. ITEM divides `begin`.
template <int ITEM>
__device__ __forceinline__ void shift(const unsigned (&word)[8], int begin, unsigned (&piece)[4]) {
    const bool by_two = begin & 8, by_one = begin & 4;
    unsigned half[6], whole[5];
#pragma unroll
    for (int i = 0; i < 6; ++i) half[i] = by_two ? word[i + 2] : word[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) whole[i] = by_one ? half[i + 1] : half[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        piece[i] = ITEM == 4 ? whole[i] : shifted_words(whole[i], whole[i + 1], begin % 4 * 8);
    }
}

// What a thread of a warp takes of ROWS rows of SHARES parts each, in turns of 32.
template <int ROWS_OF_WARP, int SHARES>
struct Turns {
    static constexpr int COUNT = (ROWS_OF_WARP * SHARES + 31) / 32;
    unsigned lane;

    // Within a row. In the last turn some threads may have none: their row is ROWS or beyond.
    __device__ __forceinline__ int share(int turn) const { return (turn * 32 + lane) % SHARES; }
    __device__ __forceinline__ int row(int turn) const {
        if constexpr (32 % SHARES == 0) return lane / SHARES + turn * (32 / SHARES);
        return (turn * 32 + lane) / SHARES;
    }
    __device__ __forceinline__ char* row_at(char* to, long long pitch, int turn) const {
        if constexpr (32 % SHARES == 0) {  // one multiplication by what differs between threads
            return to + static_cast<int>(lane / SHARES) * pitch + turn * (32 / SHARES) * pitch;
        }
        return to + row(turn) * pitch;
    }
};

// Copies rows of `bytes` bytes, which begin `pitch` bytes apart from `to` on; `rows` of ROWS are
// there. `Staged::at(row, piece)` is the address of one of a row's PIECES in shared memory: all may be
// read, also those that are not there. Loads of a few pieces stand before their stores, which are
// predicated: behind a branch each would wait for the one before.
template <int ITEM, int ROWS_OF_WARP, int PIECES, typename Staged>
__device__ __forceinline__ void copy_rows(
    const Staged& staged, char* to, long long pitch, int rows, int bytes, unsigned lane) {
    const Turns<ROWS_OF_WARP, PIECES> pieces{lane};
    constexpr int TURNS = pieces.COUNT, AT_ONCE = TURNS < 4 ? TURNS : 4;
#pragma unroll
    for (int first = 0; first < TURNS; first += AT_ONCE) {
        unsigned word[AT_ONCE][8];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int row = min(pieces.row(first + i), ROWS_OF_WARP - 1);
            const int share = pieces.share(first + i);
            load_shared_piece(staged.at(row, share), &word[i][0]);
            // A last piece that is whole has no head before it, and needs no other.
            load_shared_piece(staged.at(row, min(share + 1, PIECES - 1)), &word[i][4]);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            char* const row = pieces.row_at(to, pitch, first + i);
            const int head = head_of(row);
            const int begin = pieces.share(first + i) * PIECE + head;
            unsigned piece[4];
            shift<ITEM>(word[i], head, piece);
            store_piece(row + begin, piece, pieces.row(first + i) < rows && begin + PIECE <= bytes);
        }
    }
    // As many elements as a piece has, of the head and then of the tail: where `bytes` are whole
    // pieces, head and tail are one together, or none.
    const Turns<ROWS_OF_WARP, PIECE / ITEM> ends{lane};
#pragma unroll 1
    for (int skipped = 0; skipped < (bytes % PIECE ? 2 * PIECE : PIECE); skipped += PIECE) {
        unsigned value[ends.COUNT];
        int byte[ends.COUNT];
#pragma unroll
        for (int i = 0; i < ends.COUNT; ++i) {
            const int head = head_of(ends.row_at(to, pitch, i));
            const int place = skipped + ends.share(i) * ITEM;
            byte[i] = place < head ? place : tail_of(head, bytes) + place - head;
            const int row = min(ends.row(i), ROWS_OF_WARP - 1), inside = min(byte[i], bytes - ITEM);
            value[i] = load_shared_element<ITEM>(staged.at(row, inside / PIECE) + inside % PIECE);
        }
#pragma unroll
        for (int i = 0; i < ends.COUNT; ++i) {
            store_element<ITEM>(ends.row_at(to, pitch, i) + byte[i], value[i],
                                ends.row(i) < rows && byte[i] < bytes);
        }
    }
}
