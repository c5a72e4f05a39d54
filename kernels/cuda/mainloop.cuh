// Products of FP8 matrices on Hopper's tensor cores, for any epilogue.
//
//     d[m, N] = a[m, K] b[N, K]^T,  both row-major, 128 bytes of K at a time (64 where there are no
//                                   more: copies take as long over what lies outside)
//
// A block holds warpgroups that multiply, and one more whose threads move operands into rings of
// shared memory by bulk copies; blocks stay on their SM and walk over tiles of d. A warpgroup owns
// ROWS x BLOCK_N of d, in registers.
//
//     RESIDENT  BLOCK_N rows of b are loaded once, all of K. Each warpgroup has a ring, a producer
//               thread and tiles of its own, so that one writes out while the other multiplies
//               (ping-pong), and only a is streamed.
//     else      Warpgroups share a ring of a and b, and one tile of WARPGROUPS * 64 rows. The
//               blocks of a cluster of PARTS share a tile: each sums up a part of K.
//
// The tensor core keeps some 14 bits of a running sum, so every 128 of K its sum is taken out
// and added up in float32. At most 128 columns pass through one set of 64 registers: two of 128x256
// tiles' warpgroups then need 64 + 128 and some, of the 232 they have. While one of them adds,
// the other multiplies.
//
// Macros, all set by tiles.py:
//
//     N, K                 sizes; m is a parameter
//     BLOCK_N              columns of a tile: 8, 16, 24, 32, 64, 96, 128 or 256
//     WARPGROUPS           that multiply: 1 or 2
//     RESIDENT, PARTS
//     STAGES               of a ring
//     DOUBLE               1: a warpgroup multiplies a unit of work while it adds the one before, in
//                          registers of its own; tiles of half the size have them
//     BAND                 tiles along m that are taken before the next columns are
//     SCALES               0: none here; 1: of a by 1x128 and of b by 128x128; 2: of both by 1x128
//     BATCH                1: rows of all products are tiled as one; 2: there are `groups` of them,
//                          of m rows each; 0: and their rows begin at offsets on the device
//     A_TYPE, B_TYPE       e4m3 or e5m2
//     A_SLICES             of a along K, each a tensor of its own: 1 to 8
//     A_ENDS               where each ends, in steps along K: A_SLICES numbers
#pragma once
#include "hopper.cuh"

constexpr int DEPTH = K > 64 ? 128 : 64;  // of a step along K, and of the copies' swizzle
constexpr int STEPS = (K + DEPTH - 1) / DEPTH;
constexpr int TILES_N = (N + BLOCK_N - 1) / BLOCK_N;
constexpr int PIPELINES = RESIDENT ? WARPGROUPS : 1;
constexpr int SHARED_BY = WARPGROUPS / PIPELINES;  // warpgroups of a pipeline
constexpr int ROWS = 64;  // of a warpgroup's tile, and of one product
constexpr int TILE_ROWS = ROWS * SHARED_BY;
constexpr int SLICES = BLOCK_N > 128 ? 2 : 1;
constexpr int SLICE = BLOCK_N / SLICES;
constexpr int MATH_THREADS = 128 * WARPGROUPS;
constexpr int THREADS = MATH_THREADS + (WARPGROUPS > 1 ? 128 : 32);
// Of a thread, where there is more than one warpgroup: 64512 of the SM's 65536 in all.
constexpr int MATH_REGISTERS = 232;
constexpr int PRODUCER_REGISTERS = 40;
constexpr bool PROMOTES = SCALES != 0 || STEPS > 1;

