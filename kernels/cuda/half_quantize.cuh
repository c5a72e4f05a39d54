// quantize.cuh for x in float16: included before a source that was written for bfloat16, whose text
// is part of the digest of rows and stays as it is.
//
// Magnitudes stay float16 until a scale is made of them: bits in the upper half of a word, which
// order as the values do, as those of bfloat16 that are float32 by themselves. So what sources do
// with halves of a word holds of both. What reads a value is another function here. A macro cannot
// tell a definition from a call, but the first word in its brackets can: that of a definition is a
// type.
#pragma once
#include "half_ptx.cuh"
#include "ptx.cuh"

__device__ __forceinline__ unsigned half_element(const unsigned* word, int index) {
    return __float_as_uint(from_half(word[index / 2] >> index % 2 * 16));
}

#define element(word, index) ELEMENT_##word, index)
#define ELEMENT_const bfloat16_element(const
#define ELEMENT_word half_element(word
#define ELEMENT_part half_element(part
#define larger_finite_magnitude larger_finite_bfloat16
#define decode_scale decode_scale_of_float32
#define cast cast_bfloat16
#include "quantize.cuh"
#undef larger_finite_magnitude
#undef decode_scale
#undef cast

static_assert(HALVES, "float16");

// The magnitudes of both halves of a word, 0 for what is not finite: 0x7c00 or more, which carries
// into the highest bit.
__device__ __forceinline__ unsigned finite_halves(unsigned word) {
    const unsigned size = word & 0x7fff7fffu;
    const unsigned over = (size + 0x04000400u & 0x80008000u) >> 15;
    return size & ~(over * 0xffffu);
}

__device__ __forceinline__ unsigned larger_finite_magnitude(const unsigned* word, unsigned so_far) {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = larger_halves(largest, finite_halves(word[i]));
    return max(so_far, max(largest << 16, largest & 0xffff0000u));
}

__device__ __forceinline__ unsigned magnitude_bits(unsigned amax) {
    return __float_as_uint(from_half(amax >> 16));
}

__device__ __forceinline__ float decode_scale(unsigned amax) {
    return decode_scale_of_float32(magnitude_bits(amax));
}

#define INFINITY_BITS 0x7c000000u
#define finite_magnitudes(word) FINITE_##word)
#define FINITE_unsigned finite_bfloat16(unsigned
#define FINITE_word finite_halves(word

// The smallest scale is 2^-24 / 57344, which needs no lift. One step of the division is enough: all
// 2^20 quotients of the 1024 significands of a float16 by the scales of one come out correctly
// rounded (a test tries them).
__device__ __forceinline__ void cast(
    const unsigned* word, const Divisor& divisor, unsigned* bytes) {
    float quotient[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) quotient[i] = divisor.divide_short(half_element(word, i));
    encode(quotient, bytes);
}

template <class Division>
__device__ __forceinline__ void cast(
    const unsigned* word, const Division& division, unsigned* bytes) {
    cast_bfloat16(word, division, bytes);
}

// Of quantize_turned.cuh. Calls of a template have its arguments between name and brackets, so that
// the macro changes its definition only.
template <bool FINITE>
__device__ __forceinline__ unsigned magnitudes_of(unsigned word) {
    return FINITE ? finite_halves(word) : word & 0x7fff7fffu;
}

__device__ __forceinline__ bool any_infinite_half(unsigned magnitudes) {
    return (magnitudes + 0x04000400u & 0x80008000u) != 0;
}

#define magnitudes_of(word) magnitudes_of_bfloat16(word)
#define any_infinite(magnitudes) ANY_##magnitudes)
#define ANY_unsigned any_infinite_bfloat16(unsigned
#define ANY_magnitudes any_infinite_half(magnitudes

// What is raised is float32: magnitudes that leave the kernel, or of rows, of which quantize_scales.cu
// makes scales.
__device__ __forceinline__ void raise_float32(unsigned* place, unsigned magnitude) {
    raise_to(place, magnitude_bits(magnitude));
}

#define raise_to raise_float32
