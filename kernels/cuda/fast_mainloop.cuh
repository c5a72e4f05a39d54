// Products of FP8 matrices in tiles of any width, by pairs of blocks that share an operand, with or
// without promoted sums: what replaces parts of mainloop.cuh, see there, where an epilogue that was
// written for it is included behind this file.
//
// A step of a tile of 128 x 128 copies 256 rows of 128 bytes from the L2 for 512 cycles of products,
// which is what the L2 sends one SM. Rows that start within a cache line lie in two of them: so
// 2176 x 1280 x 3984 took an H200 40 us, and 24 by pairs.
//
// Macros beside those of mainloop.cuh, of which BLOCK_N may be 16 to 224 in steps of 16, or 256, and
// WARPGROUPS 3 here, or 4 of narrow tiles:
//
//     ABOVE      2: two blocks of a cluster take tiles that lie above each other. Each copies one
//                half of b's rows, into both.
//     ALONG      2: two take tiles that lie beside each other, and it is a that they share. With
//                ABOVE, too, a cluster has four blocks. With PARTS > 1 it is as many of these, each
//                of which sums up a part of K.
//     PROMOTE    1: sums of 128 are added in float32, as mainloop.cuh does; 0: they stay in the
//                tensor core's registers for all of K.
//     IN_TURN    1: each of two warpgroups has every second tile of the block, 128 rows: one writes
//                while the other multiplies. They read one ring in turn. 0: they share tiles.
#pragma once
#define WHOLE_SUMS (!PROMOTE)
#define ANY_WIDTH 1
#include "hopper.cuh"

constexpr int PAIRS = ABOVE * ALONG;

// Of a cluster of PARTS pairs, or of single blocks: which part of K this block sums up, and its place
// in the pair.
__device__ __forceinline__ unsigned part_of_sum() {
    return PAIRS == 1 ? rank_in_cluster() : rank_in_cluster() / PAIRS;
}

__device__ __forceinline__ unsigned rank_in_pair() {
    return PARTS == 1 ? rank_in_cluster() : rank_in_cluster() % PAIRS;
}

// The address of a place in the block of this pair, and in the same block of another pair.
__device__ __forceinline__ unsigned address_in_pair(unsigned address, unsigned rank) {
    return address_in(address, PARTS == 1 ? rank : part_of_sum() * PAIRS + rank);
}

__device__ __forceinline__ unsigned address_in_part(unsigned address, unsigned part) {
    return address_in(address, PAIRS == 1 ? part : part * PAIRS + rank_in_pair());
}

// At the barrier of one block of the pair.
__device__ __forceinline__ void arrive_in(unsigned barrier, unsigned rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_pair(barrier, rank))
                 : "memory");
}

// A block copies into the others that read its operand when their stages are free: each arrives at
// the barriers of all blocks that it shares an operand with, and at its own.
constexpr int SHARERS = ABOVE + ALONG - 1;  // blocks that this one shares an operand with, and itself

// The place in the pair of such a block.
__device__ __forceinline__ unsigned sharer(unsigned number) {
    const unsigned rank = rank_in_pair();
    return number == 0 ? rank : number == 1 && ALONG == 2 ? rank ^ 1 : rank ^ ALONG;
}

__device__ __forceinline__ void arrive_in_all(unsigned barrier) {
    if constexpr (PAIRS == 1) return arrive(barrier);
#pragma unroll
    for (int i = 0; i < SHARERS; ++i) arrive_in(barrier, sharer(i));
}

// What shares sums knows of parts alone.
#define rank_in_cluster part_of_sum
#define address_in address_in_part
#if PROMOTE
#define PRODUCT_N (BLOCK_N > 128 ? BLOCK_N / 2 : BLOCK_N)
#include "more_products.cuh"
#define multiply multiply_whole
#define arrive arrive_in_all
#include "mainloop.cuh"
#undef arrive
#undef multiply
#else
#define PRODUCT_N BLOCK_N
#include "mainloop.cuh"
#include "more_products.cuh"
#endif

static_assert(SCALES == 0 && BATCH == 1, "one product, scaled at its end");
static_assert(PAIRS == 1 || !RESIDENT, "a pair streams b");
static_assert(STEPS >= PARTS, "every block has a part");
static_assert(!IN_TURN || (WARPGROUPS == 2 && PARTS == 1 && !RESIDENT && BLOCK_N <= 144), "turns");

