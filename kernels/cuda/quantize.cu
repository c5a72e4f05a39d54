// Quantize to FP8, byte for byte as lokakern.numerics.quantize.
//
//     s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))
//
// A line is what one scale covers: SPAN columns of a row, the whole row or 128 of it. amax is over
// the finite values of the line.
//
//     x:      [rows, COLUMNS], bfloat16 or float32, rows x_stride elements apart
//     data:   [rows, COLUMNS], FP8 bytes, contiguous
//     scale:  float32; of group g of row r at scale[g * scale_stride + r]
//
// TEAM threads share a line. A thread holds ACCESSES times WIDTH neighboring elements of it at
// once; a line too long for that is read twice. Macros, all set by quantize.py:
//
//     INPUT_BYTES  2 for bfloat16, 4 for float32
//     IS_E5M2      1 for e5m2, 0 for e4m3fn
//     COLUMNS      of x
//     SPAN         columns of a line
//     WIDTH        elements of one load: 16 bytes of them where every row of x starts at a multiple
//                  of 16 bytes and of data at one of WIDTH, else 1
//     TEAM         a power of two up to 32, or else a multiple of 32 and the whole block
//     ACCESSES, THREADS
#include "ptx.cuh"

constexpr bool VECTORS = WIDTH > 1;
constexpr bool HALVES = VECTORS && INPUT_BYTES == 2;  // a word holds two bfloat16
constexpr int WORDS = VECTORS ? 4 : 1;
constexpr int PER_WORD = HALVES ? 2 : 1;
constexpr int STEP = TEAM * ACCESSES * WIDTH;  // columns that a team holds at once
constexpr bool AT_ONCE = SPAN <= STEP;
constexpr bool EXACT = COLUMNS % SPAN == 0 && SPAN % STEP == 0;
constexpr int GROUPS = (COLUMNS + SPAN - 1) / SPAN;
constexpr int TEAMS = TEAM < 32 ? 32 / TEAM : 1;  // of a warp
constexpr int WARPS = TEAM > 32 ? TEAM / 32 : 1;  // of a team
constexpr float MAX = IS_E5M2 ? 57344.0f : 448.0f;
constexpr unsigned INFINITY_BITS = 0x7f800000u;

static_assert(TEAM <= 32 || TEAM == THREADS, "a team of several warps is a block");

struct Held {
    unsigned word[ACCESSES][WORDS];
};

// What a thread holds of a line, of which `columns` remain; 0 beyond them.
__device__ __forceinline__ void load(const char* from, int position, int columns, Held& held) {
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        const int column = (i * TEAM + position) * WIDTH;
#pragma unroll
        for (int j = 0; j < WORDS; ++j) held.word[i][j] = 0;
        // Of an exact line there is all or nothing: one test instead of ACCESSES.
        if (EXACT ? columns == 0 : column >= columns) continue;
        const char* place = from + column * INPUT_BYTES;
        if constexpr (VECTORS) {
            load_16_bytes(place, held.word[i]);
        } else if constexpr (INPUT_BYTES == 4) {
            held.word[i][0] = *reinterpret_cast<const unsigned*>(place);
        } else {
            held.word[i][0] = *reinterpret_cast<const unsigned short*>(place) << 16;
        }
    }
}

// Bits of an element as float32.
__device__ __forceinline__ unsigned element(unsigned word, int index) {
    if constexpr (HALVES) return index == 0 ? word << 16 : word & 0xffff0000u;
    return word;
}

// Largest magnitude a thread holds, as float32 bits, which order as the values do. Infinity and
// NaN come last in that order and are left out if FINITE.
template <bool FINITE>
__device__ __forceinline__ unsigned magnitude(const Held& held) {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
#pragma unroll
        for (int j = 0; j < WORDS; ++j) {
            const unsigned word = held.word[i][j];
            if constexpr (HALVES && !FINITE) {
                largest = larger_halves(largest, word & 0x7fff7fffu);
            } else {
#pragma unroll
                for (int k = 0; k < PER_WORD; ++k) {
                    const unsigned bits = element(word, k) & 0x7fffffffu;
                    if (!FINITE || bits < INFINITY_BITS) largest = max(largest, bits);
                }
            }
        }
    }
    if constexpr (HALVES && !FINITE) largest = max(largest << 16, largest & 0xffff0000u);
    return largest;
}

// Largest value of a team. CALL tells apart the memory of two calls, which saves a barrier.
template <int CALL>
__device__ __forceinline__ unsigned largest_of_team(unsigned value) {
    if constexpr (TEAM < 32) {
#pragma unroll
        for (int distance = TEAM / 2; distance > 0; distance /= 2) {
            value = max(value, value_across(value, distance));
        }
        return value;
    }
    value = largest_of_warp(value);
    if constexpr (WARPS > 1) {
        __shared__ unsigned largest[2][WARPS];
        if (threadIdx.x % 32 == 0) largest[CALL][threadIdx.x / 32] = value;
        __syncthreads();
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) value = max(value, largest[CALL][warp]);
    }
    return value;
}

