// Stands in for kernels/cuda/half_ptx.cuh, beside cuda_on_host.hpp.
#pragma once

static float from_half(unsigned bits) {
    const unsigned exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    float size = std::ldexp(static_cast<float>(fraction), -24);
    if (exponent == 31) size = __uint_as_float(0x7f800000u | fraction << 13);
    else if (exponent) size = std::ldexp(1024.0f + fraction, exponent - 25);
    return bits & 0x8000 ? -size : size;
}

static unsigned to_half(float value) {
    const float size = std::fabs(value);
    const unsigned sign = __float_as_uint(value) >> 16 & 0x8000;
    if (std::isnan(value)) return 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;
    const int exponent = size == 0.0f ? -14 : max(std::ilogb(size), -14);
    return sign | ((exponent + 14) << 10) + unsigned(std::nearbyint(std::ldexp(size, 10 - exponent)));
}

static unsigned half_pair(float first, float second) {
    return to_half(first) | to_half(second) << 16;
}
