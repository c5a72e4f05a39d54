// Scales of rows in the place of their amax: quantize_tile.cu gathers that into what STAGE 0 made 0,
// and STAGE 1 turns it into scales.
//
//     scale: float32 [count], or the bits of amax; other: the same [others]
//
// Macros besides those of quantize.cuh: STAGE, THREADS
#include "quantize.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) quantize_scales(
    float* scale, float* other, int count, int others) {
    const long long place = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    float* mine = place < count ? scale + place : other + (place - count);
    const bool there = place < static_cast<long long>(count) + others;
    begin_in_turn();
    if (there) *mine = STAGE == 0 ? 0.0f : decode_scale(__float_as_uint(*mine));
}
