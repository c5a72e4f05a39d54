// gemm_norm.cu with the operands, the output, or what is read beside sums, in float16: included before
// a source that was written for bfloat16, whose text is part of the digest of rows and stays as it is.
#include "half_ptx.cuh"
#include "norm.cuh"
#if BF16
#include "half_products.cuh"
#endif

// A macro cannot tell what is converted, but the first word in its brackets can. A bias that is part
// of a product stays in three parts of bfloat16, whose range is float32's.
#define bfloat16_pair(first, second) PAIR_##first, second)
#define PAIR_y half_pair(y
#define PAIR_rest bfloat16_pair(rest

#define from_bfloat16(bits) FROM_##bits)
#define FROM_static_cast from_half(static_cast
#define FROM_both from_half(both
#define FROM_part from_bfloat16(part
#include "gemm_norm.cu"
