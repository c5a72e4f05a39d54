// Products of FP8 matrices on Hopper's tensor cores, for any epilogue.
//
//     d[m, N] = a[m, K] b[N, K]^T,  both row-major, 128 bytes of K at a time
//
// A block holds warpgroups that multiply, and one more whose threads move operands into rings of
// shared memory by bulk copies; blocks stay on their SM and walk over tiles of d. A warpgroup owns
// ROWS x BLOCK_N of d, in registers.
//
//     RESIDENT  BLOCK_N rows of b are loaded once, all of K. Each warpgroup has a ring, a producer
//               thread and tiles of its own, so that one writes out while the other multiplies
//               (ping-pong) and only a is streamed.
//     else      Warpgroups share a ring of a and b, and one tile of WARPGROUPS * ROWS rows.
//               CLUSTER blocks share b, each loading a part for all of them, or, if SPLIT_K, share a
//               tile, of whose sums each takes a part.
//
// The tensor core keeps some 14 bits of a running sum, so every 128 of K its sum is taken out
// and added up in float32. At most 128 columns pass through one set of 64 registers: two of 128x256
// tiles' warpgroups then need 64 + 128 and some, of the 232 they have. While one of them adds,
// the other multiplies.
//
// Macros, all set by scaled_gemm.py:
//
//     N, K                 sizes; m is a parameter
//     BLOCK_N              columns of a tile: 8, 16, 24, 32, 64, 96, 128, 192 or 256
//     ROWS                 of a warpgroup's tile: 64 or 128
//     WARPGROUPS           that multiply: 1, 2 or 3
//     RESIDENT, STAGES, CLUSTER, SPLIT_K
//     DOUBLE               1: a warpgroup multiplies a unit of work while it adds the one before, in
//                          registers of its own; tiles of half the size have them
//     SKEW                 steps that the second warpgroup starts behind the first, so that one
//                          writes out while the other multiplies; 0: none
//     BAND                 tiles along m that are taken before the next columns are
//     SCALES               0: none here; 1: of a by 1x128 and of b by 128x128; 2: of both by 1x128
//     BATCH                1: rows of all products are tiled as one; more: so many products of m
//                          rows each; 0: `groups` products, rows of which are offsets on the device
//     A_TYPE, B_TYPE       e4m3 or e5m2
#pragma once
#include "hopper.cuh"

constexpr int DEPTH = 128;  // of a step along K
constexpr int STEPS = (K + DEPTH - 1) / DEPTH;
constexpr int TILES_N = (N + BLOCK_N - 1) / BLOCK_N;
constexpr int PIPELINES = RESIDENT ? WARPGROUPS : 1;
constexpr int SHARED_BY = RESIDENT ? 1 : WARPGROUPS;  // warpgroups of a pipeline
constexpr int TILE_ROWS = ROWS * SHARED_BY;
constexpr int BLOCKS_M = ROWS / 64;
constexpr int SLICES = BLOCK_N > 128 ? 2 : 1;
constexpr int SLICE = BLOCK_N / SLICES;
constexpr int MULTICAST = SPLIT_K ? 1 : CLUSTER;
constexpr int PARTS = SPLIT_K ? CLUSTER : 1;  // of K
constexpr int MATH_THREADS = 128 * WARPGROUPS;
constexpr int THREADS = MATH_THREADS + (WARPGROUPS > 1 ? 128 : 32);
// Of a thread, where there is more than one warpgroup: 64512 of the SM's 65536 in all.
constexpr int MATH_REGISTERS = WARPGROUPS == 2 ? 232 : 160;
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 2 ? 40 : 24;
constexpr bool PROMOTES = SCALES != 0 || STEPS > 1;

constexpr int A_BYTES = TILE_ROWS * DEPTH;
constexpr int B_BYTES = BLOCK_N * DEPTH;
constexpr int STAGE_BYTES = A_BYTES + (RESIDENT ? 0 : B_BYTES);
// Scales of a stage, rounded up so that the next stage's are aligned to 128 bytes.
constexpr int A_SCALE_BYTES = SCALES ? TILE_ROWS * 4 : 0;
constexpr int B_SCALE_BYTES = SCALES == 2 ? (BLOCK_N * 4 + 127) / 128 * 128 : 0;
constexpr int SCALE_BYTES = A_SCALE_BYTES + B_SCALE_BYTES;
constexpr int LOADED_BYTES =
    STAGE_BYTES + A_SCALE_BYTES + (SCALES == 2 ? BLOCK_N * 4 : 0);

