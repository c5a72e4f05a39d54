// norm_backward.cu with dd, y, dy, and vectors of 2 bytes, in float16: included before a source that
// was written for bfloat16, whose text is part of the digest of rows and stays as it is.
#include "half_ptx.cuh"
#include "norm.cuh"
#include "ptx.cuh"
#include "quantize.cuh"

// Of the first look at a tile.
#define element(word, index) __float_as_uint(from_half(word[index / 2] >> index % 2 * 16))
// Of the others: a zero that no compiler knows keeps what one look converts from the next, which
// would have no registers for it.
#define __byte_perm(word, zero, order)                                                            \
    __float_as_uint(from_half((word | zero) >> ((order) == 0x3244 ? 16 : 0)))
#define from_bfloat16 from_half
#define bfloat16_pair half_pair
#include "norm_backward.cu"
