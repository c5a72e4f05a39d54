// A product of FP8 or bfloat16 matrices on Hopper's tensor cores, a norm of its rows and what
// follows, in one pass.
//
//     y = (a b^T) sa sb + bias [+ residual];  z = norm(y) weight + shift;  d = last(z) [+ residual]
//
// The sums of a tile are in registers (mainloop.cuh) and nothing of y is ever written. A block has
// BLOCK_N columns of a row; where more share statistics, the blocks that have them walk over the
// same rows in step and tell each other mean and squared deviations of each row. Merged as count,
// mean and squared deviations (Chan), in the order of columns, in every block alike: deterministic,
// and right where the mean is thousands of times the deviation. After the products no warp waits
// for another of its block. It writes from its registers where rows of b are permuted for it,
// through shared memory and bulk copies elsewhere.
//
// Macros: those of mainloop.cuh, norm_mainloop.cuh, exchange.cuh and norm_finish.cuh, from
// norm_tiles.py.
#include "norm_finish.cuh"

__device__ __forceinline__ bool all_of_math_threads(bool mine) {
    int all;
    asm volatile(
        "{.reg .pred mine, all;\n setp.ne.b32 mine, %1, 0;\n"
        "barrier.cta.red.and.pred all, 8, %2, mine;\n selp.b32 %0, 1, 0, all;}"
        : "=r"(all)
        : "r"(static_cast<int>(mine)), "n"(MATH_THREADS)
        : "memory");
    return all;
}

// Of this block's columns, a line of 128 bytes by each of the first threads.
__device__ __forceinline__ void prefetch_vectors(
    const float* a_scale, const float* b_scale, const void* bias, const void* weight,
    const void* shift) {
    const int column = blockIdx.x % TILES_N * BLOCK_N;
    const auto prefetch_columns = [&](const void* from, int item) {
        const int at = column + static_cast<int>(threadIdx.x) * 128 / item;
        if (at < column + BLOCK_N && at < N)
            prefetch(static_cast<const char*>(from) + static_cast<long long>(at) * item);
    };
    if constexpr (SCALED) prefetch_columns(b_scale, 4);
    if constexpr (BIASED) prefetch_columns(bias, VECTOR_ITEM);
    if constexpr (WEIGHTED) prefetch_columns(weight, VECTOR_ITEM);
    if constexpr (SHIFTED) prefetch_columns(shift, VECTOR_ITEM);
    if (OPERAND_SCALES == 1 && threadIdx.x == 32) prefetch(a_scale), prefetch(b_scale);
}

