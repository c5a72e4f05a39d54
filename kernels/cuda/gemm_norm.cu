// A product of FP8 or bfloat16 matrices on Hopper's tensor cores, a norm of its rows and what
// follows, in one pass.
//
//     y = (a b^T) sa sb + bias [+ residual];  z = norm(y) weight + shift;  d = last(z) [+ residual]
//
// The sums of a tile are in registers (mainloop.cuh) and nothing of y is ever written. A block has
// BLOCK_N columns of a row; where more share statistics, the blocks that have them walk over the
// same rows in step and tell each other mean and squared deviations of each row. Merged as count,
// mean and squared deviations (Chan), in the order of columns, in every block alike: deterministic,
// and right where the mean is thousands of times the deviation.
//
// Macros besides those of mainloop.cuh, norm_mainloop.cuh and exchange.cuh, from norm_tiles.py:
//
//     OPERAND_SCALES  0: none, or in the mainloop; 1: of the tensors; 2: of rows
//     NORM         0: none; 1: layer; 2: rms
//     SPAN         columns that share statistics: N, or a divisor of it
//     CLUSTER      blocks that do, or that share a row scale of the output (exchange.cuh)
//     VECTORS      bits: 1 bias, 2 weight, 4 shift
//     VECTOR_ITEM  bytes of their elements: 4 float32, 2 bfloat16
//     RESIDUAL     0: none; 1: before the norm; 2: at the end
//     LAST         0: nothing; 1: relu; 2: hardswish; 3: silu; 4: gate sigmoid(z); 5: x0 z + x
//     OUT          bytes of an element: 2: bfloat16; 1: e4m3
//     OUT_SCALES   of e4m3: 1: one, given; 2: of rows; 3: of 128 of a row
//     CHUNK_BYTES, CHUNKS  of a row that one bulk copy writes; buffers of a warpgroup for them
//     SHARED_BYTES, SM_BLOCKS
#include "norm_mainloop.cuh"
#include "exchange.cuh"
#include "norm.cuh"

constexpr int SPAN_BLOCKS = SPAN > BLOCK_N ? (SPAN + BLOCK_N - 1) / BLOCK_N : 1;
constexpr int SPANS = SPAN < BLOCK_N && SPAN < N ? BLOCK_N / SPAN : 1;  // of a tile
constexpr bool TAIL = N % BLOCK_N != 0;  // the last tile has fewer columns
constexpr int SPAN_COLUMNS = BLOCK_N / SPANS;
constexpr int CHUNK_COLUMNS = CHUNK_BYTES / OUT;
constexpr int CHUNKS_OF_ROW = BLOCK_N / CHUNK_COLUMNS;
constexpr int SWIZZLE =
    CHUNK_BYTES == 128 || CHUNK_BYTES == 64 || CHUNK_BYTES == 32 ? CHUNK_BYTES / 16 - 1 : 0;
constexpr int CHUNK_SIZE = (64 * CHUNK_BYTES + 1023) / 1024 * 1024;
constexpr int STAGING_BYTES = CHUNKS * CHUNK_SIZE;  // of a warpgroup
constexpr int SMALL_AT = OPERAND_BYTES + WARPGROUPS * STAGING_BYTES;
// Of each column: scale of b and bias, then weight and shift.
constexpr int VECTORS_AT = (SMALL_AT + SMALL_BYTES + 15) / 16 * 16;
// The second round is of rows' largest values.
constexpr bool EXCHANGES = SPAN_BLOCKS > 1 && NORM != 0;
constexpr bool EXCHANGES_AMAX = CLUSTER > 1 && OUT == 1 && OUT_SCALES == 2;
constexpr int ROUNDS = EXCHANGES + EXCHANGES_AMAX;
constexpr bool IN_CLUSTER = ROUNDS > 0 && !THROUGH_MEMORY;
constexpr int SHARED_ROUNDS = IN_CLUSTER ? WARPGROUPS * ROUNDS : 0;
constexpr int EXCHANGE_AT = (VECTORS_AT + 2 * BLOCK_N * 8 + 15) / 16 * 16;
// Under scales of rows a common factor of a row is one of its scale: no element is divided by it.
constexpr bool FOLDS = NORM == 2 && SPAN == N && !(VECTORS & 6) && LAST == 0 && RESIDUAL != 2 &&
                       OUT == 1 && OUT_SCALES == 2;