// Shared memory: operands first, aligned to 1024 bytes; scales and barriers wherever there is room.
constexpr int RINGS_AT = RESIDENT ? STEPS * B_BYTES : 0;
constexpr int OPERAND_BYTES = RINGS_AT + PIPELINES * STAGES * STAGE_BYTES;
constexpr int BARRIERS_AT = PIPELINES * STAGES * SCALE_BYTES;
constexpr int SMALL_BYTES = BARRIERS_AT + (2 * PIPELINES * STAGES + (RESIDENT ? STEPS : 0)) * 8;

static_assert(!RESIDENT || CLUSTER == 1, "what stays is not shared");
static_assert(SLICE == 8 || SLICE == 16 || SLICE == 24 || SLICE == 32 || SLICE == 64 ||
              SLICE == 96 || SLICE == 128, "columns of a product");
static_assert(SCALES != 1 || 128 % SLICE == 0, "a slice lies in one block of scales");
static_assert(SKEW == 0 || (WARPGROUPS == 2 && PARTS == 1 && PROMOTES && SKEW <= STEPS), "skew");
static_assert(!DOUBLE || PARTS == 1, "parts of K have any number of steps");
static_assert(BATCH == 1 || !RESIDENT, "weights of a batch are streamed");

// Of a thread: of each 8 columns of a block of 64 rows, columns lane % 4 * 2 and the next of row
// lane / 4 and of row lane / 4 + 8.
using Sums = float[BLOCKS_M][BLOCK_N / 2];

struct Operands {
    const TensorMap& a;
    const TensorMap& b;
    const TensorMap& a_scale;  // where SCALES
    const TensorMap& b_scale;  // where SCALES == 2
    const float* block_scale;  // where SCALES == 1: [STEPS, N / 128], contiguous along...
    int block_scale_step, block_scale_column;  // ... elements between steps and columns
    const int* offsets;  // where BATCH == 0: [groups + 1]
    int m, groups;
};

// A tile of d.
struct Tile {
    int row;     // first, in a's rows (of product `batch` where BATCH > 1)
    int column;  // first
    int batch;
    int end;     // of the rows that belong to it
};

// The tiles of a pipeline, in turn.
struct Walk {
    const Operands& operands;
    int at, step, tiles_m, group, group_at;

    __device__ __forceinline__ Walk(const Operands& given, int pipeline) : operands(given) {
        tiles_m = (given.m + TILE_ROWS - 1) / TILE_ROWS;
        group = 0, group_at = 0;
        if constexpr (RESIDENT) {
            const int lanes = gridDim.x / TILES_N;
            at = blockIdx.x / TILES_N * PIPELINES + pipeline;
            step = lanes * PIPELINES;
        } else {
            at = blockIdx.x / CLUSTER;
            step = gridDim.x / CLUSTER;
        }
    }

    __device__ __forceinline__ bool next(Tile& tile) {
        const int place = at;
        at += step;
        tile.batch = 0;
        tile.end = operands.m;
        if constexpr (RESIDENT) {
            tile.column = blockIdx.x % TILES_N * BLOCK_N;
            tile.row = place * TILE_ROWS;
            return place < tiles_m;
        } else if constexpr (BATCH == 0) {
            while (group < operands.groups) {
                const int first = operands.offsets[group], end = operands.offsets[group + 1];
                const int rows = max(end - first, 0);
                const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS * TILES_N;
                const int inside = place - group_at;
                if (inside < tiles) {
                    tile.batch = group;
                    tile.row = first + inside / TILES_N * TILE_ROWS;
                    tile.column = inside % TILES_N * BLOCK_N;
                    tile.end = end;
                    return true;
                }
                group_at += tiles;
                ++group;
            }
            return false;
        } else {
            // Blocks of a cluster that share b take neighbors along m; some may lie past the end.
            const int rows = (tiles_m + MULTICAST - 1) / MULTICAST;
            const int of_product = rows * TILES_N;
            int inside = place;
            if constexpr (BATCH > 1) {
                tile.batch = place / of_product;
                inside = place % of_product;
            }
            const int band = inside / (BAND * TILES_N);
            const int in_band = inside % (BAND * TILES_N);
            const int height = min(BAND, rows - band * BAND);
            int tile_m = band * BAND + in_band % height;
            if constexpr (MULTICAST > 1) tile_m = tile_m * MULTICAST + rank_in_cluster();
            tile.row = tile_m * TILE_ROWS;
            tile.column = in_band / height * BLOCK_N;
            return place < of_product * BATCH;
        }
    }
};

