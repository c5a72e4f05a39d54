// FP8 GEMM with DCN's cross on Hopper, bound by the bytes of what it reads beside the operands.
//
//     d = x0 * ((sum_k a[m, k] b[n, k]) * sa * sb + bias[n]) + x
//
// x0, x and d are [m, N] in bfloat16. Where K is small, they are most of the bytes: at 8192 x 3456 x
// 512 they are 170 MB and the operands 6. An H100 copies as many bytes in 60 us, and its tensor cores
// take 15. cuda.gemm_norm_row_fast, whose threads load x0 and x when the sums are there, takes 107
// there, and this kernel took 67 before its slots were a ring.
//
// Here bulk copies bring x0 and x, in pieces of 64 rows by 64 columns, into slots of each warpgroup
// while it still multiplies. The warpgroup writes d over x in the same slot, and a bulk copy takes it
// from there: nothing is staged twice. A warp reads and writes 16 rows, in the fragments of its sums,
// and waits for no other. Slots are a ring; each is given back as soon as d has left it, or, where
// there are more of them than pieces of a tile, when the next piece has been written. More slots at
// the cost of stages for the operands are no gain: with 4 slots and 2 stages 8192 x 15360 x 512 takes
// 276 us of an H200, with 3 and 4 192, with 2 and 6 191 (202 where a tile's slots returned together).
//
// In DCN's first cross x0 is x: with SAME it is loaded once (204 us instead of 250 at 8192 x 15360 x
// 512 with KEEPS).
//
// Macros beside those of mainloop.cuh, of which WARPGROUPS is 2 and BATCH 1:
//
//     TENSOR_SCALES, ROW_SCALES   1: scales that are applied here
//     BIAS          0: none, 2: bfloat16, 4: float32
//     KEEPS         1: writes what x0 is multiplied by, too, rounded to bfloat16: the gradient of x0
//                   needs it. It lies in x0's slot until a bulk copy takes it, or, where x0 is x, in
//                   one of KEPT places
//     SAME          1: x0 is x
//     SLOTS         of a warpgroup
//     LAG           pieces written before a slot is given back
//     SHARED_BYTES  what the launch asks for
#include "mainloop.cuh"

constexpr int PIECE_COLUMNS = 64;  // 128 bytes, which copies permute against conflicts of banks
constexpr int PIECES = BLOCK_N / PIECE_COLUMNS;
constexpr int PIECE_BYTES = ROWS * PIECE_COLUMNS * 2;
constexpr int SLOT_BYTES = (SAME ? 1 : 2) * PIECE_BYTES;  // x, after x0 if that is another matrix
constexpr int KEPT = LAG + 1;
constexpr int KEPT_BYTES = KEEPS && SAME ? KEPT * PIECE_BYTES : 0;
constexpr int SLOTS_BYTES = SLOTS * SLOT_BYTES + KEPT_BYTES;  // of a warpgroup
constexpr int SLOTS_AT = OPERAND_BYTES;
constexpr int SMALL_AT = SLOTS_AT + WARPGROUPS * SLOTS_BYTES;
constexpr int TURNS_AT = (SMALL_AT + SMALL_BYTES + 15) / 16 * 16;  // barriers of the slots
constexpr int VECTORS_AT = TURNS_AT + WARPGROUPS * SLOTS * 16;
constexpr int SCALES_BYTES = ROW_SCALES ? BLOCK_N * 4 : 0;
constexpr int VECTOR_BYTES = SCALES_BYTES + (BIAS ? BLOCK_N * 4 : 0);  // of a warpgroup
constexpr int FIRST_OF_SLOTS = 2;  // warps of the third warpgroup: 0 and 1 move operands

static_assert(VECTORS_AT + WARPGROUPS * VECTOR_BYTES <= SHARED_BYTES, "shared memory");
static_assert(WARPGROUPS == 2 && BATCH == 1 && PARTS == 1, "two warpgroups of one product");
static_assert(SLOTS > LAG, "a slot is given back before a piece waits for it");
static_assert(BLOCK_N % PIECE_COLUMNS == 0 && SLOTS_AT % 1024 == 0, "pieces are permuted from there");

