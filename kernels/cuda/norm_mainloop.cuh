// The mainloop for kernels that normalize: sums that are never promoted, and sums of FP8 whose
// first step needs no promotion.
//
// Macros besides mainloop.cuh's:
//
//     BF16      1: operands are bfloat16; K, and all that follows from it, is in bytes
//     FAST      1: sums of FP8 are not promoted either
//     PERMUTED  1: rows of b change places, 32 at a time, see `column_of`
#pragma once
#include "mainloop.cuh"
#include "norm.cuh"
#include "whole_products.cuh"

// Nothing is added up outside of the tensor core.
constexpr bool WHOLE = BF16 || (SCALES == 0 && (FAST || STEPS == 1));
static_assert(!PERMUTED || (N % 32 == 0 && BLOCK_N % 32 == 0), "rows are permuted by 32");

// The first of two columns of a tile, those of values `i` and `i + 1` of a thread; i is a multiple
// of 4. As products have it, a thread's pairs are 8 columns apart. Where rows of b are permuted, it
// has 8 neighbors of each 32, and writes them at once.
__device__ __forceinline__ int column_of(int i) {
    const int in_quad = threadIdx.x % 4;
    return PERMUTED ? i / 16 * 32 + in_quad * 8 + i / 4 % 4 * 2 : i * 2 + in_quad * 2;
}

// Where products have a column of a tile.
__device__ __forceinline__ int place_of(int column) {
    return PERMUTED ? column / 32 * 32 + column % 8 / 2 * 8 + column % 32 / 8 * 2 + column % 2
                    : column;
}

__device__ __forceinline__ void prefetch_box(const TensorMap& map, int x, int y) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(x),
        "r"(y));
}

__device__ __forceinline__ void prefetch(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

__device__ __forceinline__ void load_b(
    const Operands& operands, unsigned to, unsigned barrier, int step, int row) {
    if constexpr (PERMUTED) {  // rows of b as [N / 32, 4, 4, 2], the two in the middle swapped
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%3, %4, %4, %4, %5}], [%2];" ::"r"(to),
            "l"(operands.b), "r"(barrier), "r"(step * DEPTH), "r"(0), "r"(row / 32)
            : "memory");
    } else {
        load_box(to, *operands.b, barrier, step * DEPTH, row);
    }
}

// Elected. Brings operands of the first tiles into the L2: of what several blocks read, each a
// part. The L2 is where all of the GPU sees the same: what the kernel before still writes is
// written there, so that this may be done before its end.
__device__ __forceinline__ void prefetch_operands(const Operands& operands) {
    constexpr int AHEAD = STEPS < STAGES ? STEPS : STAGES;
    const int column = blockIdx.x % TILES_N, lane = blockIdx.x / TILES_N;
    const int lanes = gridDim.x / TILES_N;
#pragma unroll 1
    for (int i = column; i < AHEAD * PIPELINES; i += TILES_N) {
        const int row = (lane * PIPELINES + i % PIPELINES) * TILE_ROWS;
        if (row < operands.m) prefetch_box(*operands.a[0], i / PIPELINES * DEPTH, row);
    }
#pragma unroll 1
    for (int step = lane; step < (RESIDENT ? STEPS : AHEAD); step += lanes) {
        if constexpr (PERMUTED) {
            asm volatile(
                "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %2, %2, %3}];" ::"l"(
                    operands.b),
                "r"(step * DEPTH), "r"(0), "r"(column * (BLOCK_N / 32)));
        } else {
            prefetch_box(*operands.b, step * DEPTH, column * BLOCK_N);
        }
    }
}

// Moves all operands of a pipeline. One thread of a warp.
__device__ __forceinline__ void produce_tiles(
    const Memory& memory, const Operands& operands, int pipeline) {
    Walk walk(operands, pipeline);
    Place place;
    Tile tile;
    bool first = pipeline == 0;
    while (walk.next(tile)) {
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            const unsigned full = memory.full(pipeline, place.stage);
            wait(memory.empty(pipeline, place.stage), place.parity ^ 1);
            if constexpr (RESIDENT) {
                if (first) {
                    expect_bytes(memory.arrived(step), B_BYTES);
                    load_b(operands, memory.b(0, 0, step), memory.arrived(step), step, tile.column);
                }
            }
            expect_bytes(full, LOADED_BYTES);
            load_box(memory.a(pipeline, place.stage), *operands.a[0], full, step * DEPTH, tile.row);
            if constexpr (SCALES == 1) {
                load_box(
                    memory.scales(pipeline, place.stage), *operands.a_scale[0], full, tile.row & ~3,
                    step);
            }
            if constexpr (!RESIDENT) {
                load_b(operands, memory.b(pipeline, place.stage, step), full, step, tile.column);
            }
            place.advance();
        }
        first = false;
    }
}

