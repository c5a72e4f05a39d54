// quantize.cu for x in float16, see half_quantize.cuh.
#include "half_quantize.cuh"

// Of long lines ptxas has more conversions under way at once, in up to 56 registers. With 40 a
// multiprocessor holds three blocks of 512 threads, which have 96 KiB on their way.
#if TEAM > 32 && ACCESSES > 2
#define __launch_bounds__(threads) __attribute__((launch_bounds(threads, 65536 / 40 / threads)))
#endif

// ptxas fetches addresses from constant memory just before it uses them, where teams of a few
// threads wait for them: 8192 x 479 took 5.30 us on an H200, 4.98 with bfloat16.
#if TEAM <= 32 && ACCESSES <= 2 && LINES == 1
#define begin_in_turn() asm volatile("" : "+l"(from), "+l"(to), "+l"(scale)); begin_in_turn()
#endif
#include "quantize.cu"