// The slots of a warpgroup. `number` counts pieces from its first tile on.
struct Slots {
    unsigned base, turns;

    __device__ __forceinline__ Slots(unsigned shared, int warpgroup)
        : base(shared + SLOTS_AT + warpgroup * SLOTS_BYTES),
          turns(shared + TURNS_AT + warpgroup * SLOTS * 16) {}
    __device__ __forceinline__ unsigned x0(int number) const {
        return base + number % SLOTS * SLOT_BYTES;
    }
    __device__ __forceinline__ unsigned x(int number) const {
        return x0(number) + (SLOT_BYTES - PIECE_BYTES);
    }
    __device__ __forceinline__ unsigned kept(int number) const {
        if constexpr (!SAME) return x0(number);
        return base + SLOTS * SLOT_BYTES + number % KEPT * PIECE_BYTES;
    }
    __device__ __forceinline__ unsigned full(int number) const {
        return turns + number % SLOTS * 16;
    }
    __device__ __forceinline__ unsigned empty(int number) const { return full(number) + 8; }
    static __device__ __forceinline__ unsigned parity(int number) { return number / SLOTS & 1; }
};

struct Output {
    const float* a_scale;
    const float* b_scale;
    const void* bias;
    const TensorMap& map;
    const TensorMap& kept_map;  // where KEEPS
};

__device__ __forceinline__ float from_bfloat16(unsigned bits) {
    return __uint_as_float(bits << 16);
}

__device__ __forceinline__ unsigned bfloat16_pair(float first, float second) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// Four 8x8 blocks of 16-bit elements, as the sums of a product lie in the threads of a warp.
__device__ __forceinline__ void load_blocks(unsigned address, unsigned (&block)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(block[0]), "=r"(block[1]), "=r"(block[2]), "=r"(block[3])
                 : "r"(address) : "memory");
}

// Brings x0 and x of every tile of a warpgroup. One thread.
__device__ __forceinline__ void bring(
    const Slots& slots, const Operands& operands, int warpgroup, const TensorMap& x0,
    const TensorMap& x) {
    Walk walk(operands, RESIDENT ? warpgroup : 0);
    Tile tile;
    int number = 0;
    while (walk.next(tile)) {
        const int row = tile.row + (RESIDENT ? 0 : warpgroup * ROWS);
        for (int piece = 0; piece < PIECES; ++piece, ++number) {
            const unsigned full = slots.full(number);
            const int column = tile.column + piece * PIECE_COLUMNS;
            wait(slots.empty(number), Slots::parity(number) ^ 1);
            expect_bytes(full, SLOT_BYTES);  // what lies outside of a tensor counts, and reads as 0
            if constexpr (!SAME) load_box(slots.x0(number), x0, full, column, row);
            load_box(slots.x(number), x, full, column, row);
        }
    }
}

// b's scales and the bias of a tile's columns, for one warpgroup. Read after its next barrier.
__device__ __forceinline__ void load_vectors(unsigned vectors, const Output& out, const Tile& tile) {
#pragma unroll
    for (int i = 0; i < BLOCK_N; i += 128) {
        const int column = i + threadIdx.x % 128, n = tile.column + column;
        if (column >= BLOCK_N) break;
        if constexpr (ROW_SCALES) {
            const float scale = n < N ? out.b_scale[n] : 1.0f;
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(vectors + column * 4), "f"(scale) : "memory");
        }
        if constexpr (BIAS) {
            float bias = 0.0f;
            if (n < N) {
                bias = BIAS == 2 ? from_bfloat16(static_cast<const unsigned short*>(out.bias)[n])
                                 : static_cast<const float*>(out.bias)[n];
            }
            asm volatile("st.shared.f32 [%0], %1;"
                         ::"r"(vectors + SCALES_BYTES + column * 4), "f"(bias) : "memory");
        }
    }
}

