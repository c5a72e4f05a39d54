// quantize.cu for x in float16, see half_quantize.cuh.
#include "half_quantize.cuh"

// Of long lines ptxas has more conversions under way at once, in up to 56 registers. With 40 a
// multiprocessor holds three blocks of 512 threads, which have 96 KiB on their way.
#if TEAM > 32 && ACCESSES > 2
#define __launch_bounds__(threads) __attribute__((launch_bounds(threads, 65536 / 40 / threads)))
#endif
#include "quantize.cu"
