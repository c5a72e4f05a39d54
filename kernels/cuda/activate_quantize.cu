// Activate rows and quantize them to FP8 with one read, a scale for each row.
//
//     d = f(x);   s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;   q = cast(rn(d / s))
//
//     x:      [rows, COLUMNS], bfloat16 or float32, rows x_stride elements apart
//     data:   [rows, COLUMNS], FP8 bytes, rows data_stride bytes apart
//     scale:  float32, one of each row; amax is over its finite d
//
// TEAM threads of a block share a row and hold all of it, ACCESSES chunks each. relu of bfloat16 is
// bfloat16: such chunks stay packed, and are scaled and divided by two elements a word as those of
// quantize.cu are. Every other d is a float32 of its own. Macros besides those of quantize.cuh, all
// set by activate_quantize.py:
//
//     COLUMNS     of x
//     TEAM        a power of two up to 32, or else a multiple of 32 and the whole block
//     ACCESSES    TEAM * ACCESSES chunks hold a row
//     THREADS     of a block
//     ACTIVATION  as `activated` of norm.cuh counts them; 1 is relu
#include "norm.cuh"
#include "quantize.cuh"

constexpr bool RAGGED = COLUMNS % CHUNK != 0;
constexpr bool EXACT = COLUMNS == TEAM * ACCESSES * CHUNK;
constexpr bool PACKED = HALVES && ACTIVATION == 1;
constexpr bool AS_READ = PACKED || !HALVES;  // words hold what those of quantize.cuh do
constexpr int WORDS = AS_READ ? 4 : CHUNK;
constexpr int WARPS = TEAM > 32 ? TEAM / 32 : 1;  // of a team

static_assert(TEAM <= 32 || TEAM == THREADS, "a team of several warps is a block");
static_assert(COLUMNS <= static_cast<long long>(TEAM) * ACCESSES * CHUNK, "a team holds a row");

// f of a chunk. 0 stays 0, as there is beyond a row.
__device__ __forceinline__ void activate(const unsigned* read, unsigned* word) {
    if constexpr (PACKED) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(word[i]) : "r"(read[i]), "r"(0));
        }
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            const float d = activated<ACTIVATION>(__uint_as_float(element(read, i)));
            word[i] = __float_as_uint(d);
        }
    }
}

template <bool FINITE>
__device__ __forceinline__ unsigned magnitude(const unsigned (*words)[WORDS]) {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        if constexpr (AS_READ) {
            largest = FINITE ? larger_finite_magnitude(words[i], largest)
                             : larger_magnitude(words[i], largest);
        } else {
#pragma unroll
            for (int j = 0; j < WORDS; ++j) {
                const unsigned bits = words[i][j] & 0x7fffffffu;
                if (!FINITE || bits < INFINITY_BITS) largest = max(largest, bits);
            }
        }
    }
    return largest;
}

// Of a team; `slots` are one word of shared memory for each of its warps.
__device__ __forceinline__ unsigned largest_of_team(unsigned value, unsigned* slots) {
    if constexpr (TEAM < 32) {
#pragma unroll
        for (int distance = TEAM / 2; distance > 0; distance /= 2) {
            value = max(value, value_across(value, distance));
        }
    } else {
        value = largest_of_warp(value);
    }
    if constexpr (WARPS > 1) {
        if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = value;
        __syncthreads();
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) value = max(value, slots[warp]);
    }
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS) activate_quantize(
    const char* x, unsigned char* data, float* scale, int rows, long long x_stride,
    long long data_stride) {
    const int position = threadIdx.x % TEAM;
    const long long row = static_cast<long long>(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM;
    const int columns = row < rows ? COLUMNS : 0;
    const char* from = x + row * x_stride * INPUT_BYTES;
    begin_in_turn();

    // All loads are on their way before the first is used.
    unsigned fetched[ACCESSES][FETCHED];
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        const int column = (i * TEAM + position) * CHUNK;
        // Of an exact row there is all or nothing: one test instead of ACCESSES.
        fetch(from + column * INPUT_BYTES, EXACT ? columns : columns - column, fetched[i]);
    }
    unsigned words[ACCESSES][WORDS];
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        const int column = (i * TEAM + position) * CHUNK;
        unsigned read[4];
        settle<RAGGED>(from + column * INPUT_BYTES, columns - column, fetched[i], read);
        activate(read, words[i]);
    }

    __shared__ unsigned slots[2][WARPS];  // of two calls: no barrier between them
    unsigned amax = largest_of_team(magnitude<false>(words), slots[0]);
    if (any_of_warp(amax >= INFINITY_BITS)) {  // seldom; alike in all warps of a team
        amax = largest_of_team(magnitude<true>(words), slots[1]);
    }
    const float decode = decode_scale(amax);
    const Divisor divisor(decode);
    unsigned char* to = data + row * data_stride;
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        const int column = (i * TEAM + position) * CHUNK;
        if (EXACT ? columns == 0 : column >= columns) continue;
        unsigned bytes[2];
        if constexpr (AS_READ) {
            cast(words[i], divisor, bytes);
        } else {
            float quotient[CHUNK];
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) quotient[j] = divisor.divide(words[i][j]);
            encode(quotient, bytes);
        }
        write<RAGGED>(bytes, to + column, columns - column);
    }
    if (position == 0 && row < rows) scale[row] = decode;
}