__device__ __forceinline__ float decode_scale(unsigned amax) {
    const float smallest = 1.17549435e-38f;  // 2^-126: x / s stays finite
    return amax == 0 ? 1.0f : fmaxf(__fdiv_rn(__uint_as_float(amax), MAX), smallest);
}

// rn(x / s) by Markstein's division: from the correctly rounded reciprocal, two steps of fused
// multiply-add give the correctly rounded quotient in 6 instructions, where div.rn takes about 12
// and a branch: 4 TB/s leave time for 22 instructions an element. Scales under 2^-60 are lifted
// with x, so that no remainder which matters underflows. Remainders are taken with the sign that
// keeps -0. Infinities turn into NaN by themselves (inf - inf).
struct Divisor {
    float lift, lifted, reciprocal;

    __device__ __forceinline__ explicit Divisor(float scale) {
        lift = scale < 8.673617379884035e-19f ? 18446744073709551616.0f : 1.0f;  // 2^-60, 2^64
        lifted = scale * lift;
        reciprocal = __frcp_rn(lifted);
    }

    __device__ __forceinline__ float divide(unsigned bits) const {
        const float x = __fmul_rn(__uint_as_float(bits), lift);
        float quotient = __fmul_rn(x, reciprocal);
        quotient = __fmaf_rn(__fmaf_rn(quotient, lifted, -x), -reciprocal, quotient);
        return __fmaf_rn(__fmaf_rn(quotient, lifted, -x), -reciprocal, quotient);
    }
};

// Cast and write what `load` read.
__device__ __forceinline__ void store(
    const Held& held, const Divisor& divisor, unsigned char* to, int position, int columns) {
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        const int column = (i * TEAM + position) * WIDTH;
        if (EXACT ? columns == 0 : column >= columns) continue;
        if constexpr (VECTORS) {
            float quotient[WIDTH];
            unsigned bytes[2] = {};
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                quotient[j] = divisor.divide(element(held.word[i][j / PER_WORD], j % PER_WORD));
            }
#pragma unroll
            for (int j = 0; j < WIDTH; j += 4) {
                bytes[j / 4] = encode_pair<IS_E5M2>(quotient[j], quotient[j + 1]) |
                               encode_pair<IS_E5M2>(quotient[j + 2], quotient[j + 3]) << 16;
            }
            if constexpr (WIDTH == 8) {
                *reinterpret_cast<unsigned long long*>(to + column) =
                    bytes[0] | static_cast<unsigned long long>(bytes[1]) << 32;
            } else {
                *reinterpret_cast<unsigned*>(to + column) = bytes[0];
            }
        } else {
            to[column] = encode_pair<IS_E5M2>(divisor.divide(held.word[i][0]), 0.0f) & 0xffu;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize(
    const char* x, unsigned char* data, float* scale, int rows, long long x_stride,
    long long scale_stride) {
    // A warp, or a block where a team is one, takes TEAMS rows of one group. Neighbors are neighbors
    // along a row, so that a block reads whole rows of memory.
    const unsigned tile =
        TEAM > 32 ? blockIdx.x : blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int position = threadIdx.x % TEAM;
    const int group = tile % GROUPS;
    const long long row =
        static_cast<long long>(tile / GROUPS) * TEAMS + threadIdx.x % 32 / TEAM % TEAMS;
    const int span = COLUMNS % SPAN == 0 ? SPAN : min(SPAN, COLUMNS - group * SPAN);
    const int columns = row < rows ? span : 0;
    const char* from = x + (row * x_stride + group * SPAN) * INPUT_BYTES;
    unsigned char* to = data + row * COLUMNS + group * SPAN;

    Held held;
    float decode;
    if constexpr (AT_ONCE) {
        load(from, position, columns, held);
        unsigned amax = largest_of_team<0>(magnitude<false>(held));
        if (any_of_warp(amax >= INFINITY_BITS)) {  // seldom; the same answer in all warps of a team
            amax = largest_of_team<1>(magnitude<true>(held));
        }
        decode = decode_scale(amax);
        store(held, Divisor(decode), to, position, columns);
    } else {
        unsigned largest = 0;
        for (int start = 0; start < span; start += STEP) {
            load(from + start * INPUT_BYTES, position, max(columns - start, 0), held);
            largest = max(largest, magnitude<true>(held));
        }
        decode = decode_scale(largest_of_team<0>(largest));
        const Divisor divisor(decode);
        for (int start = 0; start < span; start += STEP) {
            load(from + start * INPUT_BYTES, position, max(columns - start, 0), held);
            store(held, divisor, to + start, position, max(columns - start, 0));
        }
    }
    if (position == 0 && row < rows) scale[group * scale_stride + row] = decode;
}