// Two neighbors of a row of the product, scaled, with the bias.
__device__ __forceinline__ float2 finished(
    float first, float second, float row_scale, float2 scale, float2 bias) {
    float2 v = make_float2(first, second);
    if constexpr (TENSOR_SCALES || ROW_SCALES) {
        v.x = v.x * row_scale * scale.x;
        v.y = v.y * row_scale * scale.y;
    }
    if constexpr (BIAS) {
        v.x += bias.x;
        v.y += bias.y;
    }
    return v;
}

// The same of d.
__device__ __forceinline__ unsigned crossed(float2 v, unsigned factor, unsigned term) {
    return bfloat16_pair(fmaf(from_bfloat16(factor & 0xffff), v.x, from_bfloat16(term & 0xffff)),
                         fmaf(from_bfloat16(factor >> 16), v.y, from_bfloat16(term >> 16)));
}

// Until all but so many stores that this thread committed last have read shared memory.
template <int LEFT>
__device__ __forceinline__ void wait_until_most_stores_have_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// Writes a warpgroup's tile, whose first row is `row` and whose first piece is `first_number`.
__device__ __forceinline__ void finish(
    const Sums& sums, const Output& out, const Tile& tile, const float (&row_scale)[2],
    unsigned vectors, const Slots& slots, int first_number, int row) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int in_piece = warp * 16 + lane % 16, pair = lane % 4 * 2;
    const float tensor_scale = TENSOR_SCALES ? *out.b_scale : 1.0f;
    const bool is_inside = row + warp * 16 < tile.end;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const int number = first_number + piece;
        const unsigned at_x0 = slots.x0(number), at_x = slots.x(number), at_kept = slots.kept(number);
        wait(slots.full(number), Slots::parity(number));
