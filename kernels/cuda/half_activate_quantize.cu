// activate_quantize.cu for x in float16, see half_quantize.cuh.
#include "half_quantize.cuh"
#include "half_relu_ptx.cuh"
#include "norm.cuh"

#define ELEMENT_read half_element(read

#if ACTIVATION == 1
// relu of float16 is float16, by the only instruction that the source has in a string.
#define asm(...) word[i] = relu_of_halves(read[i])
#else
// Every other f is float32, and so are its magnitudes.
#undef INFINITY_BITS
#define decode_scale decode_scale_of_float32
#endif
#include "activate_quantize.cu"