constexpr int A_BYTES = TILE_ROWS * DEPTH;
constexpr int B_BYTES = BLOCK_N * DEPTH;
constexpr int STAGE_BYTES = A_BYTES + (RESIDENT ? 0 : B_BYTES);
// Scales of a stage, rounded up so that the next stage's are aligned to 128 bytes.
// Bulk copies of scales start at a multiple of 16 bytes; rows of products in a batch at any.
constexpr int SCALE_ROWS = TILE_ROWS + (BATCH == 1 ? 0 : 32);
constexpr int A_SCALE_BYTES = SCALES ? SCALE_ROWS * 4 : 0;
constexpr int B_SCALE_COLUMNS = BLOCK_N + (BATCH == 1 ? 0 : 32);
constexpr int B_SCALE_BYTES = SCALES == 2 ? (B_SCALE_COLUMNS * 4 + 127) / 128 * 128 : 0;
constexpr int SCALE_BYTES = A_SCALE_BYTES + B_SCALE_BYTES;
constexpr int LOADED_BYTES =
    STAGE_BYTES + A_SCALE_BYTES + (SCALES == 2 ? B_SCALE_COLUMNS * 4 : 0);

// Shared memory: operands first, aligned to 1024 bytes; scales and barriers wherever there is room.
constexpr int RINGS_AT = RESIDENT ? STEPS * B_BYTES : 0;
constexpr int OPERAND_BYTES = RINGS_AT + PIPELINES * STAGES * STAGE_BYTES;
constexpr int BARRIERS_AT = PIPELINES * STAGES * SCALE_BYTES;
constexpr int SMALL_BYTES = BARRIERS_AT + (2 * PIPELINES * STAGES + (RESIDENT ? STEPS : 0)) * 8;

static_assert(!RESIDENT || PARTS == 1, "what stays is whole");
// digest: off
#if !ANY_WIDTH
// digest: on
static_assert(SLICE == 8 || SLICE == 16 || SLICE == 24 || SLICE == 32 || SLICE == 64 ||
              SLICE == 96 || SLICE == 128, "columns of a product");
// digest: off
#endif
// digest: on
static_assert(SCALES != 1 || 128 % SLICE == 0, "a slice lies in one block of scales");
static_assert(BATCH == 1 || !RESIDENT, "weights of a batch are streamed");

// Of a thread: of each 8 columns, columns lane % 4 * 2 and the next of row lane / 4 of the warp, and
// of row lane / 4 + 8.
using Sums = float[BLOCK_N / 2];

struct Operands {
    const TensorMap* a[A_SLICES];
    const TensorMap* a_scale[A_SLICES];  // where SCALES
    const TensorMap* b;
    const TensorMap* b_scale;  // where SCALES == 2
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
        constexpr int SHARE = RESIDENT ? TILES_N : PARTS;  // blocks that start with the same tile
        at = blockIdx.x / SHARE * PIPELINES + pipeline;
        step = gridDim.x / SHARE * PIPELINES;
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
            const int of_product = tiles_m * TILES_N;
            int inside = place;
            if constexpr (BATCH > 1) {
                tile.batch = place / of_product;
                inside = place % of_product;
            }
            const int band = inside / (BAND * TILES_N);
            const int in_band = inside % (BAND * TILES_N);
            const int height = min(BAND, tiles_m - band * BAND);
            tile.row = (band * BAND + in_band % height) * TILE_ROWS;
            tile.column = in_band / height * BLOCK_N;
            return place < of_product * (BATCH > 1 ? operands.groups : 1);
        }
    }
};

struct Memory {
    unsigned base;   // OPERAND_BYTES
    unsigned small;  // SMALL_BYTES

