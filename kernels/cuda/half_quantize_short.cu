// quantize_short.cu for x in float16, see half_quantize.cuh.
#include "half_quantize.cuh"
#include "quantize_short.cu"