#pragma unroll
        for (int group = 0; group < PIECE_COLUMNS / 8; group += 2) {
            const unsigned inside =
                in_piece * 128 + ((group + lane / 16) ^ (in_piece & 7)) * 16;
            unsigned factor[4], term[4], made[4], kept[4];
            load_blocks(at_x + inside, term);
            if constexpr (!SAME) load_blocks(at_x0 + inside, factor);
#pragma unroll
            for (int of_two = 0; of_two < 2; ++of_two) {
                const int column = piece * PIECE_COLUMNS + (group + of_two) * 8;
                float2 scale = make_float2(tensor_scale, tensor_scale), bias = make_float2(0.0f, 0.0f);
                if constexpr (ROW_SCALES) scale = load_shared_pair(vectors + (column + pair) * 4);
                if constexpr (BIAS) {
                    bias = load_shared_pair(vectors + SCALES_BYTES + (column + pair) * 4);
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int i = column / 2 + half * 2, block = of_two * 2 + half;
                    const float2 v =
                        finished(sums[i], sums[i + 1], row_scale[half], scale, bias);
                    made[block] = crossed(v, SAME ? term[block] : factor[block], term[block]);
                    if constexpr (KEEPS) kept[block] = bfloat16_pair(v.x, v.y);
                }
            }
            store_blocks(at_x + inside, made);
            if constexpr (KEEPS) store_blocks(at_kept + inside, kept);
        }
        publish_shared_memory();
        __syncwarp();
        if (lane == 0) {
            const int column = tile.column + piece * PIECE_COLUMNS;
            if (is_inside && column < N) {
                const unsigned of_warp = warp * 16 * 128;
                store_box(out.map, at_x + of_warp, column, row + warp * 16);
                if constexpr (KEEPS) {
                    store_box(out.kept_map, at_kept + of_warp, column, row + warp * 16);
                }
            }
            commit_stores();
            // What is kept in a place of its own has left it then, too, before it is written again.
            wait_until_most_stores_have_read<LAG>();
            if (number >= LAG) arrive(slots.empty(number - LAG));
        }
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_cross(
    const float* a_scale, const float* b_scale,
#if BIAS
    const void* bias,
#endif
    int m,
#if SCALES == 1
    int block_scale_step, int block_scale_column,
#endif
    const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap d_map,
    const __grid_constant__ TensorMap x0_map, const __grid_constant__ TensorMap x_map,
#if KEEPS
    const __grid_constant__ TensorMap kept_map,
#endif
    const __grid_constant__ TensorMap a_map
#if SCALES == 1
    , const __grid_constant__ TensorMap a_scale_map
#endif
) {
    extern __shared__ char shared[];
    const unsigned base = shared_address(shared);
    if (base % 1024) asm volatile("trap;");  // swizzles are counted from there
    const Memory memory{base, base + SMALL_AT};
    const Operands operands{
        {&a_map},
#if SCALES == 1
        {&a_scale_map}, &b_map, nullptr, b_scale, block_scale_step, block_scale_column,
#else
        {}, &b_map, nullptr, b_scale, 0, 0,
#endif
        nullptr, m, 1
    };
#if !BIAS
    const void* bias = nullptr;
#endif
#if KEEPS
    const Output out{a_scale, b_scale, bias, d_map, kept_map};
#else
    const Output out{a_scale, b_scale, bias, d_map, d_map};
#endif
    if (threadIdx.x == MATH_THREADS) {
        for (int warpgroup = 0; warpgroup < WARPGROUPS; ++warpgroup) {
            const Slots slots(base, warpgroup);
            for (int slot = 0; slot < SLOTS; ++slot) {
                initialize_barrier(slots.full(slot), 1);
                initialize_barrier(slots.empty(slot), 4);  // warps
            }
        }
        initialize(memory, operands);
    }
    __syncthreads();
    begin_in_turn();

    if (threadIdx.x >= MATH_THREADS) {
        give_registers<PRODUCER_REGISTERS>();
        const int warp = (threadIdx.x - MATH_THREADS) / 32;
        if (threadIdx.x % 32 == 0) {
            if (warp < PIPELINES) produce(memory, operands, warp);
            if (warp >= FIRST_OF_SLOTS) {
                bring(Slots(base, warp - FIRST_OF_SLOTS), operands, warp - FIRST_OF_SLOTS, x0_map,
                      x_map);
            }
        }
        __syncwarp();
    } else {
        take_registers<MATH_REGISTERS>();
        const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be uniform
        const int pipeline = RESIDENT ? warpgroup : 0;
        const int inside = RESIDENT ? 0 : warpgroup;  // of the pipeline's tile
        const unsigned vectors = base + VECTORS_AT + warpgroup * VECTOR_BYTES;
        const Slots slots(base, warpgroup);
        Walk walk(operands, pipeline);
        Place place;
        Tile tile;
        Sums sums;
        bool first = true;
        for (int number = 0; walk.next(tile); number += PIECES) {
            const int row = tile.row + inside * ROWS;
            float row_scale[2] = {1.0f, 1.0f};
            if constexpr (TENSOR_SCALES) row_scale[0] = row_scale[1] = *a_scale;
            if constexpr (ROW_SCALES) {
                const int of_thread = row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
                row_scale[0] = of_thread < m ? a_scale[of_thread] : 0.0f;
                row_scale[1] = of_thread + 8 < m ? a_scale[of_thread + 8] : 0.0f;
            }
            if constexpr (VECTOR_BYTES > 0) {
                // Streamed columns change: nobody still reads those of the tile before.
                if (!RESIDENT && !first) synchronize_warpgroup(warpgroup);
                if (!RESIDENT || first) {
                    load_vectors(vectors, out, tile);
                    synchronize_warpgroup(warpgroup);
                }
            }
            Multiplier{memory, operands, tile, pipeline, inside, first}.multiply_tile(sums, place);
            first = false;
            finish(sums, out, tile, row_scale, vectors, slots, number, row);
        }
        if (threadIdx.x % 32 == 0) wait_until_stores_have_read();
    }
}