    // The same, of which the compiler cannot keep addresses in registers.
    __device__ __forceinline__ Memory afresh() const {
        Memory copy = *this;
        asm volatile("" : "+r"(copy.base), "+r"(copy.small));
        return copy;
    }
    __device__ __forceinline__ unsigned a(int pipeline, int stage) const {
        return base + RINGS_AT + (pipeline * STAGES + stage) * STAGE_BYTES;
    }
    __device__ __forceinline__ unsigned b(int pipeline, int stage, int step) const {
        return RESIDENT ? base + step * B_BYTES : a(pipeline, stage) + A_BYTES;
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
    prefetch_map(*operands.a[0]);
    prefetch_map(*operands.b);
    for (int pipeline = 0; pipeline < PIPELINES; ++pipeline) {
        for (int stage = 0; stage < STAGES; ++stage) {
            initialize_barrier(memory.full(pipeline, stage), 1);
            initialize_barrier(memory.empty(pipeline, stage), 4 * SHARED_BY);
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
                    load_box(memory.b(0, 0, step), *operands.b, memory.arrived(step), x, tile.column);
                }
            }
            expect_bytes(full, LOADED_BYTES);
            const unsigned a = memory.a(pipeline, place.stage);
            const unsigned scales = memory.scales(pipeline, place.stage);
            constexpr int ENDS[] = {A_ENDS};
            int slice = 0, begin = 0;  // of the slices of a
#pragma unroll
            for (int i = 0; i + 1 < A_SLICES; ++i) {
                if (step >= ENDS[i]) slice = i + 1, begin = ENDS[i];
            }
            const int in_slice = step - begin;
            if constexpr (BATCH > 1) {
                load_box(a, *operands.a[slice], full, in_slice * DEPTH, tile.row, tile.batch);
            } else {
                load_box(a, *operands.a[slice], full, in_slice * DEPTH, tile.row);
            }
            if constexpr (A_SCALE_BYTES > 0) {
                const int row = tile.row + (BATCH > 1 ? tile.batch * operands.m : 0);
                load_box(scales, *operands.a_scale[slice], full, row & ~3, in_slice);
            }
            if constexpr (!RESIDENT) {
                const unsigned b = memory.b(pipeline, place.stage, step);
                if constexpr (BATCH != 1) {
                    load_box(b, *operands.b, full, x, tile.column, tile.batch);
                } else {
                    load_box(b, *operands.b, full, x, tile.column);
                }
            }
            if constexpr (SCALES == 2) {
                load_box(scales + A_SCALE_BYTES, *operands.b_scale, full,
                         (tile.column + tile.batch * N) & ~3, step);
            }
            place.advance();
        }
        first = false;
    }
}

