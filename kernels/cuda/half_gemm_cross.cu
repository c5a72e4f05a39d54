// gemm_cross.cu with x0, x, the output and a bias of 2 bytes in float16: included before a source that
// was written for bfloat16, whose text is part of the digest of rows and stays as it is.
#include "half_ptx.cuh"

// The first word in the brackets of a definition is a type, see half_quantize.cuh.
#define bfloat16_pair(first, second) PAIR_##first, second)
#define PAIR_float bfloat16_pair(float
#define PAIR_fmaf half_pair(fmaf
#define PAIR_v half_pair(v

#define from_bfloat16(bits) FROM_##bits)
#define FROM_unsigned from_bfloat16(unsigned
#define FROM_static_cast from_half(static_cast
#define FROM_factor from_half(factor
#define FROM_term from_half(term
#include "gemm_cross.cu"
