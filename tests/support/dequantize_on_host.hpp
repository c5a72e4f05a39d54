// Stands in for kernels/cuda/dequantize_ptx.cuh, beside cuda_on_host.hpp.
#pragma once
#include "half_ptx.cuh"

// As a GPU, it reads and writes at multiples of as many bytes as it moves.
static void move_bytes(void* to, const void* from, const void* place, std::uintptr_t bytes) {
    if (reinterpret_cast<std::uintptr_t>(place) % bytes) __builtin_trap();
    std::memcpy(to, from, bytes);
}

template <class Word>
static void load_word(const void* from, Word& word) {
    move_bytes(&word, from, from, sizeof(Word));
}
template <class Word>
static void load_cached_word(const void* from, Word& word) {
    load_word(from, word);
}
static void store_16_bytes(void* to, const unsigned* word) { move_bytes(to, word, to, 16); }

// A float16 has the exponent of E5M2 and more bits behind it; E4M3's lies 8 lower.
template <bool E5M2>
static unsigned decode_byte(unsigned byte) {
    if constexpr (E5M2) return byte << 8;
    const unsigned sign = (byte & 0x80) << 8, size = byte & 0x7f;
    if (size == 0x7f) return 0x7fff;
    if (size < 8) return sign | (size ? to_half(std::ldexp(float(size), -9)) : 0);
    return sign | (size << 7) + (8 << 10);
}
template <bool E5M2>
static unsigned decode_pair(unsigned bytes) {
    return decode_byte<E5M2>(bytes & 0xff) | decode_byte<E5M2>(bytes >> 8) << 16;
}

static unsigned to_bfloat16(float value) {
    const unsigned bits = __float_as_uint(value);
    return std::isnan(value) ? 0x7fff : bits + 0x7fff + (bits >> 16 & 1) >> 16;
}
static unsigned bfloat16_pair(float first, float second) {
    return to_bfloat16(first) | to_bfloat16(second) << 16;
}
