// The mainloop for kernels that normalize: of FP8, whose first step needs no promotion, and of
// bfloat16, which needs none.
//
// Macros besides mainloop.cuh's:
//
//     BF16  1: operands are bfloat16; K, and all that follows from it, is in bytes
#pragma once
#if BF16
// hopper.cuh's products are of FP8; here the same name is that of bfloat16.
#define multiply multiply_fp8
#include "hopper.cuh"
#undef multiply
#include "bfloat16_products.cuh"
#endif
#include "mainloop.cuh"

#if BF16
// Sums of bfloat16 products need no promotion: one set of registers, two steps in flight.
__device__ __forceinline__ void multiply_tile(
    const Multiplier& multiplier, const Memory& memory, Sums& sums, Place& place) {
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
        if constexpr (RESIDENT) {
            if (multiplier.first) wait(memory.arrived(step), 0);
        }
        const Stage stage = multiplier.wait_for(place, step);
        begin_products();
#pragma unroll
        for (int i = 0; i < (STEPS > 1 ? DEPTH / 32 : PRODUCTS); ++i) {
#pragma unroll
            for (int slice = 0; slice < SLICES; ++slice) {
                multiply(
                    slice_of(sums, slice), stage.a.at(i * 32),
                    stage.b.at(slice * SLICE * DEPTH + i * 32), step > 0 || i > 0);
            }
        }
        commit_products();
        if (step > 0) {
            wait_for_products<1>();
            Place before = place;
            before.stage = place.stage == 0 ? STAGES - 1 : place.stage - 1;
            release(memory, multiplier.pipeline, before);
        }
        place.advance();
    }
    wait_for_products<0>();
    pin(sums);
    Place last = place;
    last.stage = place.stage == 0 ? STAGES - 1 : place.stage - 1;
    release(memory, multiplier.pipeline, last);
}
#else
// The first step's sums need no promotion: they are made where the others are added to.
__device__ __forceinline__ void multiply_tile(
    const Multiplier& multiplier, const Memory& memory, Sums& sums, Place& place) {
    if constexpr (SCALES != 0 || !PROMOTES) {
        multiplier.multiply_tile(sums, place);
        return;
    }
    if constexpr (RESIDENT) wait(memory.arrived(0), 0);
    {
        const Stage stage = multiplier.wait_for(place, 0);
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) issue(slice_of(sums, slice), stage, slice);
        wait_for_products<0>();
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) pin(slice_of(sums, slice));
    }
    release(memory.afresh(), multiplier.pipeline, place);
    place.advance();
    if (DOUBLE && STEPS > 1 && !(RESIDENT && multiplier.first)) {
        if constexpr (DOUBLE && STEPS > 1) {
            constexpr int MOST = SLICES == 1 ? 16 : 8;
            constexpr int UNROLLED = STEPS - 1 < MOST ? (STEPS > 1 ? STEPS - 1 : 1) : MOST;
            constexpr int REST = (STEPS - 1) % UNROLLED;
            float sum[2][SLICE / 2];
#pragma unroll 1
            for (int step = 1; step + UNROLLED <= STEPS; step += UNROLLED) {
                multiplier.advance<UNROLLED * SLICES>(sums, sum, place, step);
            }
            if constexpr (REST > 0) {
                multiplier.advance<REST * SLICES>(sums, sum, place, STEPS - REST);
            }
        }
    } else {
        const float no_scale[2] = {};
        float sum[SLICE / 2];
#pragma unroll 1
        for (int step = 1; step < STEPS; ++step) {
            if constexpr (RESIDENT) wait(memory.arrived(step), 0);
            const Stage next = multiplier.wait_for(place, step);
#pragma unroll
            for (int slice = 0; slice < SLICES; ++slice) {
                issue(sum, next, slice);
                wait_for_products<0>();
                pin(sum);
                multiplier.retire(sums, sum, slice, place, step, no_scale);
            }
            place.advance();
        }
    }
}
#endif
