// norm_quantize.cu for x, and what is added to it and multiplied with it, in float16: included before
// a source that was written for bfloat16, whose text is part of the digest of rows and stays as it is.
#include "half_ptx.cuh"
#include "norm.cuh"
#include "ptx.cuh"

// The first word in the brackets of a definition is a type, see half_quantize.cuh.
#define half_of(word, which) HALF_##word, which)
#define HALF_unsigned bfloat16_of(unsigned
#define HALF_word float16_of(word
#define HALF_raw float16_of(raw
#define bfloat16_pair half_pair

__device__ __forceinline__ float float16_of(unsigned word, int which) {
    return from_half(which ? word >> 16 : word);
}

#include "norm_quantize.cu"
