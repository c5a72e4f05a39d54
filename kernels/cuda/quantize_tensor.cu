// Quantize to FP8 with one scale for the whole tensor, byte for byte as lokakern.numerics.
//
//     s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))
//
//     x:      [rows, columns], bfloat16 or float32, rows x_stride elements apart
//     data:   [rows, columns], FP8 bytes, rows data_stride bytes apart
//     scale:  float32
//     maxima: float32 bits; of each block its largest finite magnitude, or (DELAYED) of all
//
// Blocks take chunks of 16 bytes in turn, ACCESSES for each of their threads. STAGE says what a
// launch does; the macros besides those of quantize.cuh are set by quantize_tensor.py:
//
//     0  GATHER   maxima of blocks
//     1  FINISH   from those (`rows` of them) the scale, in one block
//     2  CAST     from those (`parts` of them) the scale; cast, from the end of x, which was read
//                 last and is in the L2 still
//     3  AT_ONCE  all of it in a cooperative launch, whose threads hold the tensor meanwhile
//     4  STATIC   cast by the scale given
//     5  DELAYED  the same, and raise maxima[0] to the largest finite magnitude
//
//     FLAT      1 where rows follow on each other: they are one row then
//     RAGGED    1 where columns are no multiple of a chunk
//     ACCESSES, THREADS
#include "quantize.cuh"

constexpr bool GATHER = STAGE == 0, FINISH = STAGE == 1, CAST = STAGE == 2, AT_ONCE = STAGE == 3;
constexpr bool STATIC = STAGE == 4, DELAYED = STAGE == 5;
constexpr unsigned SPAN = THREADS * ACCESSES;  // chunks of a block at once

struct Held {
    unsigned word[ACCESSES][4];
};

struct Tensor {
    const char* x;
    unsigned char* data;
    long long columns, x_stride, data_stride;
    unsigned chunks;  // of a row

    __device__ __forceinline__ void place(unsigned chunk, long long& row, long long& column) const {
        row = FLAT ? 0 : chunk / chunks;
        column = static_cast<long long>(FLAT ? chunk : chunk % chunks) * CHUNK;
    }
    // Columns from one on, as many as count for a chunk.
    __device__ __forceinline__ int left(long long column) const {
        return static_cast<int>(min(columns - column, static_cast<long long>(CHUNK)));
    }

    __device__ __forceinline__ void load(unsigned first, unsigned count, Held& held) const {
        unsigned words[ACCESSES][FETCHED];
#pragma unroll
        for (int i = 0; i < ACCESSES; ++i) {
            const unsigned chunk = first + i * THREADS;
            long long row, column;
            place(chunk, row, column);
            fetch(x + (row * x_stride + column) * INPUT_BYTES, chunk < count ? left(column) : 0,
                  words[i]);
        }
#pragma unroll
        for (int i = 0; i < ACCESSES; ++i) {
            const unsigned chunk = first + i * THREADS;
            long long row, column;
            place(chunk, row, column);
            settle<RAGGED>(x + (row * x_stride + column) * INPUT_BYTES,
                           chunk < count ? left(column) : 0, words[i], held.word[i]);
        }
    }

    template <class Division>
    __device__ __forceinline__ void store(
        unsigned first, unsigned count, const Held& held, const Division& divisor) const {
#pragma unroll
        for (int i = 0; i < ACCESSES; ++i) {
            const unsigned chunk = first + i * THREADS;
            if (chunk >= count) continue;
            long long row, column;
            place(chunk, row, column);
            unsigned bytes[2];
            cast(held.word[i], divisor, bytes);
            write<RAGGED>(bytes, data + row * data_stride + column, left(column));
        }
    }
};

__device__ __forceinline__ unsigned magnitude(const Held& held, unsigned so_far) {
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) so_far = larger_finite_magnitude(held.word[i], so_far);
    return so_far;
}

// Largest value of a block, to all its threads. CALL tells apart the memory of two calls.
template <int CALL>
__device__ __forceinline__ unsigned largest_of_block(unsigned value) {
    __shared__ unsigned largest[2][THREADS / 32];
    value = largest_of_warp(value);
    if (threadIdx.x % 32 == 0) largest[CALL][threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < THREADS / 32 ? largest[CALL][threadIdx.x % 32] : 0;
    return largest_of_warp(value);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_tensor(
    const char* x, unsigned char* data, float* scale, unsigned* maxima, int rows, int parts,
    long long columns, long long x_stride, long long data_stride) {
    const unsigned per_row = static_cast<unsigned>((columns + CHUNK - 1) / CHUNK);
    const Tensor tensor{x, data, columns, x_stride, data_stride, per_row};
    const unsigned count = FLAT ? per_row : per_row * static_cast<unsigned>(rows);
    const unsigned all = SPAN * gridDim.x;  // chunks of all blocks at once
    const unsigned steps = (count + all - 1) / all;
    const unsigned first = blockIdx.x * SPAN + threadIdx.x;
    begin_in_turn();

    Held held;
    unsigned largest = 0;
    if constexpr (GATHER) {
        for (unsigned step = 0; step < steps; ++step) {
            tensor.load(step * all + first, count, held);
            largest = magnitude(held, largest);
        }
    } else if constexpr (AT_ONCE) {
        tensor.load(first, count, held);
        largest = magnitude(held, 0);
    }
    if constexpr (GATHER || AT_ONCE) {
        largest = largest_of_block<0>(largest);
        if (threadIdx.x == 0) maxima[blockIdx.x] = largest;
    }
    if constexpr (GATHER) return;
    if constexpr (AT_ONCE) barrier_of_grid();
    if constexpr (FINISH || CAST || AT_ONCE) {
        largest = 0;
        const unsigned there = AT_ONCE ? gridDim.x : parts;
        for (unsigned part = threadIdx.x; part < there; part += THREADS) {
            largest = max(largest, load_from_l2(maxima + part));
        }
        const float decode = decode_scale(largest_of_block<1>(largest));
        if (blockIdx.x == 0 && threadIdx.x == 0) *scale = decode;
        const Divisor divisor(decode);
        if constexpr (AT_ONCE) tensor.store(first, count, held, divisor);
        if constexpr (CAST) {
            for (unsigned step = steps; step-- > 0;) {
                tensor.load(step * all + first, count, held);
                tensor.store(step * all + first, count, held, divisor);
            }
        }
    }
    if constexpr (STATIC || DELAYED) {
        const AnyDivisor divisor(*scale);
        for (unsigned step = 0; step < steps; ++step) {
            tensor.load(step * all + first, count, held);
            if constexpr (DELAYED) largest = magnitude(held, largest);
            tensor.store(step * all + first, count, held, divisor);
        }
        if constexpr (DELAYED) {
            largest = largest_of_block<0>(largest);
            if (threadIdx.x == 0) raise_to(maxima, largest);
        }
    }
}
