// Quantize long rows to FP8 with a scale each, byte for byte as lokakern.numerics.quantize.
//
//     s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))
//
//     x:      [rows, COLUMNS], bfloat16 or float32, rows x_stride elements apart
//     data:   [rows, COLUMNS], FP8 bytes, rows data_stride bytes apart
//     scale:  float32 [rows]
//
// Rows of x start at multiples of 16 bytes, and so do those of data where WHOLE says so. amax is over
// finite values.
//
// Nothing but the bytes should take time: 3 a column of bfloat16. A cluster that holds a row in
// registers (quantize.cu) has nothing on its way from its last load until the next cluster has
// begun. Here clusters stay on their SMs and take every so many-th row. Each block has a piece of
// it. Bulk copies bring the boxes of the next pieces into a ring while all warps take amax of one
// piece and cast the one before, whose box they give back as soon as it is read.
//
// No warp waits for another one of its block, but through what all tell each other: the amax of
// what a warp has read of row i + 1 goes to all blocks of the cluster before the warp needs those of
// row i. They were told one row ago.
//
// Macros besides those of quantize.cuh, from quantize_long.py:
//
//     COLUMNS   of x
//     CLUSTER   blocks that share a row
//     PIECE     columns of a block, the last of which has fewer; a multiple of 16
//     BOX       columns of a bulk copy, of which the last of a piece has fewer; a multiple of 16
//     PER_PIECE boxes of a piece
//     BOXES     of the ring
//     AHEAD     1 where amax of the next row is taken before a row is cast, 0 in turn
//     THREADS   of a block, without the warp that brings boxes
#include "hopper.cuh"
#include "quantize.cuh"
#include "quantize_long_ptx.cuh"

constexpr int WIDE = 16;               // columns that a thread casts and writes at once
constexpr int CHUNKS = WIDE / CHUNK;   // 16 bytes each
constexpr int BOX_BYTES = BOX * INPUT_BYTES;
constexpr int ROUNDS = (BOX / WIDE - 1) / THREADS + 1;  // of a box
constexpr int WARPS = THREADS / 32;
constexpr int TOLD = WARPS * CLUSTER;  // magnitudes of a row: one of each warp
// Rows whose magnitudes are kept. Who tells of row i + 4 has all of row i + 2, which each warp of the
// cluster told after it had read those of row i: nothing is overwritten before it is read. So row
// i + 4 counts at a barrier that all have seen end for row i, and who waits there is at most one
// phase behind. Two would not do: of row i + 2 is told before anything is heard of row i + 1.
constexpr int TURNS = 4;
constexpr int TOLD_AT = BOXES * BOX_BYTES;
constexpr int HEARD_AT = TOLD_AT + TURNS * TOLD * 4;
constexpr int BARRIERS_AT = HEARD_AT + TURNS * 8;  // of boxes: full, empty
constexpr bool RAGGED = COLUMNS % WIDE != 0;
static_assert(IN_PLACE, "bulk copies begin at multiples of 16 bytes");
static_assert(BOXES >= (1 + AHEAD) * PER_PIECE, "a warp has so many pieces under way");
static_assert(BOXES <= THREADS, "a thread initializes the barriers of a box");
static_assert(PIECE % WIDE == 0 && BOX % WIDE == 0 && BOX * PER_PIECE >= PIECE, "all is covered");
static_assert((CLUSTER - 1) * PIECE + (PER_PIECE - 1) * BOX < COLUMNS, "no box is empty");
static_assert(TURNS * TOLD * 4 % 8 == 0 && BOX_BYTES % 16 == 0, "barriers take 8 bytes");

// A box of the ring, and how often it was filled before, odd or even. Whoever counts boxes has one.
struct Place {
    int box = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance() {
        if (++box == BOXES) {
            box = 0;
            parity ^= 1;
        }
    }
};

struct Memory {
    unsigned base;