extern "C" __global__ void __launch_bounds__(THREADS, SM_BLOCKS) gemm_norm(
    const float* a_scale, const float* b_scale, const void* bias, const void* weight,
    const void* shift, float* out_scale, const unsigned short* residual,
    const unsigned short* first_given, const unsigned short* second_given, char* told, char* out,
    int m, float eps, long long out_stride, long long out_scale_stride, long long residual_stride,
    long long first_stride, long long second_stride,
#if SCALES == 1
    int block_scale_step, int block_scale_column,
#endif
    const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap out_map,
    const __grid_constant__ TensorMap a_map
#if SCALES
    ,
    const __grid_constant__ TensorMap a_scale_map
#endif
) {
    extern __shared__ char shared[];
    const unsigned base = shared_address(shared);
    if (base % 1024) asm volatile("trap;");
    const Memory memory{base, base + SMALL_AT};
    const Operands operands{
        {&a_map},
#if SCALES
        {&a_scale_map}, &b_map, nullptr, b_scale, block_scale_step, block_scale_column,
#else
        {},       &b_map, nullptr, b_scale, 0, 0,
#endif
        nullptr,        m,      1};
    if (threadIdx.x == MATH_THREADS) {
        initialize(memory, operands);
        for (int i = 0; i < SHARED_ROUNDS; ++i) {
            const unsigned barriers = base + EXCHANGE_AT + i * ROUND_BYTES + 2 * SLOT_BYTES;
            initialize_barrier(barriers, 1);
            initialize_barrier(barriers + 8, 1);
        }
        if constexpr (IN_CLUSTER) publish_barriers();
    }
    if (threadIdx.x == 0) prefetch_operands(operands);
    prefetch_vectors(a_scale, b_scale, bias, weight, shift);
    __syncthreads();
    if constexpr (IN_CLUSTER) begin_in_cluster();
    begin_in_turn();

    if (threadIdx.x >= MATH_THREADS) {
        if constexpr (WARPGROUPS > 1) give_registers<PRODUCER_REGISTERS>();
        const int pipeline = (threadIdx.x - MATH_THREADS) / 32;
        if (pipeline < PIPELINES && threadIdx.x % 32 == 0) {
            produce_tiles(memory, operands, pipeline);
        }
        __syncwarp();
    } else {
        if constexpr (WARPGROUPS > 1) take_registers<MATH_REGISTERS>();
        const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
        const int pipeline = RESIDENT ? warpgroup : 0;
        const int inside = RESIDENT ? 0 : warpgroup;
        const unsigned staging = base + OPERAND_BYTES + warpgroup * STAGING_BYTES;
        // Loads that the compiler may move: 30 cycles each, one after the other, took 3 of 30 us.
        float* vectors = reinterpret_cast<float*>(shared + VECTORS_AT);
        const BeforeNorm before_norm{vectors};
        const AfterNorm after_norm{vectors + (SCALED + BIASED) * BLOCK_N};
        // Tiles of a block have one column.
        const int column = blockIdx.x % TILES_N * BLOCK_N;
        constexpr int EACH = (BLOCK_N + MATH_THREADS - 1) / MATH_THREADS;
        const float product = OPERAND_SCALES == 1 ? *a_scale * *b_scale : 1.0f;
        float of_columns[EACH][4];  // all on their way at once: a row of memory's latencies else
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = i * MATH_THREADS + threadIdx.x;
            const bool there = at < BLOCK_N && column + at < N;
            of_columns[i][0] = SCALED && there ? b_scale[column + at] : 0.0f;
            of_columns[i][1] = BIASED && there ? vector_at(bias, column + at) : 0.0f;
            of_columns[i][2] = WEIGHTED && there ? vector_at(weight, column + at) : 1.0f;
            of_columns[i][3] = SHIFTED && there ? vector_at(shift, column + at) : 0.0f;
        }
#if THROUGH_MEMORY
        const unsigned long long turn =
            ROUNDS ? *reinterpret_cast<unsigned long long*>(told) + 1 : 0;
        const int sharers = blockIdx.x / CLUSTER * WARPGROUPS + warpgroup;
        char* exchanges = told + TOLD_AT + static_cast<long long>(sharers) * ROUNDS * ROUND_BYTES;
        Exchange exchange{exchanges, turn},
            amax_exchange{exchanges + EXCHANGES * ROUND_BYTES, turn};
#else
        const unsigned exchanges = base + EXCHANGE_AT + warpgroup * ROUNDS * ROUND_BYTES;
        Exchange exchange{exchanges}, amax_exchange{exchanges + EXCHANGES * ROUND_BYTES};
#endif
        bool usual = is_usual(product);
        if constexpr (ADDS) {
            // Three parts of bfloat16 hold a bias that does not overflow when rounded; over a scale
            // its square must not, either. Blocks that share rows must agree: each looks at all.
            const float largest = DEFERS ? product * 1.1258999e15f : 1e38f;  // 2^50
#pragma unroll
            for (int i = 0; i < EACH; ++i) usual = usual && fabsf(of_columns[i][1]) < largest;
#pragma unroll 8
            for (int at = threadIdx.x; at < (CLUSTER > 1 ? N : 0); at += MATH_THREADS) {
                usual = usual && fabsf(vector_at(bias, at)) < largest;
            }
            usual = all_of_math_threads(usual);
        }
        const float scale = usual ? product : 0.0f;
        const Plus plus{base + PLUS_AT};
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = i * MATH_THREADS + threadIdx.x;
            if (at < BLOCK_N) {
                const int place = place_of(at);
                if constexpr (ADDS) {
                    plus.store(place, scale != 0.0f ? of_columns[i][1] / scale : 0.0f);
                }
                before_norm.store(place, of_columns[i][0], of_columns[i][1]);
                after_norm.store(place, of_columns[i][2], of_columns[i][3]);
            }
        }
        if constexpr (ADDS) publish_shared_memory();
        asm volatile("bar.sync 8, %0;" ::"n"(MATH_THREADS) : "memory");
        if constexpr (IN_TURN) {
            if (warpgroup == 1) give_turn_to(0);
        }
        const Given given{
            out_map,
            out,
            out_stride,
            a_scale,
            b_scale,
            scale,
            OUT == 1 && OUT_SCALES == 1 ? __frcp_rn(*out_scale) : 1.0f,
            out_scale,
            out_scale_stride,
            residual,
            first_given,
            second_given,
            residual_stride,
            first_stride,
            second_stride,
            eps};
        Walk walk(operands, pipeline);
        Place place;
        Tile tile;
        Sums sums;
        bool first = true;
        while (walk.next(tile)) {
            const int row = tile.row + inside * ROWS;
            float row_scale[2] = {1.0f, 1.0f};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int r = row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + half * 8;
                if constexpr (OPERAND_SCALES == 2)
                    row_scale[half] = r < tile.end ? a_scale[r] : 0.0f;
            }
            const Multiplier multiplier{memory, operands, tile, pipeline, inside, first};
            multiply_tile<ADDS>(multiplier, memory, sums, place, plus);
            if constexpr (IN_CLUSTER) {
                if (first) await_cluster();  // who is told must have begun
            }
            first = false;
            finish(
                sums, given, tile, row_scale, staging, before_norm, after_norm, exchange,
                amax_exchange, row);
        }
        if (threadIdx.x % 32 == 0) wait_until_stores_have_read();
        __syncwarp();
#if THROUGH_MEMORY
        // The last of all begins the next launch's turns where no tile of this one was.
        asm volatile("bar.sync 8, %0;" ::"n"(MATH_THREADS) : "memory");
        if (threadIdx.x == 0 && ROUNDS) {
            unsigned* ended = reinterpret_cast<unsigned*>(told + 8);
            if (atomicAdd(ended, 1) + 1 == gridDim.x) {
                *ended = 0;
                *reinterpret_cast<unsigned long long*>(told) += 1 + (m + ROWS - 1) / ROWS;
            }
        }
#endif
    }
}