// Elected. A box into the shared memory of two blocks, at the same place, and bytes for the barrier
// of each: this block and the one `apart` ranks on or before.
__device__ __forceinline__ void load_box_for_two(
    unsigned to, const TensorMap& map, unsigned barrier, int x, int y, unsigned apart) {
    const unsigned rank = rank_in_pair();
    unsigned both = 1u << rank | 1u << (rank ^ apart);
    if constexpr (PARTS > 1) both <<= part_of_sum() * PAIRS;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(&map), "r"(barrier),
        "r"(x), "r"(y), "h"(static_cast<unsigned short>(both)) : "memory");
}

constexpr int PAIRS_N = (TILES_N + ALONG - 1) / ALONG;
// A block is launched with as many registers of each thread as its share of the SM's 65536 has. Those
// that multiply take what its producers give: to take more would be to wait forever.
constexpr int LAUNCH_REGISTERS = 65536 / (THREADS * SM_BLOCKS) / 8 * 8;
constexpr int WHOLE_REGISTERS =
    (LAUNCH_REGISTERS * THREADS - 128 * PRODUCER_REGISTERS) / MATH_THREADS / 8 * 8;
constexpr int SUM_REGISTERS = PROMOTE ? BLOCK_N / 2 + SLICE / 2 * (1 + DOUBLE) + 36
                                      : BLOCK_N / 2 * (1 + IN_TURN) + 56;
static_assert(WARPGROUPS == 1 || (WHOLE_REGISTERS <= MATH_REGISTERS &&
                                  SUM_REGISTERS <= WHOLE_REGISTERS), "registers");

// What a warpgroup finishes at once: IN_TURN a half of its tile, with the sums of the second.
struct Part : Tile {
    int half = 1;
    float next[BLOCK_N / 2];
};

// The tiles of a block.
struct PairedWalk {
    int at, step, tiles_m, m, turn = 0;

    __device__ __forceinline__ PairedWalk(const Operands& operands, int) : m(operands.m) {
        tiles_m = (m + ABOVE * TILE_ROWS - 1) / (ABOVE * TILE_ROWS);
        at = blockIdx.x / (PAIRS * PARTS);
        step = gridDim.x / (PAIRS * PARTS);
    }

    __device__ __forceinline__ bool next(Tile& tile) {
        const int band = at / (BAND * PAIRS_N), in_band = at % (BAND * PAIRS_N);
        const int height = min(BAND, tiles_m - band * BAND);
        const int rank = PAIRS == 1 ? 0 : rank_in_pair();
        tile.row = ((band * BAND + in_band % height) * ABOVE + rank / ALONG) * TILE_ROWS;
        tile.column = (in_band / height * ALONG + rank % ALONG) * BLOCK_N;
        tile.batch = 0;
        tile.end = m;
        const bool is_there = at < tiles_m * PAIRS_N;
        at += step;
        return is_there;
    }

    // Of a warpgroup. What finishes it adds ROWS for the second warpgroup.
    __device__ __forceinline__ bool next(Part& part) {
        if constexpr (!IN_TURN) return next(static_cast<Tile&>(part));
        part.half ^= 1;
        if (part.half) {
            part.row += ROWS;
            return true;
        }
        const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
        if (turn == 0) {
            turn = 1;
            at += warpgroup * step;
        } else {
            at += step;
        }
        const bool is_there = next(static_cast<Tile&>(part));
        part.row -= warpgroup * ROWS;
        return is_there;
    }
};

__device__ __forceinline__ void initialize_pair(const Memory& memory, const Operands& operands) {
    if constexpr (PAIRS == 1 && !IN_TURN) return initialize(memory, operands);
    prefetch_map(*operands.a[0]);
    prefetch_map(*operands.b);
    for (int stage = 0; stage < STAGES; ++stage) {
        initialize_barrier(memory.full(0, stage), 1);
        initialize_barrier(memory.empty(0, stage), 4 * SHARERS * (IN_TURN ? 1 : WARPGROUPS));
    }
    publish_barriers();
}

__device__ __forceinline__ void begin_pair_in_turn() {
    if constexpr (PAIRS > 1) synchronize_cluster();  // barriers of all
    begin_in_turn();
}