// After `begin_in_cluster`: the other blocks have begun, and their barriers are there.
__device__ __forceinline__ void await_cluster() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Warpgroups with tiles of their own multiply in turn, one while the other normalizes. Left to
// themselves both multiply at a time, each at half the speed, and then none does: 32768 x 2048 x
// 512 took 70 us instead of 63. The first has as many tiles as the second or one more, so that
// every turn that is awaited is given; the last that is given may be awaited by nobody.
constexpr bool IN_TURN = WHOLE && RESIDENT && WARPGROUPS == 2;

__device__ __forceinline__ void await_turn(int warpgroup) {
    asm volatile("bar.sync %0, 256;" ::"r"(warpgroup + 1) : "memory");
}

__device__ __forceinline__ void give_turn_to(int warpgroup) {
    asm volatile("bar.arrive %0, 256;" ::"r"(warpgroup + 1) : "memory");
}

// A value for each column, to be added to all rows of a tile by one more product, of ones and of
// the values in three parts, which bfloat16 holds exactly: one instruction, where each thread would
// load and add 128 of them.
struct Plus {
    static constexpr int BYTES = 256 + BLOCK_N * 16;
    unsigned base;

    // Before `publish_shared_memory` and a barrier.
    __device__ __forceinline__ void store(int column, float value) const {
        float rest = value;
        unsigned part[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            part[i] = bfloat16_pair(rest, 0.0f);
            rest -= from_bfloat16(part[i]);
        }
        store_16_bytes(base + 256 + column * 16, part[0] | part[1] << 16, part[2]);
        if (column < 8) {
            store_16_bytes(base + column * 16, 0x3f803f80, 0x3f80);
            store_16_bytes(base + 128 + column * 16, 0, 0);
        }
    }

    __device__ __forceinline__ void add_to(Sums& sums) const {
        // The second half of K is 0 times the first.
        multiply_bfloat16(sums, plain_matrix(base, 128, 0), plain_matrix(base + 256, 0, 128), 1);
    }

  private:
    __device__ __forceinline__ static void store_16_bytes(
        unsigned to, unsigned first, unsigned second) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, 0, 0};" ::"r"(to), "r"(first), "r"(second)
                     : "memory");
    }
};

// One set of registers, two steps in flight.
template <bool ADDS>
__device__ __forceinline__ void multiply_whole_tile(
    const Multiplier& multiplier, const Memory& memory, Sums& sums, Place& place,
    const Plus& plus) {
    const auto before = [](Place at) {
        at.stage = at.stage == 0 ? STAGES - 1 : at.stage - 1;
        return at;
    };
    if constexpr (IN_TURN) await_turn(multiplier.pipeline);
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
        if constexpr (RESIDENT) {
            if (multiplier.first) wait(memory.arrived(step), 0);
        }
        const Stage stage = multiplier.wait_for(place, step);
        begin_products();
#pragma unroll
        for (int i = 0; i < (STEPS > 1 ? DEPTH / 32 : (K + 31) / 32); ++i) {
            multiply_whole(sums, stage.a.at(i * 32), stage.b.at(i * 32), step > 0 || i > 0);
        }
        commit_products();
        if (step > 0) {
            wait_for_products<1>();
            release(memory, multiplier.pipeline, before(place));
        }
        place.advance();
    }
    if constexpr (ADDS) {
        begin_products();
        plus.add_to(sums);
        commit_products();
    }
    if constexpr (IN_TURN) give_turn_to(1 - multiplier.pipeline);
    wait_for_products<0>();
    pin(sums);
    release(memory, multiplier.pipeline, before(place));
}

// The first step's sums need no promotion: they are made where the others are added to.
template <bool ADDS>
__device__ __forceinline__ void multiply_tile(
    const Multiplier& multiplier, const Memory& memory, Sums& sums, Place& place,
    const Plus& plus) {
    static_assert(!ADDS || WHOLE, "what is promoted has no room for more");
    if constexpr (WHOLE) {
        multiply_whole_tile<ADDS>(multiplier, memory, sums, place, plus);
        return;
    } else if constexpr (SCALES != 0) {
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