    __device__ __forceinline__ unsigned box(const Place& place) const {
        return base + place.box * BOX_BYTES;
    }
    __device__ __forceinline__ unsigned full(const Place& place) const {
        return base + BARRIERS_AT + place.box * 16;
    }
    __device__ __forceinline__ unsigned empty(const Place& place) const { return full(place) + 8; }
    __device__ __forceinline__ unsigned told(int turn) const {
        return base + TOLD_AT + turn % TURNS * (TOLD * 4);
    }
    __device__ __forceinline__ unsigned heard(int turn) const {
        return base + HEARD_AT + turn % TURNS * 8;
    }
    static __device__ __forceinline__ unsigned parity(int turn) { return turn / TURNS & 1; }
};

// Where a thread begins with the chunks of its columns: 8 neighbors, who read at once, have chunks
// in all banks.
__device__ __forceinline__ int first_chunk() { return threadIdx.x / (8 / CHUNKS) % CHUNKS; }

__device__ __forceinline__ int chunk_of(int step) { return (first_chunk() + step) % CHUNKS; }

// The columns of a thread, of which `left` remain in the row, in the order of `chunk_of`.
__device__ __forceinline__ void read(unsigned from, int left, unsigned (&word)[CHUNKS][4]) {
    unsigned words[CHUNKS][4];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) load_shared_16_bytes(from + chunk_of(i) * 16, words[i]);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        settle<RAGGED>(nullptr, left - chunk_of(i) * CHUNK, words[i], word[i]);
    }
}

// Turns the bytes of chunks, from the order of `chunk_of` into their own.
__device__ __forceinline__ void put_in_order(unsigned (&bytes)[4]) {
    const int first = first_chunk();
    if constexpr (CHUNKS == 4) {
        const unsigned last = bytes[3];
        const bool odd = first & 1;
#pragma unroll
        for (int i = 3; i > 0; --i) bytes[i] = odd ? bytes[i - 1] : bytes[i];
        bytes[0] = odd ? last : bytes[0];
    }
    const bool across = first & CHUNKS / 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned low = bytes[i];
        bytes[i] = across ? bytes[i + 2] : low;
        bytes[i + 2] = across ? low : bytes[i + 2];
    }
}

// Largest magnitude of what a thread has of a piece, whose first box is at a place.
template <bool FINITE>
__device__ __forceinline__ unsigned largest_of_piece(
    const Memory& memory, Place place, int columns) {
    unsigned largest = 0;
#pragma unroll 1
    for (int first = 0; first < PER_PIECE * BOX; first += BOX, place.advance()) {
        const int here = min(BOX, columns - first);
        wait(memory.full(place), place.parity);
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int column = (i * THREADS + threadIdx.x) * WIDE;
            if (column >= here) break;
            unsigned word[CHUNKS][4];
            read(memory.box(place) + column * INPUT_BYTES, here - column, word);
#pragma unroll
            for (int j = 0; j < CHUNKS; ++j) {
                largest = FINITE ? larger_finite_magnitude(word[j], largest)
                                 : larger_magnitude(word[j], largest);
            }
        }
    }
    return largest;
}

