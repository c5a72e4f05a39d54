// column_sums.cu of a matrix in float16, included behind what converts its elements.
#include "half_ptx.cuh"
#include "ptx.cuh"
#include "quantize_sums.cuh"

// Of an element in the upper half of a word, as bfloat16 is float32 there.
#define __uint_as_float(bits) from_half((bits) >> 16)
#include "column_sums.cu"