// A scale that is given, after nothing, relu or hardswish of what has no weight: part of the factor
// that every element is multiplied by anyway.
constexpr bool MERGES =
    NORM != 0 && LAST <= 2 && !(VECTORS & 6) && RESIDUAL != 2 && OUT == 1 && OUT_SCALES == 1;
// A chunk is on its way out while the next is normalized, unless a scale waits for all of them.
constexpr bool EARLY = SPANS == 1 && !(OUT == 1 && OUT_SCALES == 2);
static_assert(EXCHANGE_AT + SHARED_ROUNDS * ROUND_BYTES <= SHARED_BYTES, "shared memory");
static_assert(SPAN % BLOCK_N == 0 || BLOCK_N % SPAN == 0 || SPAN == N, "a tile is of whole spans");
static_assert(!EXCHANGES || SPAN_BLOCKS == CLUSTER, "a cluster shares statistics");
static_assert(TILES_N % CLUSTER == 0, "clusters have whole rows, or whole spans of them");
static_assert(OUT != 1 || OUT_SCALES != 3 || BLOCK_N % 128 == 0, "groups of 128 columns");
static_assert(!TAIL || SPANS == 1, "blocks of columns divide a tile");

struct Given {
    const TensorMap& map;
    const float* a_scale;
    const float* b_scale;
    float* out_scale;  // OUT_SCALES 1: given; 2: [m]; 3: [N / 128, out_scale_stride]
    long long out_scale_stride;
    const unsigned short* residual;
    const unsigned short* first;   // gate, or x0
    const unsigned short* second;  // x
    long long residual_stride, first_stride, second_stride;
    float eps;
};

