// Stands in for kernels/cuda/half_ptx.cuh, beside cuda_on_host.hpp.
#pragma once

static float from_half(unsigned bits) {
    const unsigned exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    float size = std::ldexp(static_cast<float>(fraction), -24);
    if (exponent == 31) size = __uint_as_float(0x7f800000u | fraction << 13);
    else if (exponent) size = std::ldexp(1024.0f + fraction, exponent - 25);
    return bits & 0x8000 ? -size : size;
}