// A warp has read a stage: its bytes may be overwritten.
__device__ __forceinline__ void release(const Memory& memory, int pipeline, const Place& place) {
    if (threadIdx.x % 32 == 0) arrive(memory.empty(pipeline, place.stage));
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

// Until loads from shared memory have brought these values: what arrives at a barrier does not wait
// for loads issued before it, and whoever waits there may overwrite what they have not read yet (as
// happened once in 10^7 tiles). A vote needs the values; what depends on it does nothing.
__device__ __forceinline__ void await_loaded(float first, float second) {
    const bool odd = __float_as_uint(first) == 0x7fc0deadu || __float_as_uint(second) == 0x7fc0deadu;
    if (__any_sync(0xffffffffu, odd)) asm volatile("nanosleep.u32 1;" ::: "memory");
}

// Adds the sums of one step, scaled, to those in float32. `scale` of a is that of this thread's two
// rows. The product of two scales may underflow or overflow where that of sum and scales does not:
// then they are applied one after the other, at twice the instructions.
__device__ __forceinline__ void promote(
    float (&sums)[SLICE / 2], const float (&step)[SLICE / 2], const float (&a_scale)[2],
    float b_scale, unsigned b_scales) {
    if constexpr (SCALES == 0) {
#pragma unroll
        for (int i = 0; i < SLICE / 2; ++i) sums[i] += step[i];
    } else if constexpr (SCALES == 1) {
        constexpr float LEAST = 1.5777218e-30f, MOST = 1.7014118e38f;  // 2^-99, 2^127
        const float scale[2] = {a_scale[0] * b_scale, a_scale[1] * b_scale};
        const bool odd[2] = {!(scale[0] >= LEAST && scale[0] < MOST),
                             !(scale[1] >= LEAST && scale[1] < MOST)};
        if (__any_sync(0xffffffffu, odd[0] || odd[1])) {
            // Rows whose product is none of these get the same bits as below.
            const float before[2] = {odd[0] ? a_scale[0] : 1.0f, odd[1] ? a_scale[1] : 1.0f};
            const float after[2] = {odd[0] ? b_scale : scale[0], odd[1] ? b_scale : scale[1]};
#pragma unroll
            for (int i = 0; i < SLICE / 2; ++i) {
                sums[i] = fmaf(step[i] * before[i / 2 % 2], after[i / 2 % 2], sums[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < SLICE / 2; ++i) sums[i] = fmaf(step[i], scale[i / 2 % 2], sums[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < SLICE / 2; i += 4) {
            float2 scale;
            if constexpr (BATCH == 1 || N % 2 == 0) {
                scale = load_shared_pair(b_scales + i * 8);
            } else {
                scale = make_float2(load_shared(b_scales + i * 8), load_shared(b_scales + i * 8 + 4));
            }
            sums[i] = fmaf(step[i] * a_scale[0], scale.x, sums[i]);
            sums[i + 1] = fmaf(step[i + 1] * a_scale[0], scale.y, sums[i + 1]);
            sums[i + 2] = fmaf(step[i + 2] * a_scale[1], scale.x, sums[i + 2]);
            sums[i + 3] = fmaf(step[i + 3] * a_scale[1], scale.y, sums[i + 3]);
            if (i + 4 == SLICE / 2) await_loaded(scale.x, scale.y);
        }
    }
}

__device__ __forceinline__ float (&slice_of(Sums& sums, int slice))[SLICE / 2] {
    return reinterpret_cast<float (&)[SLICE / 2]>(sums[slice * (SLICE / 2)]);
}

// A place where operands are, as tensor cores and scales want it.
struct Stage {
    Matrix<DEPTH> a, b;
    unsigned scales;

    __device__ __forceinline__ Stage(
        const Memory& memory, int pipeline, int warpgroup, const Place& place, int step)
        : a(memory.a(pipeline, place.stage) + warpgroup * ROWS * DEPTH),
          b(memory.b(pipeline, place.stage, step)), scales(memory.scales(pipeline, place.stage)) {}
};

// A unit of work is one slice of columns in one step.
constexpr int PRODUCTS = PROMOTES ? DEPTH / 32 : (K + 31) / 32;  // of 32 bytes of K

// digest: off
#if !WHOLE_SUMS
// digest: on
__device__ __forceinline__ void issue(float (&sum)[SLICE / 2], const Stage& stage, int slice) {
    pin(sum);
    begin_products();
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
        multiply(sum, stage.a.at(i * 32), stage.b.at(slice * SLICE * DEPTH + i * 32), i > 0);
    }
    commit_products();
}

// What multiplies a tile: one warpgroup, which counts within its pipeline.
struct Multiplier {
    const Memory& memory;
    const Operands& operands;
    const Tile& tile;
    int pipeline, warpgroup;
    bool first;  // tile of the block

    __device__ __forceinline__ Stage wait_for(const Place& place, int step) const {
        const Memory here = memory.afresh();
        wait(here.full(pipeline, place.stage), place.parity);
        return Stage(here, pipeline, warpgroup, place, step);
    }

    // Of a's two rows of this thread.
    __device__ __forceinline__ void load_scales(float (&scale)[2], const Place& place) const {
        const Memory here = memory.afresh();
        const int first_row = tile.row + (BATCH > 1 ? tile.batch * operands.m : 0);
        const int row = (BATCH == 1 ? 0 : first_row & 3) + warpgroup * ROWS +
                        threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        const unsigned scales = here.scales(pipeline, place.stage) + row * 4;
        scale[0] = load_shared(scales);
        scale[1] = load_shared(scales + 32);
    }

    // Adds what `issue` has made of a unit; the stage is free after its last.
    __device__ __forceinline__ void retire(
        Sums& sums, float (&sum)[SLICE / 2], int slice, const Place& place, int step,
        const float (&a_scale)[2]) const {
        const Memory here = memory.afresh();
        const int askew = BATCH == 1 ? 0 : (tile.column + tile.batch * N) & 3;
        const unsigned b_scales = here.scales(pipeline, place.stage) + A_SCALE_BYTES +
                                  (askew + slice * SLICE + threadIdx.x % 4 * 2) * 4;
        float b_scale = 1.0f;
        if constexpr (SCALES == 1) {
            const int column = min(tile.column + slice * SLICE, N - 1) / 128;
            const int block = column + tile.batch * ((N + 127) / 128);
            b_scale = operands.block_scale[step * operands.block_scale_step +
                                           block * operands.block_scale_column];
        }
        if constexpr (A_SCALE_BYTES > 0) await_loaded(a_scale[0], a_scale[1]);
        if (SCALES != 2 && slice == SLICES - 1) release(here, pipeline, place);
        promote(slice_of(sums, slice), sum, a_scale, b_scale, b_scales);
        if (SCALES == 2 && slice == SLICES - 1) release(here, pipeline, place);
    }

    // Multiplies COUNT units of work, each while the one before is added.
    template <int COUNT>
    __device__ __forceinline__ void advance(
        Sums& sums, float (&sum)[2][SLICE / 2], Place& place, int step) const {
        Place ahead = place;
        Stage stage = wait_for(place, step);
        issue(sum[0], stage, 0);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i + 1 < COUNT) {
                if ((i + 1) % SLICES == 0) {
                    ahead.advance();
                    stage = wait_for(ahead, step + (i + 1) / SLICES);
                }
                issue(sum[(i + 1) % 2], stage, (i + 1) % SLICES);
                wait_for_products<1>();
            } else {
                wait_for_products<0>();
            }
            pin(sum[i % 2]);
            float a_scale[2] = {};
            if constexpr (A_SCALE_BYTES > 0) load_scales(a_scale, place);
            retire(sums, sum[i % 2], i % SLICES, place, step + i / SLICES, a_scale);
            if (i % SLICES == SLICES - 1) place.advance();
        }
    }

    __device__ __forceinline__ void multiply_tile(Sums& sums, Place& place) const {
        if constexpr (PROMOTES) {
#pragma unroll
            for (int slice = 0; slice < SLICES; ++slice) {
#pragma unroll
                for (int i = 0; i < SLICE / 2; ++i) {
                    slice_of(sums, slice)[i] = 0.0f;
                }
            }
        }
        if constexpr (!PROMOTES) {
            if constexpr (RESIDENT) {
                if (first) wait(memory.arrived(0), 0);
            }
            const Stage stage = wait_for(place, 0);
#pragma unroll
            for (int slice = 0; slice < SLICES; ++slice) {
                issue(slice_of(sums, slice), stage, slice);
            }
            wait_for_products<0>();
#pragma unroll
            for (int slice = 0; slice < SLICES; ++slice) {
                pin(slice_of(sums, slice));
            }
            release(memory, pipeline, place);
            place.advance();
        } else if (DOUBLE && !(RESIDENT && first)) {
            if constexpr (DOUBLE) {
                // Between units in flight there must be no loop: ptxas would make them take turns
                // (its warning C7514).
                constexpr int MOST = SLICES == 1 ? 16 : 8;
                constexpr int UNROLLED = STEPS < MOST ? STEPS : MOST;
                constexpr int REST = PARTS == 1 ? STEPS % UNROLLED : 0;
                float sum[2][SLICE / 2];
                int step = first_step();
#pragma unroll 1
                for (; step + UNROLLED <= last_step(); step += UNROLLED) {
                    advance<UNROLLED * SLICES>(sums, sum, place, step);
                }
                if constexpr (REST > 0) advance<REST * SLICES>(sums, sum, place, STEPS - REST);
                if constexpr (PARTS > 1) {
#pragma unroll 1
                    for (; step < last_step(); ++step) advance<SLICES>(sums, sum, place, step);
                }
            }
        } else {
            float sum[SLICE / 2];
#pragma unroll 1
            for (int step = first_step(); step < last_step(); ++step) {
                if constexpr (RESIDENT) {
                    if (first) wait(memory.arrived(step), 0);
                }
                const Stage stage = wait_for(place, step);
                float a_scale[2] = {};
                if constexpr (A_SCALE_BYTES > 0) load_scales(a_scale, place);
#pragma unroll
                for (int slice = 0; slice < SLICES; ++slice) {
                    issue(sum, stage, slice);
                    wait_for_products<0>();
                    pin(sum);
                    retire(sums, sum, slice, place, step, a_scale);
                }
                place.advance();
            }
        }
    }
};
// digest: off
#endif
// digest: on
