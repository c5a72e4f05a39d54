// What the quantize kernels share: reading 16 bytes of a row, amax, exact division, cast, writing.
//
//     s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))
//
// 16 bytes are a chunk: CHUNK elements of a row, kept in 4 words. Macros, set by the launchers:
//
//     INPUT_BYTES   2 for bfloat16, 4 for float32
//     IS_E5M2       1 for e5m2, 0 for e4m3fn
//     IN_PLACE      1 where every row of x starts at a multiple of 16 bytes, else 0
//     WHOLE         1 where every row of data starts at a multiple of CHUNK bytes, else 0
//     POWER_OF_TWO  1 to round scales up to a power of two, else 0
#pragma once
#include "ptx.cuh"

constexpr bool HALVES = INPUT_BYTES == 2;  // a word holds two bfloat16
constexpr int CHUNK = 16 / INPUT_BYTES;
constexpr int PER_WORD = HALVES ? 2 : 1;
constexpr int FETCHED = IN_PLACE ? 4 : 8;  // words read for a chunk
constexpr float MAX = IS_E5M2 ? 57344.0f : 448.0f;
constexpr unsigned INFINITY_BITS = 0x7f800000u;

// Reads the chunk at `place`, of which `columns` elements are in the row; 0 for none. Where rows lie
// askew these are the two pieces of 16 bytes it is part of, each only if it holds some of the row.
__device__ __forceinline__ void fetch(const char* place, int columns, unsigned* words) {
#pragma unroll
    for (int i = 0; i < FETCHED; ++i) words[i] = 0;
    if (columns <= 0) return;
    if constexpr (IN_PLACE) {
        load_16_bytes(place, words);
    } else {
        const int askew = reinterpret_cast<unsigned long long>(place) & 15;
        load_16_cached_bytes(place - askew, words);
        if (min(columns, CHUNK) * INPUT_BYTES > 16 - askew) {
            load_16_cached_bytes(place - askew + 16, words + 4);
        }
    }
}

// Makes of what `fetch` read the 4 words of a chunk, 0 beyond the row. PARTIAL: rows may end
// inside a chunk.
template <bool PARTIAL>
__device__ __forceinline__ void settle(
    const char* place, int columns, unsigned* words, unsigned* word) {
    if constexpr (IN_PLACE) {
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = words[i];
    } else {
        const int askew = reinterpret_cast<unsigned long long>(place) & 15;
#pragma unroll
        for (int i = 0; i < 6; ++i) words[i] = askew & 8 ? words[i + 2] : words[i];
#pragma unroll
        for (int i = 0; i < 5; ++i) words[i] = askew & 4 ? words[i + 1] : words[i];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            word[i] = HALVES ? shifted_words(words[i], words[i + 1], (askew & 2) * 8) : words[i];
        }
    }
    if constexpr (PARTIAL) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int left = columns - i * PER_WORD;
            if (left < PER_WORD) word[i] = HALVES && left == 1 ? word[i] & 0xffffu : 0;
        }
    }
}

// Bits of an element of a chunk as float32.
__device__ __forceinline__ unsigned element(const unsigned* word, int index) {
    if constexpr (HALVES) {
        return index % 2 == 0 ? word[index / 2] << 16 : word[index / 2] & 0xffff0000u;
    } else {
        return word[index];
    }
}

// Largest magnitude in a chunk and so far, as float32 bits, which order as the values do. Infinity
// and NaN come last in that order.
__device__ __forceinline__ unsigned larger_magnitude(const unsigned* word, unsigned so_far) {
    if constexpr (HALVES) {
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = larger_halves(largest, word[i] & 0x7fff7fffu);
        return max(so_far, max(largest << 16, largest & 0xffff0000u));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) so_far = max(so_far, word[i] & 0x7fffffffu);
        return so_far;
    }
}

// The same over finite values.
__device__ __forceinline__ unsigned larger_finite_magnitude(const unsigned* word, unsigned so_far) {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        const unsigned bits = element(word, i) & 0x7fffffffu;
        if (bits < INFINITY_BITS) so_far = max(so_far, bits);
    }
    return so_far;
}

__device__ __forceinline__ float decode_scale(unsigned amax) {
    const float smallest = 1.17549435e-38f;  // 2^-126: x / s stays finite
    float scale = fmaxf(__fdiv_rn(__uint_as_float(amax), MAX), smallest);
    if constexpr (POWER_OF_TWO) {  // a carry out of the fraction is a step of the exponent
        scale = __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & INFINITY_BITS);
    }
    return amax == 0 ? 1.0f : scale;
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
        return corrected(x, corrected(x, __fmul_rn(x, reciprocal)));
    }

    // Of a bfloat16 that is not lifted, and the scale of one: one step is enough. There are 128
    // significands of either, and all 16384 quotients come out correctly rounded (a test tries them).
    __device__ __forceinline__ float divide_short(unsigned bits) const {
        const float x = __uint_as_float(bits);
        return corrected(x, __fmul_rn(x, reciprocal));
    }

private:
    __device__ __forceinline__ float corrected(float x, float quotient) const {
        return __fmaf_rn(__fmaf_rn(quotient, lifted, -x), -reciprocal, quotient);
    }
};

// The same for a scale that amax does not bound. What saturates anyway is cut off first, so that it
// does not overflow on the way; what is not finite becomes NaN by hand then.
struct AnyDivisor {
    Divisor divisor;
    float limit;

    __device__ __forceinline__ explicit AnyDivisor(float scale)
        : divisor(scale), limit(4.0f * MAX * scale) {}

    __device__ __forceinline__ float divide(unsigned bits) const {
        const float x = fminf(fmaxf(__uint_as_float(bits), -limit), limit);
        const float quotient = divisor.divide(__float_as_uint(x));
        const bool finite = (bits & 0x7fffffffu) < INFINITY_BITS;
        return finite ? quotient : __uint_as_float(0x7fffffffu);
    }
};

__device__ __forceinline__ void encode(const float* quotient, unsigned* bytes) {
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
        bytes[i / 4] = encode_pair<IS_E5M2>(quotient[i], quotient[i + 1]) |
                       encode_pair<IS_E5M2>(quotient[i + 2], quotient[i + 3]) << 16;
    }
}

// A chunk's bytes, 4 to a word.
template <class Division>
__device__ __forceinline__ void cast(
    const unsigned* word, const Division& division, unsigned* bytes) {
    float quotient[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) quotient[i] = division.divide(element(word, i));
    encode(quotient, bytes);
}

__device__ __forceinline__ void cast(
    const unsigned* word, const Divisor& divisor, unsigned* bytes) {
    float quotient[CHUNK];
    if (HALVES && divisor.lift == 1.0f) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) quotient[i] = divisor.divide_short(element(word, i));
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) quotient[i] = divisor.divide(element(word, i));
    }
    encode(quotient, bytes);
}

// Writes a chunk's bytes, of which `columns` are in the row: nothing beyond it.
template <bool PARTIAL>
__device__ __forceinline__ void write(const unsigned* bytes, unsigned char* to, int columns) {
    if constexpr (WHOLE) {
        if (PARTIAL ? columns >= CHUNK : columns > 0) {
            if constexpr (HALVES) {
                *reinterpret_cast<unsigned long long*>(to) =
                    bytes[0] | static_cast<unsigned long long>(bytes[1]) << 32;
            } else {
                *reinterpret_cast<unsigned*>(to) = bytes[0];
            }
            return;
        }
    }
    if constexpr (PARTIAL || !WHOLE) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            if (i < columns) to[i] = bytes[i / 4] >> i % 4 * 8 & 0xffu;
        }
    }
}