__device__ __forceinline__ void produce_for_pair(
    const Memory& memory, const Operands& operands, int pipeline) {
    if constexpr (PAIRS == 1) return produce(memory, operands, pipeline);
    PairedWalk walk(operands, pipeline);
    Place place;
    Tile tile;
    const unsigned rank = rank_in_pair();
    while (walk.next(tile)) {
        for (int step = first_step(); step < last_step(); ++step) {
            const unsigned full = memory.full(0, place.stage);
            wait(memory.empty(0, place.stage), place.parity ^ 1);
            expect_bytes(full, LOADED_BYTES);
            constexpr int ENDS[] = {A_ENDS};
            int slice = 0, begin = 0;  // of the slices of a
#pragma unroll
            for (int i = 0; i + 1 < A_SLICES; ++i) {
                if (step >= ENDS[i]) slice = i + 1, begin = ENDS[i];
            }
            const unsigned a = memory.a(0, place.stage), b = memory.b(0, place.stage, step);
            const int x = (step - begin) * DEPTH;
            if constexpr (ALONG == 2) {
                const int half = rank % ALONG * (TILE_ROWS / 2);
                load_box_for_two(
                    a + half * DEPTH, *operands.a[slice], full, x, tile.row + half, 1);
            } else {
                load_box(a, *operands.a[slice], full, x, tile.row);
            }
            if constexpr (ABOVE == 2) {
                const int half = rank / ALONG * (BLOCK_N / 2);
                load_box_for_two(
                    b + half * DEPTH, *operands.b, full, step * DEPTH, tile.column + half, ALONG);
            } else {
                load_box(b, *operands.b, full, step * DEPTH, tile.column);
            }
            place.advance();
        }
    }
    // Others arrive at barriers here until they have read all.
    for (int stage = 0; stage < STAGES; ++stage) {
        wait(memory.empty(0, place.stage), place.parity ^ 1);
        place.advance();
    }
}

#if !PROMOTE
// What multiplies a tile: one warpgroup.
struct WholeMultiplier {
    const Memory& memory;
    const Operands& operands;
    Part& part;
    int pipeline, warpgroup;
    bool first;  // tile of the block

    __device__ __forceinline__ void release_both(const Place& place) const {
        const int lane = threadIdx.x % 32;
        const unsigned barrier = memory.empty(pipeline, place.stage);
        if constexpr (PAIRS > 1) {
            if (lane < SHARERS) arrive_in(barrier, sharer(lane));
        } else {
            if (lane == 0) arrive(barrier);
        }
    }

    // Products of one step.
    __device__ __forceinline__ void issue_whole(float (&sums)[BLOCK_N / 2], const Stage& stage,
                                                int half, bool adds) const {
#pragma unroll
        for (int i = 0; i < DEPTH / 32; ++i) {
            const unsigned long long a = stage.a.at(half * ROWS * DEPTH + i * 32);
            multiply_whole(sums, a, stage.b.at(i * 32), adds || i > 0);
        }
    }

    // What full barriers tell is one round of a ring at most, so that a warpgroup begins when the
    // other has waited for all of its tile. With products of both in the queue, no time is lost.
    __device__ __forceinline__ void await_turn() const {
        asm volatile("bar.sync %0, 256;" ::"r"(3 + warpgroup) : "memory");
    }

    __device__ __forceinline__ void pass_turn() const {
        asm volatile("bar.arrive %0, 256;" ::"r"(4 - warpgroup) : "memory");
    }

    // Past the other's tile.
    static __device__ __forceinline__ void skip(Place& place) {
        place.stage += STEPS % STAGES;
        place.parity ^= STEPS / STAGES & 1;
        if (place.stage >= STAGES) {
            place.stage -= STAGES;
            place.parity ^= 1;
        }
    }

    __device__ __forceinline__ void multiply_tile(Sums& sums, Place& place) const {
        if constexpr (IN_TURN) {
            if (part.half) {
#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; ++i) sums[i] = part.next[i];
                return;
            }
            if (!first || warpgroup) {
                skip(place);
                await_turn();
            }
        }
        Place before = place;
#pragma unroll 1
        for (int step = first_step(); step < last_step(); ++step) {
            if constexpr (RESIDENT) {
                if (first) wait(memory.arrived(step), 0);
            }
            wait(memory.full(pipeline, place.stage), place.parity);
            const Stage stage(memory, pipeline, IN_TURN ? 0 : warpgroup, place, step);
            const bool adds = step > first_step();
            pin(sums);
            if constexpr (IN_TURN) pin(part.next);
            begin_products();
            issue_whole(sums, stage, 0, adds);
            if constexpr (IN_TURN) issue_whole(part.next, stage, 1, adds);
            commit_products();
            if (adds) {
                wait_for_products<1>();
                release_both(before);
                before = place;
            }
            place.advance();
        }
        if constexpr (IN_TURN) pass_turn();
        wait_for_products<0>();
        pin(sums);
        if constexpr (IN_TURN) pin(part.next);
        release_both(before);
    }
};
#define Multiplier WholeMultiplier
#endif

#if !RESIDENT
#define Walk PairedWalk
#endif
#define MATH_REGISTERS WHOLE_REGISTERS
#define Tile Part
#define initialize initialize_pair
#define begin_in_turn begin_pair_in_turn
#define produce produce_for_pair