__device__ __forceinline__ float sum_of_quad(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

__device__ __forceinline__ float largest_of_quad(float v) {
    v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

__device__ __forceinline__ unsigned swizzled(unsigned offset) {
    return SWIZZLE ? offset ^ (offset >> 7 & SWIZZLE) << 4 : offset;
}

// Columns of a block of the cluster: the last has fewer where rows end within a tile.
__device__ __forceinline__ float columns_of(int rank) {
    return TAIL && rank == CLUSTER - 1 ? N - (CLUSTER - 1) * BLOCK_N : SPAN_COLUMNS;
}

// Adds to four sums in turn: as many additions are on their way at a time as one takes to be done.
struct Chains {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};

    __device__ __forceinline__ float of_quad() const {
        return sum_of_quad((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
};

// Of this thread's two rows, mean and reciprocal deviation of the span that begins at `first`.
__device__ __forceinline__ void statistics(
    const Sums& y, int first, int columns, float eps, Exchange& exchange, float (&mean)[2],
    float (&rstd)[2]) {
    const int pair = threadIdx.x % 4 * 2;
    const float count = TAIL ? static_cast<float>(columns) : static_cast<float>(SPAN_COLUMNS);
    float squares[2];
    mean[0] = mean[1] = 0.0f;
    if constexpr (NORM == 1) {
        Chains sums[2];  // what lies beyond the columns is 0
#pragma unroll
        for (int i = 0; i < SPAN_COLUMNS / 2; ++i)
            sums[i / 2 % 2].sum[i / 4 % 2 * 2 + i % 2] += y[first + i];
        mean[0] = sums[0].of_quad() * (1.0f / count);
        mean[1] = sums[1].of_quad() * (1.0f / count);
    }
    Chains sums[2];
#pragma unroll
    for (int i = 0; i < SPAN_COLUMNS / 2; ++i) {
        float distance = y[first + i] - mean[i / 2 % 2];
        if constexpr (TAIL && NORM == 1) {
            if (i / 4 * 8 + pair + i % 2 >= columns) distance = 0.0f;
        }
        float& sum = sums[i / 2 % 2].sum[i / 4 % 2 * 2 + i % 2];
        sum = fmaf(distance, distance, sum);
    }
    squares[0] = sums[0].of_quad();
    squares[1] = sums[1].of_quad();
    float all = count;
    if constexpr (EXCHANGES) {
        const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        float2 of[2][CLUSTER];
        exchange.collect(row, mean, squares, of);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float of_all = of[half][0].x, around = of[half][0].y, before = columns_of(0);
#pragma unroll
            for (int rank = 1; rank < CLUSTER; ++rank) {
                const float2 more = of[half][rank];
                const float now = before + columns_of(rank);
                if constexpr (NORM == 1) {
                    const float distance = more.x - of_all;
                    of_all = fmaf(distance, columns_of(rank) / now, of_all);
                    around += fmaf(distance * distance, before * columns_of(rank) / now, more.y);
                } else {
                    around += more.y;
                }
                before = now;
            }
            mean[half] = of_all;
            squares[half] = around;
        }
        all = static_cast<float>(SPAN);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        rstd[half] = rsqrtf(fmaf(squares[half], 1.0f / all, eps));
    }
}

__device__ __forceinline__ float2
bfloat16_pair_at(const unsigned short* from, long long stride, int row, int column, bool inside) {
    unsigned both = 0;
    if (inside) both = *reinterpret_cast<const unsigned*>(from + row * stride + column);
    return make_float2(from_bfloat16(both & 0xffff), from_bfloat16(both >> 16));
}

// What is quantized by a scale of its own must not have an infinite one: then infinity is NaN.
template <int COUNT>
__device__ __forceinline__ float largest_finite(float (&y)[COUNT], int first, int count, int half) {
    float amax = 0.0f;
#pragma unroll
    for (int i = first; i < first + count; i += 4) {
        amax = fmaxf(amax, fmaxf(fabsf(y[i + half * 2]), fabsf(y[i + half * 2 + 1])));
    }
    if (any_of_warp(amax == INFINITE)) {
        amax = 0.0f;
#pragma unroll
        for (int i = first; i < first + count; i += 4) {
#pragma unroll
            for (int j = half * 2; j < half * 2 + 2; ++j) {
                if (fabsf(y[i + j]) == INFINITE) y[i + j] = NOT_A_NUMBER;
                amax = fmaxf(amax, fabsf(y[i + j]));
            }
        }
    }
    return largest_of_quad(amax);
}

__device__ __forceinline__ void finish(
    Sums& y, const Given& given, const Tile& tile, const float (&row_scale)[2], unsigned staging,
    const float2* vectors, Exchange& exchange, Exchange& amax_exchange, int warpgroup, int row) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, pair = lane % 4 * 2;
    const int in_tile = warp * 16 + lane / 4;
    const int of_thread = row + in_tile;
    const int columns = TAIL ? min(N - tile.column, BLOCK_N) : BLOCK_N;
    const bool elected = threadIdx.x % 128 == 0;
    const float tensor_scale = OPERAND_SCALES == 1 ? *given.b_scale : 1.0f;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i += 4) {
        const int column = i * 2 + pair;
        float4 of_columns;  // scale and bias of two columns
        if constexpr (OPERAND_SCALES == 2 || (VECTORS & 1)) {
            of_columns = *reinterpret_cast<const float4*>(vectors + column);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float2 v = make_float2(y[i + half * 2], y[i + half * 2 + 1]);
            if constexpr (OPERAND_SCALES != 0) {
                v.x *= row_scale[half];
                v.y *= row_scale[half];
            }
            if constexpr (OPERAND_SCALES == 2) {
                v.x = fmaf(v.x, of_columns.x, VECTORS & 1 ? of_columns.y : 0.0f);
                v.y = fmaf(v.y, of_columns.z, VECTORS & 1 ? of_columns.w : 0.0f);
            } else if constexpr (OPERAND_SCALES == 1) {
                v.x = fmaf(v.x, tensor_scale, VECTORS & 1 ? of_columns.y : 0.0f);
                v.y = fmaf(v.y, tensor_scale, VECTORS & 1 ? of_columns.w : 0.0f);
            } else if constexpr (VECTORS & 1) {
                v.x += of_columns.y;
                v.y += of_columns.w;
            }
            if constexpr (RESIDUAL == 1) {
                const int r = of_thread + half * 8;
                const bool inside = r < tile.end && column < columns;
                const float2 more = bfloat16_pair_at(
                    given.residual, given.residual_stride, r, tile.column + column, inside);
                v.x += more.x;
                v.y += more.y;
            }
            y[i + half * 2] = v.x;
            y[i + half * 2 + 1] = v.y;
        }
    }
    float folded[2] = {1.0f, 1.0f};
    const float out_inverse = OUT == 1 && OUT_SCALES == 1 ? __frcp_rn(*given.out_scale) : 1.0f;
    float mean[2] = {0.0f, 0.0f}, rstd[2] = {1.0f, 1.0f};
    // Values `from` to `to`, of one span.
    const auto normalize = [&](int from, int to) {
        const float sixth[2] = {rstd[0] * (1.0f / 6.0f), rstd[1] * (1.0f / 6.0f)};
        const float factor[2] = {
            MERGES ? rstd[0] * out_inverse : rstd[0], MERGES ? rstd[1] * out_inverse : rstd[1]};
#pragma unroll
        for (int i = from; i < to; i += 4) {
            const int column = i * 2 + pair;
            float4 affine;  // weight and shift of two columns
            if constexpr (VECTORS & 6)
                affine = *reinterpret_cast<const float4*>(vectors + BLOCK_N + column);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int r = of_thread + half * 8;
                const bool inside = r < tile.end && column < columns;
                float2 z = make_float2(y[i + half * 2], y[i + half * 2 + 1]);
                if constexpr (NORM == 1) {
                    z.x -= mean[half];
                    z.y -= mean[half];
                }
                if constexpr (MERGES && LAST == 2) {
                    const float2 share = make_float2(
                        __saturatef(fmaf(z.x, sixth[half], 0.5f)),
                        __saturatef(fmaf(z.y, sixth[half], 0.5f)));
                    z.x *= factor[half] * share.x;
                    z.y *= factor[half] * share.y;
                } else if constexpr (NORM != 0 && !FOLDS) {
                    z.x *= factor[half];
                    z.y *= factor[half];
                }
                if constexpr (VECTORS & 6) {
                    z.x = fmaf(z.x, affine.x, affine.y);
                    z.y = fmaf(z.y, affine.z, affine.w);
                }
                if constexpr (LAST < 4 && !(MERGES && LAST == 2)) {
                    z.x = activated<LAST>(z.x);
                    z.y = activated<LAST>(z.y);
                } else if constexpr (LAST >= 4) {
                    const float2 first = bfloat16_pair_at(
                        given.first, given.first_stride, r, tile.column + column, inside);
                    if constexpr (LAST == 4) {
                        z.x = first.x * sigmoid(z.x);
                        z.y = first.y * sigmoid(z.y);
                    } else {
                        const float2 second = bfloat16_pair_at(
                            given.second, given.second_stride, r, tile.column + column, inside);
                        z.x = fmaf(first.x, z.x, second.x);
                        z.y = fmaf(first.y, z.y, second.y);
                    }
                }
                if constexpr (RESIDUAL == 2) {
                    const float2 more = bfloat16_pair_at(
                        given.residual, given.residual_stride, r, tile.column + column, inside);
                    z.x += more.x;
                    z.y += more.y;
                }
                if constexpr (OUT == 1 && OUT_SCALES == 1 && !MERGES) {
                    z.x *= out_inverse;
                    z.y *= out_inverse;
                }
                if constexpr (TAIL && OUT == 1 && OUT_SCALES != 1) {  // not part of any amax
                    if (column >= columns) z.x = 0.0f;
                    if (column + 1 >= columns) z.y = 0.0f;
                }
                y[i + half * 2] = z.x;
                y[i + half * 2 + 1] = z.y;
            }
        }
    };
#pragma unroll
    for (int span = 0; span < SPANS; ++span) {
        const int begin = span * (SPAN_COLUMNS / 2);
        if constexpr (NORM != 0) {
            statistics(y, begin, columns, given.eps, exchange, mean, rstd);
        }
        if constexpr (!EARLY) normalize(begin, begin + SPAN_COLUMNS / 2);
    }
    if constexpr (FOLDS) folded[0] = rstd[0], folded[1] = rstd[1];
    float inverse[2] = {1.0f, 1.0f};
    if constexpr (OUT == 1 && OUT_SCALES == 2) {
        float amax[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) amax[half] = largest_finite(y, 0, BLOCK_N / 2, half);
        if constexpr (EXCHANGES_AMAX) {
            float2 of[2][CLUSTER];
            amax_exchange.collect(in_tile, amax, amax, of);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int rank = 0; rank < CLUSTER; ++rank) {
                    amax[half] = fmaxf(amax[half], of[half][rank].x);
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float scale = scale_for(amax[half]);
            inverse[half] = __frcp_rn(scale);
            if constexpr (FOLDS) fold(folded[half], amax[half], scale, inverse[half]);
            const int r = of_thread + half * 8;
            if (lane % 4 == 0 && r < tile.end && tile.column == 0) given.out_scale[r] = scale;
        }
    }
#pragma unroll
    for (int start = 0; start < CHUNKS_OF_ROW; start += CHUNKS) {
        if (elected) wait_until_stores_have_read();
        synchronize_warpgroup(warpgroup);
#pragma unroll
        for (int chunk = start; chunk < start + CHUNKS && chunk < CHUNKS_OF_ROW; ++chunk) {
            const unsigned buffer = staging + (chunk - start) * CHUNK_SIZE;
            constexpr int GROUPS = CHUNK_COLUMNS / 8;
            if constexpr (EARLY) normalize(chunk * GROUPS * 4, (chunk + 1) * GROUPS * 4);
            if constexpr (OUT == 1 && OUT_SCALES == 3) {  // a chunk is one group of 128
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float scale =
                        scale_for(largest_finite(y, chunk * GROUPS * 4, GROUPS * 4, half));
                    inverse[half] = __frcp_rn(scale);
                    const int r = of_thread + half * 8;
                    if (lane % 4 == 0 && r < tile.end && chunk * CHUNK_COLUMNS < columns) {
                        given.out_scale[(tile.column / 128 + chunk) * given.out_scale_stride + r] =
                            scale;
                    }
                }
            }
            if constexpr (OUT == 2 && GROUPS % 2 == 0) {
                const int in_warp = warp * 16 + lane % 16;
#pragma unroll
                for (int group = 0; group < GROUPS; group += 2) {
                    const int i = (chunk * GROUPS + group) * 4;
                    const unsigned four[4] = {
                        bfloat16_pair(y[i], y[i + 1]), bfloat16_pair(y[i + 2], y[i + 3]),
                        bfloat16_pair(y[i + 4], y[i + 5]), bfloat16_pair(y[i + 6], y[i + 7])};
                    const unsigned offset = in_warp * CHUNK_BYTES + (group + lane / 16) * 16;
                    store_blocks(buffer + swizzled(offset), four);
                }
            } else {
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int i = (chunk * GROUPS + group) * 4 + half * 2;
                        const unsigned offset =
                            (in_tile + half * 8) * CHUNK_BYTES + (group * 8 + pair) * OUT;
                        const unsigned to = buffer + swizzled(offset);
                        if constexpr (OUT == 1) {
                            const unsigned short two =
                                encode_pair<false>(y[i] * inverse[half], y[i + 1] * inverse[half]);
                            asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(two) : "memory");
                        } else {
                            asm volatile("st.shared.u32 [%0], %1;" ::"r"(to),
                                         "r"(bfloat16_pair(y[i], y[i + 1]))
                                         : "memory");
                        }
                    }
                }
            }
            publish_shared_memory();
            synchronize_warpgroup(warpgroup);
            if (elected && row < tile.end && !(TAIL && chunk * CHUNK_COLUMNS >= columns)) {
                store_box(given.map, buffer, tile.column + chunk * CHUNK_COLUMNS, row);
                commit_stores();
            }
        }
    }
}

