// FP8 scaled GEMM whose long sums are split among all SMs: mainloop.cuh, and what each part of K adds
// up to, in float32. sum_parts.cu adds the parts.
//
//     parts[p, m, n] = (sum over part p of K of a[m, k] b[n, k]) * sa * sb
//     parts[0, m, n] += bias[n], += d[m, n]
//
// mainloop.cuh runs as if each tile had a cluster of PARTS blocks. A real one has 8 at most.
//
// Macros beside those of mainloop.cuh:
//
//     PARTS                       of K: blocks of a tile, which follow each other in the grid
//     TENSOR_SCALES, ROW_SCALES   1: scales that are applied here
//     BIAS                        0: none, 1: float16, 2: bfloat16, 4: float32
//     ACCUMULATE                  1: d is float32, and a term of the sums
//     SHARED_BYTES                what the launch asks for
#include "hopper.cuh"

__device__ __forceinline__ unsigned part_of_sum() { return blockIdx.x % PARTS; }

#define rank_in_cluster part_of_sum
#include "mainloop.cuh"
#undef rank_in_cluster

constexpr int SMALL_AT = OPERAND_BYTES;
static_assert(SMALL_AT + SMALL_BYTES <= SHARED_BYTES, "shared memory");
static_assert(!RESIDENT && BATCH == 1 && A_SLICES == 1 && STEPS >= PARTS, "one product");

struct Terms {
    const float* a_scale;
    const float* b_scale;
    const void* bias;
    const float* d;
};

__device__ __forceinline__ float bias_at(const void* bias, int n) {
    if constexpr (BIAS == 4) return static_cast<const float*>(bias)[n];
    const unsigned short bits = static_cast<const unsigned short*>(bias)[n];
    if constexpr (BIAS == 2) return __uint_as_float(static_cast<unsigned>(bits) << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// One sum, scaled, and in the first part what else there is to add.
__device__ __forceinline__ float finished(
    float sum, const Terms& terms, float row_scale, int row, int column) {
    if constexpr (TENSOR_SCALES) sum = sum * row_scale * *terms.b_scale;
    if constexpr (ROW_SCALES) sum = sum * row_scale * terms.b_scale[column];
    if (part_of_sum() == 0) {
        if constexpr (BIAS) sum += bias_at(terms.bias, column);
        if constexpr (ACCUMULATE) sum += terms.d[static_cast<long long>(row) * N + column];
    }
    return sum;
}

// Writes the sums of a warpgroup, whose first row is `row`.
__device__ __forceinline__ void store(
    const Sums& sums, const Terms& terms, float* parts, const Tile& tile, int row, int m) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float* part = parts + static_cast<long long>(part_of_sum()) * m * N;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + warp * 16 + lane / 4 + half * 8;
        if (r >= m) continue;
        const float row_scale = TENSOR_SCALES ? *terms.a_scale : ROW_SCALES ? terms.a_scale[r] : 1.0f;
        float* to = part + static_cast<long long>(r) * N;
#pragma unroll
        for (int group = 0; group < BLOCK_N / 8; ++group) {
            const int n = tile.column + group * 8 + lane % 4 * 2;
            const float* pair = &sums[group * 4 + half * 2];
            if (n >= N) continue;
            const float first = finished(pair[0], terms, row_scale, r, n);
            if (N % 2 == 0) {
                const float second = finished(pair[1], terms, row_scale, r, n + 1);
                *reinterpret_cast<float2*>(to + n) = make_float2(first, second);
            } else {
                to[n] = first;
                if (n + 1 < N) to[n + 1] = finished(pair[1], terms, row_scale, r, n + 1);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) scaled_gemm(
    const float* a_scale, const float* b_scale, float* parts,
#if BIAS
    const void* bias,
#endif
#if ACCUMULATE
    const float* d,
#endif
    int m,
#if SCALES == 1
    int block_scale_step, int block_scale_column,
#endif
    const __grid_constant__ TensorMap b_map
#if SCALES == 2
    , const __grid_constant__ TensorMap b_scale_map
#endif
    , const __grid_constant__ TensorMap a_map
#if SCALES
    , const __grid_constant__ TensorMap a_scale_map
#endif
) {
    extern __shared__ char shared[];
    const unsigned base = shared_address(shared);
    if (base % 1024) asm volatile("trap;");  // swizzles are counted from there
    const Memory memory{base, base + SMALL_AT};
    const Operands operands{
        {&a_map},
#if SCALES
        {&a_scale_map},
#else
        {},
#endif
        &b_map,
#if SCALES == 2
        &b_scale_map,
#else
        nullptr,
#endif
        b_scale,
#if SCALES == 1
        block_scale_step, block_scale_column,
#else
        0, 0,
#endif
        nullptr, m, 1,
    };
    const Terms terms{
        a_scale, b_scale,
#if BIAS
        bias,
#else
        nullptr,
#endif
#if ACCUMULATE
        d,
#else
        nullptr,
#endif
    };
    if (threadIdx.x == MATH_THREADS) initialize(memory, operands);
    __syncthreads();
    begin_in_turn();

    if (threadIdx.x >= MATH_THREADS) {
        if constexpr (WARPGROUPS > 1) give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == MATH_THREADS) produce(memory, operands, 0);
        __syncwarp();
    } else {
        if constexpr (WARPGROUPS > 1) take_registers<MATH_REGISTERS>();
        const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be uniform
        Walk walk(operands, 0);
        Place place;
        Tile tile;
        Sums sums;
        bool first = true;
        while (walk.next(tile)) {
            Multiplier{memory, operands, tile, 0, warpgroup, first}.multiply_tile(sums, place);
            first = false;
            store(sums, terms, parts, tile, tile.row + warpgroup * ROWS, m);
        }
    }
}
