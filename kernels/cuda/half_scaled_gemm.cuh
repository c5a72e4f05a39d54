// scaled_gemm.cu with OUT in float16, and what epilogues read: included before a source that was
// written for bfloat16, whose text is part of the digest of rows and stays as it is.
//
// A macro cannot tell a definition from a call, but the first word in its brackets can: that of a
// definition is a type.
#pragma once
#include "half_ptx.cuh"

static_assert(OUT == 2, "float16");

#define bfloat16_pair(first, second) PAIR_##first, second)
#define PAIR_float bfloat16_pair(float
#define PAIR_v half_pair(v

#define from_bfloat16(bits) FROM_##bits)
#define FROM_unsigned from_bfloat16(unsigned
#define FROM_pair from_half(pair
#define FROM_from from_half(from
#define FROM_factor from_half(factor
#define FROM_term from_half(term
#define FROM_x0 from_half(x0
#define FROM_x from_half(x