__device__ __forceinline__ float vector_at(const void* from, int place) {
    if constexpr (VECTOR_ITEM == 4) return static_cast<const float*>(from)[place];
    return from_bfloat16(static_cast<const unsigned short*>(from)[place]);
}

extern "C" __global__ void __launch_bounds__(THREADS, SM_BLOCKS) gemm_norm(
    const float* a_scale, const float* b_scale, const void* bias, const void* weight,
    const void* shift, float* out_scale, const unsigned short* residual,
    const unsigned short* first_given, const unsigned short* second_given, char* told, int m,
    float eps, long long out_scale_stride, long long residual_stride, long long first_stride,
    long long second_stride,
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
    const Given given{out_map,          a_scale,      b_scale,       out_scale,
                      out_scale_stride, residual,     first_given,   second_given,
                      residual_stride,  first_stride, second_stride, eps};
    if (threadIdx.x == MATH_THREADS) {
        initialize(memory, operands);
        for (int i = 0; i < SHARED_ROUNDS; ++i) {
            const unsigned barriers = base + EXCHANGE_AT + i * ROUND_BYTES + 2 * SLOT_BYTES;
            initialize_barrier(barriers, 1);
            initialize_barrier(barriers + 8, 1);
        }
        if constexpr (IN_CLUSTER) publish_barriers();
    }
    if constexpr (IN_CLUSTER) {
        synchronize_cluster();  // nobody is told anything before its barriers are there
    } else {
        __syncthreads();
    }
    begin_in_turn();

    if (threadIdx.x >= MATH_THREADS) {
        if constexpr (WARPGROUPS > 1) give_registers<PRODUCER_REGISTERS>();
        const int pipeline = (threadIdx.x - MATH_THREADS) / 32;
        if (pipeline < PIPELINES && threadIdx.x % 32 == 0) produce(memory, operands, pipeline);
        __syncwarp();
    } else {
        if constexpr (WARPGROUPS > 1) take_registers<MATH_REGISTERS>();
        const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
        const int pipeline = RESIDENT ? warpgroup : 0;
        const int inside = RESIDENT ? 0 : warpgroup;
        const unsigned staging = base + OPERAND_BYTES + warpgroup * STAGING_BYTES;
        // Loads that the compiler may move: 30 cycles each, one after the other, took 3 of 30 us.
        float2* vectors = reinterpret_cast<float2*>(shared + VECTORS_AT);
        // Tiles of a block have one column.
        const int column = blockIdx.x % TILES_N * BLOCK_N;
        for (int i = threadIdx.x; i < BLOCK_N; i += MATH_THREADS) {
            const bool there = column + i < N;
            const float scale = OPERAND_SCALES == 2 && there ? b_scale[column + i] : 0.0f;
            const float plus = VECTORS & 1 && there ? vector_at(bias, column + i) : 0.0f;
            const float factor = VECTORS & 2 && there ? vector_at(weight, column + i) : 1.0f;
            const float more = VECTORS & 4 && there ? vector_at(shift, column + i) : 0.0f;
            vectors[i] = make_float2(scale, plus);
            vectors[BLOCK_N + i] = make_float2(factor, more);
        }
        asm volatile("bar.sync 8, %0;" ::"n"(MATH_THREADS) : "memory");
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
                if constexpr (OPERAND_SCALES == 1) row_scale[half] = *a_scale;
                if constexpr (OPERAND_SCALES == 2)
                    row_scale[half] = r < tile.end ? a_scale[r] : 0.0f;
            }
            const Multiplier multiplier{memory, operands, tile, pipeline, inside, first};
            multiply_tile(multiplier, memory, sums, place);
            first = false;
            finish(
                sums, given, tile, row_scale, staging, vectors, exchange, amax_exchange, warpgroup,
                row);
        }
        if (threadIdx.x % 128 == 0) wait_until_stores_have_read();
        __syncwarp();
#if THROUGH_MEMORY
        // The last of all begins the next launch's turns where no tile of this one was.
        asm volatile("bar.sync 8, %0;" ::"n"(MATH_THREADS) : "memory");
        if (threadIdx.x == 0 && ROUNDS) {
            unsigned* ended = reinterpret_cast<unsigned*>(told + 8);
            if (atomicAdd(ended, 1) + 1 == gridDim.x) {
                *ended = 0;
                *reinterpret_cast<unsigned long long*>(told) = turn + (m + ROWS - 1) / ROWS;
            }
        }
#endif
    }
    // Nobody leaves while others may still write into its memory.
    if constexpr (IN_CLUSTER) synchronize_cluster();
}