struct Memory {
    unsigned base;   // OPERAND_BYTES
    unsigned small;  // SMALL_BYTES

    __device__ __forceinline__ unsigned a(int pipeline, int stage) const {
        return base + RINGS_AT + (pipeline * STAGES + stage) * STAGE_BYTES;
    }
    __device__ __forceinline__ unsigned b(int stage, int step) const {
        return RESIDENT ? base + step * B_BYTES : a(0, stage) + A_BYTES;
    }
    __device__ __forceinline__ unsigned scales(int pipeline, int stage) const {
        return small + (pipeline * STAGES + stage) * SCALE_BYTES;
    }
    __device__ __forceinline__ unsigned full(int pipeline, int stage) const {
        return small + BARRIERS_AT + (pipeline * STAGES + stage) * 16;
    }
    __device__ __forceinline__ unsigned empty(int pipeline, int stage) const {
        return full(pipeline, stage) + 8;
    }
    __device__ __forceinline__ unsigned arrived(int step) const {  // b, where it is resident
        return small + BARRIERS_AT + 2 * PIPELINES * STAGES * 8 + step * 8;
    }
};

// A place in a ring; `parity` is that of its present round.
struct Place {
    int stage = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ int first_step() {
    return PARTS == 1 ? 0 : STEPS * static_cast<int>(rank_in_cluster()) / PARTS;
}

__device__ __forceinline__ int last_step() {
    return PARTS == 1 ? STEPS : STEPS * (static_cast<int>(rank_in_cluster()) + 1) / PARTS;
}

// One thread of the block, before all are synchronized.
__device__ __forceinline__ void initialize(const Memory& memory, const Operands& operands) {
    prefetch_map(operands.a);
    prefetch_map(operands.b);
    for (int pipeline = 0; pipeline < PIPELINES; ++pipeline) {
        for (int stage = 0; stage < STAGES; ++stage) {
            initialize_barrier(memory.full(pipeline, stage), 1);
            initialize_barrier(memory.empty(pipeline, stage), 4 * SHARED_BY * MULTICAST);
        }
    }
    if constexpr (RESIDENT) {
        for (int step = 0; step < STEPS; ++step) initialize_barrier(memory.arrived(step), 1);
    }
    publish_barriers();
}

// Moves all operands of a pipeline. One thread of a warp.
__device__ __forceinline__ void produce(
    const Memory& memory, const Operands& operands, int pipeline) {
    Walk walk(operands, pipeline);
    Place place;
    Tile tile;
    bool first = true;
    while (walk.next(tile)) {
        for (int step = first_step(); step < last_step(); ++step) {
            const unsigned full = memory.full(pipeline, place.stage);
            const int x = step * DEPTH;
            wait(memory.empty(pipeline, place.stage), place.parity ^ 1);
            if constexpr (RESIDENT) {
                if (first && pipeline == 0) {
                    expect_bytes(memory.arrived(step), B_BYTES);
                    load_box(memory.b(0, step), operands.b, memory.arrived(step), x, tile.column);
                }
            }
            expect_bytes(full, LOADED_BYTES);
            const unsigned a = memory.a(pipeline, place.stage);
            const unsigned scales = memory.scales(pipeline, place.stage);
            if constexpr (BATCH > 1) {
                load_box(a, operands.a, full, x, tile.row, tile.batch);
                if constexpr (SCALES) {
                    load_box(scales, operands.a_scale, full, tile.row + tile.batch * operands.m,
                             step);
                }
            } else {
                load_box(a, operands.a, full, x, tile.row);
                if constexpr (SCALES) load_box(scales, operands.a_scale, full, tile.row, step);
            }
            if constexpr (!RESIDENT) {
                const unsigned b = memory.b(place.stage, step);
                if constexpr (BATCH != 1) {
                    load_box(b, operands.b, full, x, tile.column, tile.batch);
                } else if constexpr (MULTICAST > 1) {
                    constexpr int PART = BLOCK_N / MULTICAST;
                    const int part = rank_in_cluster() * PART;
                    load_box_into_cluster(b + part * DEPTH, operands.b, full,
                                          (1 << MULTICAST) - 1, x, tile.column + part);
                } else {
                    load_box(b, operands.b, full, x, tile.column);
                }
            }
            if constexpr (SCALES == 2) {
                load_box(scales + A_SCALE_BYTES, operands.b_scale, full,
                         tile.column + tile.batch * N, step);
            }
            place.advance();
        }
        first = false;
    }
}

// A warp has read a stage: its bytes may be overwritten, by any block that loads for all.
__device__ __forceinline__ void release(const Memory& memory, int pipeline, const Place& place) {
    const int lane = threadIdx.x % 32;
    const unsigned barrier = memory.empty(pipeline, place.stage);
    if constexpr (MULTICAST > 1) {
        if (lane < MULTICAST) arrive_at(barrier, lane);
    } else {
        if (lane == 0) arrive(barrier);
    }
}

__device__ __forceinline__ float load_shared(unsigned address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ float2 load_shared_pair(unsigned address) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address));
    return value;
}