// Casts and writes a piece, and gives its boxes back.
__device__ __forceinline__ void cast_piece(
    const Memory& memory, Place& place, int columns, const Divisor& divisor, unsigned char* to) {
#pragma unroll 1
    for (int first = 0; first < PER_PIECE * BOX; first += BOX, place.advance()) {
        const int here = min(BOX, columns - first);
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int column = (i * THREADS + threadIdx.x) * WIDE, left = here - column;
            if (left <= 0) break;
            unsigned word[CHUNKS][4], bytes[4];
            read(memory.box(place) + column * INPUT_BYTES, left, word);
#pragma unroll
            for (int j = 0; j < CHUNKS; ++j) cast(word[j], divisor, bytes + j * (CHUNK / 4));
            put_in_order(bytes);
            if (WHOLE && (!RAGGED || left >= WIDE)) {
                store_16_bytes(to + first + column, bytes);
                continue;
            }
#pragma unroll
            for (int j = 0; j < CHUNKS; ++j) {
                const int at = j * CHUNK;
                write<true>(bytes + at / 4, to + first + column + at, left - at);
            }
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(memory.empty(place));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) quantize_long(
    const char* x, unsigned char* data, float* scale, int rows, long long x_stride,
    long long data_stride) {
    extern __shared__ char shared[];
    const Memory memory{shared_address(shared)};
    const int rank = blockIdx.x % CLUSTER;
    const int first_row = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    const int first_column = rank * PIECE;
    const int columns = min(PIECE, COLUMNS - first_column);
    const bool brings = threadIdx.x >= THREADS;  // of the last warp
    if (threadIdx.x < BOXES) {
        const Place place{static_cast<int>(threadIdx.x)};
        initialize_barrier(memory.full(place), 1);
        initialize_barrier(memory.empty(place), WARPS);
    }
    if (threadIdx.x < TURNS) {
        initialize_barrier(memory.heard(threadIdx.x), CLUSTER > 1 ? 1 : WARPS);
    }
    publish_barriers();
    __syncthreads();
    if constexpr (CLUSTER > 1) begin_in_cluster();
    begin_in_turn();

    if (brings) {
        if (threadIdx.x == THREADS) {
            Place place;
            for (long long row = first_row; row < rows; row += step) {
                const char* from = x + (row * x_stride + first_column) * INPUT_BYTES;
                for (int first = 0; first < PER_PIECE * BOX; first += BOX, place.advance()) {
                    const int here = min(BOX, columns - first);
                    const unsigned bytes = (here * INPUT_BYTES + 15) & ~15;
                    wait(memory.empty(place), place.parity ^ 1);
                    expect_bytes(memory.full(place), bytes);
                    copy_in_bulk(
                        memory.box(place), from + first * INPUT_BYTES, bytes, memory.full(place));
                }
            }
        }
        __syncwarp();
        if constexpr (CLUSTER > 1) await_cluster();
        return;
    }

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Place ahead, behind;  // first boxes of the piece whose amax is taken, and of that which is cast
    const auto tell_of_piece = [&](int turn) {
        unsigned largest = largest_of_warp(largest_of_piece<false>(memory, ahead, columns));
        if (largest >= INFINITY_BITS) {  // seldom
            largest = largest_of_warp(largest_of_piece<true>(memory, ahead, columns));
        }
        for (int i = 0; i < PER_PIECE; ++i) ahead.advance();
        const unsigned told = memory.told(turn), heard = memory.heard(turn);
        if constexpr (CLUSTER > 1) {
            if (threadIdx.x == 0) expect_bytes(heard, TOLD * 4);
            if (lane < CLUSTER) {
                const unsigned to = told + (rank * WARPS + warp) * 4;
                tell(address_in(to, lane), largest, address_in(heard, lane));
            }
        } else if (lane == 0) {
            store_shared(told + warp * 4, largest);
            arrive(heard);
        }
    };
    // A block ends when it has heard of its last row from all blocks: none writes into it any more.
    const auto amax_of_row = [&](int turn) {
        wait(memory.heard(turn), Memory::parity(turn));
        unsigned amax = 0;
#pragma unroll
        for (int i = 0; i < TOLD; i += 32) {
            if (TOLD % 32 == 0 || i + lane < TOLD) {
                amax = max(amax, load_shared(memory.told(turn) + (i + lane) * 4));
            }
        }
        return largest_of_warp(amax);
    };

    if constexpr (CLUSTER > 1) await_cluster();
    if constexpr (AHEAD) tell_of_piece(0);
    int turn = 0;
    for (long long row = first_row; row < rows; row += step, ++turn) {
        if (!AHEAD || row + step < rows) tell_of_piece(turn + AHEAD);
        const float decode = decode_scale(amax_of_row(turn));
        if (threadIdx.x == 0 && rank == 0) scale[row] = decode;
        cast_piece(
            memory, behind, columns, Divisor(decode), data + row * data_stride + first_column);
    }
}