// Adds the sums of one step, scaled, to those in float32. `scale` of a is that of this thread's two
// rows. The product of two scales may underflow where that of sum and scales does not: then they
// are applied one after the other, at twice the instructions.
__device__ __forceinline__ void promote(
    float (&sums)[SLICE / 2], const float (&step)[SLICE / 2], const float (&a_scale)[2],
    float b_scale, unsigned b_scales) {
    if constexpr (SCALES == 0) {
#pragma unroll
        for (int i = 0; i < SLICE / 2; ++i) sums[i] += step[i];
    } else if constexpr (SCALES == 1) {
        const float scale[2] = {a_scale[0] * b_scale, a_scale[1] * b_scale};
        constexpr float SMALLEST = 1.5777218e-30f;  // 2^-99
        if (__any_sync(0xffffffffu, scale[0] < SMALLEST || scale[1] < SMALLEST)) {
#pragma unroll
            for (int i = 0; i < SLICE / 2; ++i) {
                sums[i] = fmaf(step[i] * a_scale[i / 2 % 2], b_scale, sums[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < SLICE / 2; ++i) sums[i] = fmaf(step[i], scale[i / 2 % 2], sums[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < SLICE / 2; i += 4) {
            const float2 scale = load_shared_pair(b_scales + i * 8);
            sums[i] = fmaf(step[i] * a_scale[0], scale.x, sums[i]);
            sums[i + 1] = fmaf(step[i + 1] * a_scale[0], scale.y, sums[i + 1]);
            sums[i + 2] = fmaf(step[i + 2] * a_scale[1], scale.x, sums[i + 2]);
            sums[i + 3] = fmaf(step[i + 3] * a_scale[1], scale.y, sums[i + 3]);
        }
    }
}

__device__ __forceinline__ float (&slice_of(Sums& sums, int block, int slice))[SLICE / 2] {
    return reinterpret_cast<float (&)[SLICE / 2]>(sums[block][slice * (SLICE / 2)]);
}

// A place where operands are, as tensor cores and scales want it.
struct Stage {
    Matrix a, b;
    unsigned scales;

    __device__ __forceinline__ Stage(
        const Memory& memory, int pipeline, int warpgroup, const Place& place, int step)
        : a(memory.a(pipeline, place.stage) + warpgroup * ROWS * DEPTH),
          b(memory.b(place.stage, step)), scales(memory.scales(pipeline, place.stage)) {}
};

// The first warpgroup lets the second start; SKEW_BARRIER is none of `synchronize_warpgroup`.
constexpr int SKEW_BARRIER = 9;

__device__ __forceinline__ void wait_for_skew() {
    asm volatile("bar.sync %0, 256;" ::"n"(SKEW_BARRIER) : "memory");
}

__device__ __forceinline__ void end_skew() {
    asm volatile("bar.arrive %0, 256;" ::"n"(SKEW_BARRIER) : "memory");
}

// A unit of work is 64 rows and one slice of columns of one step.
constexpr int UNITS = BLOCKS_M * SLICES;
constexpr int PRODUCTS = PROMOTES ? 4 : (K + 31) / 32;  // of 32 bytes of K

__device__ __forceinline__ void issue(float (&sum)[SLICE / 2], const Stage& stage, int unit) {
    const int a = unit / SLICES * 64 * DEPTH, b = unit % SLICES * SLICE * DEPTH;
    pin(sum);
    begin_products();
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
        multiply(sum, stage.a.at(a + i * 32), stage.b.at(b + i * 32), i > 0);
    }
    commit_products();
}

// What multiplies a tile: one warpgroup, which counts within its pipeline.
struct Multiplier {
    const Memory& memory;
    const Operands& operands;
    const Tile& tile;
    int pipeline, warpgroup;
    bool first;
    bool leads;  // the first warpgroup's first tile, where the second waits for it

    __device__ __forceinline__ Stage wait_for(const Place& place, int step) const {
        wait(memory.full(pipeline, place.stage), place.parity);
        return Stage(memory, pipeline, warpgroup, place, step);
    }

    // Adds what `issue` has made of a unit; the stage is free after its last.
    __device__ __forceinline__ void retire(
        Sums& sums, float (&sum)[SLICE / 2], int unit, const Place& place, int step) const {
        const int block = unit / SLICES, slice = unit % SLICES, lane = threadIdx.x % 32;
        const unsigned scales = memory.scales(pipeline, place.stage);
        float a_scale[2] = {}, b_scale = 1.0f;
        if constexpr (SCALES) {
            const int row = warpgroup * ROWS + block * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
            a_scale[0] = load_shared(scales + row * 4);
            a_scale[1] = load_shared(scales + (row + 8) * 4);
        }
        if constexpr (SCALES == 1) {
            const int column = min(tile.column + slice * SLICE, N - 1) / 128;
            b_scale = __ldg(operands.block_scale + step * operands.block_scale_step +
                            (column + tile.batch * ((N + 127) / 128)) * operands.block_scale_column);
        }
        if (SCALES != 2 && unit == UNITS - 1) release(memory, pipeline, place);
        promote(slice_of(sums, block, slice), sum, a_scale, b_scale,
                scales + A_SCALE_BYTES + (slice * SLICE + lane % 4 * 2) * 4);
        if (SCALES == 2 && unit == UNITS - 1) release(memory, pipeline, place);
    }

    // Multiplies COUNT units of work, each while the one before is added.
    template <int COUNT>
    __device__ __forceinline__ void advance(
        Sums& sums, float (&sum)[2][SLICE / 2], Place& place, int step) const {
        Place ahead = place;
        issue(sum[0], wait_for(place, step), 0);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i + 1 < COUNT) {
                const int next = step + (i + 1) / UNITS;
                if ((i + 1) % UNITS == 0) {
                    ahead.advance();
                    wait_for(ahead, next);
                }
                issue(sum[(i + 1) % 2], Stage(memory, pipeline, warpgroup, ahead, next),
                      (i + 1) % UNITS);
                wait_for_products<1>();
            } else {
                wait_for_products<0>();
            }
            pin(sum[i % 2]);
            retire(sums, sum[i % 2], i % UNITS, place, step + i / UNITS);
            if (i % UNITS == UNITS - 1) place.advance();
            if (SKEW && i + 1 == SKEW * UNITS && leads && step == 0) end_skew();
        }
    }

    __device__ __forceinline__ void multiply_tile(Sums& sums, Place& place) const {
        if constexpr (PROMOTES) {
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
                for (int i = 0; i < SLICE / 2; ++i) {
                    slice_of(sums, unit / SLICES, unit % SLICES)[i] = 0.0f;
                }
            }
        }
        if constexpr (!PROMOTES) {
            if constexpr (RESIDENT) {
                if (first) wait(memory.arrived(0), 0);
            }
            const Stage stage = wait_for(place, 0);
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                issue(slice_of(sums, unit / SLICES, unit % SLICES), stage, unit);
            }
            wait_for_products<0>();
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                pin(slice_of(sums, unit / SLICES, unit % SLICES));
            }
            release(memory, pipeline, place);
            place.advance();
        } else if (DOUBLE && !(RESIDENT && first)) {
            if constexpr (DOUBLE) {
                // Between units in flight there must be no loop: ptxas would make them take turns
                // (its warning C7514).
                constexpr int UNROLLED = STEPS <= 16 ? STEPS : 8;
                constexpr int REST = STEPS % UNROLLED;
                float sum[2][SLICE / 2];
#pragma unroll 1
                for (int step = 0; step < STEPS - REST; step += UNROLLED) {
                    advance<UNROLLED * UNITS>(sums, sum, place, step);
                }
                if constexpr (REST > 0) advance<REST * UNITS>(sums, sum, place, STEPS - REST);
            }
        } else {
            float sum[SLICE / 2];
#pragma unroll 1
            for (int step = first_step(); step < last_step(); ++step) {
                if constexpr (RESIDENT) {
                    if (first) wait(memory.arrived(step), 0);
                }
                const Stage stage = wait_for(place, step);
#pragma unroll
                for (int unit = 0; unit < UNITS; ++unit) {
                    issue(sum, stage, unit);
                    wait_for_products<0>();
                    pin(sum);
                    retire(sums, sum, unit, place, step);
                }
                place.advance();
                if (SKEW && step + 1 == SKEW && leads) end_skew();
            }
        }
    }
};
