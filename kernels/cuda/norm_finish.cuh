// What becomes of the sums of a tile: scales and bias, a norm, what follows it, and the way out.
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
//     CHUNK_BYTES, CHUNKS  where not PERMUTED: of a row that one bulk copy writes; buffers of a
//                  warpgroup for them
//     SHARED_BYTES, SM_BLOCKS
#pragma once
#include "exchange.cuh"

constexpr int SPAN_BLOCKS = SPAN > BLOCK_N ? (SPAN + BLOCK_N - 1) / BLOCK_N : 1;
constexpr int SPANS = SPAN < BLOCK_N && SPAN < N ? BLOCK_N / SPAN : 1;  // of a tile
constexpr bool TAIL = N % BLOCK_N != 0;  // the last tile has fewer columns
constexpr int SPAN_COLUMNS = BLOCK_N / SPANS;
constexpr int CHUNK_COLUMNS = CHUNK_BYTES / OUT;
constexpr int CHUNKS_OF_ROW = BLOCK_N / CHUNK_COLUMNS;
constexpr int SWIZZLE =
    CHUNK_BYTES == 128 || CHUNK_BYTES == 64 || CHUNK_BYTES == 32 ? CHUNK_BYTES / 16 - 1 : 0;
constexpr int CHUNK_SIZE = (64 * CHUNK_BYTES + 1023) / 1024 * 1024;
constexpr int STAGING_BYTES = PERMUTED ? 0 : CHUNKS * CHUNK_SIZE;  // of a warpgroup
constexpr int SMALL_AT = OPERAND_BYTES + WARPGROUPS * STAGING_BYTES;
constexpr bool SCALED = OPERAND_SCALES == 2, BIASED = VECTORS & 1;
constexpr bool WEIGHTED = VECTORS & 2, SHIFTED = VECTORS & 4;
// The second round is of rows' largest values.
constexpr bool EXCHANGES = SPAN_BLOCKS > 1 && NORM != 0;
constexpr bool EXCHANGES_AMAX = CLUSTER > 1 && OUT == 1 && OUT_SCALES == 2;
constexpr int ROUNDS = EXCHANGES + EXCHANGES_AMAX;
constexpr bool IN_CLUSTER = ROUNDS > 0 && !THROUGH_MEMORY;
constexpr int SHARED_ROUNDS = IN_CLUSTER ? WARPGROUPS * ROUNDS : 0;
// One scale of all sums is part of the norm, and their bias of the product.
constexpr bool DEFERS = OPERAND_SCALES == 1 && WHOLE && NORM != 0 && RESIDUAL != 1;
constexpr bool ADDS = BIASED && (DEFERS || BF16);
constexpr int PLUS_AT = (SMALL_AT + SMALL_BYTES + 127) / 128 * 128;
// Of each column: scale of b and bias, as far as there are any; then weight and shift.
constexpr int VECTORS_AT = ADDS ? PLUS_AT + Plus::BYTES : PLUS_AT;
constexpr int EXCHANGE_AT = VECTORS_AT + 2 * BLOCK_N * 8;
// Under scales of rows a common factor of a row is one of its scale: no element is divided by it.
constexpr bool FOLDS = NORM == 2 && SPAN == N && !(VECTORS & 6) && LAST == 0 && RESIDUAL != 2 &&
                       OUT == 1 && OUT_SCALES == 2;
// A scale that is given, after nothing, relu or hardswish of what has no weight: part of the factor
// that every element is multiplied by anyway.
constexpr bool MERGES =
    NORM != 0 && LAST <= 2 && !(VECTORS & 6) && RESIDUAL != 2 && OUT == 1 && OUT_SCALES == 1;
// A chunk is on its way out while the next is normalized, unless a scale waits for all of them.
constexpr bool EARLY = SPANS == 1 && !(OUT == 1 && OUT_SCALES == 2);
// So many chunks wait together to be seen by bulk copies, which takes a while.
constexpr int FENCED = OUT == 2 && CHUNKS % 2 == 0 ? 2 : 1;
static_assert(EXCHANGE_AT + SHARED_ROUNDS * ROUND_BYTES <= SHARED_BYTES, "shared memory");
static_assert(SPAN % BLOCK_N == 0 || BLOCK_N % SPAN == 0 || SPAN == N, "a tile is of whole spans");
static_assert(!EXCHANGES || SPAN_BLOCKS == CLUSTER, "a cluster shares statistics");
static_assert(TILES_N % CLUSTER == 0, "clusters have whole rows, or whole spans of them");
static_assert(OUT != 1 || OUT_SCALES != 3 || BLOCK_N % 128 == 0, "groups of 128 columns");
static_assert(!TAIL || SPANS == 1, "blocks of columns divide a tile");

__device__ __forceinline__ float vector_at(const void* from, int place) {
    if constexpr (VECTOR_ITEM == 4) return static_cast<const float*>(from)[place];
    return from_bfloat16(static_cast<const unsigned short*>(from)[place]);
}

// Two values of each column, or one where there is no more, side by side, in the order of products.
template <bool FIRST, bool SECOND>
struct Columns {
    float* values;

    __device__ __forceinline__ void store(int place, float first, float second) const {
        if constexpr (FIRST && SECOND) {
            reinterpret_cast<float2*>(values)[place] = make_float2(first, second);
        } else if constexpr (FIRST || SECOND) {
            values[place] = FIRST ? first : second;
        }
    }

    // Of two columns; what there is not stays as it is.
    __device__ __forceinline__ void load(int place, float (&first)[2], float (&second)[2]) const {
        if constexpr (FIRST && SECOND) {
            const float4 both = *reinterpret_cast<const float4*>(values + place * 2);
            first[0] = both.x, second[0] = both.y, first[1] = both.z, second[1] = both.w;
        } else if constexpr (FIRST || SECOND) {
            const float2 both = *reinterpret_cast<const float2*>(values + place);
            (FIRST ? first : second)[0] = both.x;
            (FIRST ? first : second)[1] = both.y;
        }
    }
};
using BeforeNorm = Columns<SCALED, BIASED>;
using AfterNorm = Columns<WEIGHTED, SHIFTED>;

// What goes into an output beside sums: of this thread's two rows, pairs of bfloat16 values.
struct Beside {
    const unsigned* rows[2];  // of a tile, from the thread's first column on; null beyond the last
    unsigned pairs[2][PERMUTED ? 4 : 1];

    __device__ __forceinline__
    Beside(const unsigned short* from, long long stride, const Tile& tile, int row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = row + half * 8;
            const unsigned short* at = from + r * stride + tile.column + column_of(0);
            rows[half] = r < tile.end ? reinterpret_cast<const unsigned*>(at) : nullptr;
        }
    }

    // Of values `i` on, a multiple of 4, as many as there is room for; 0 outside.
    __device__ __forceinline__ void load(int i, int columns) {
        if (PERMUTED && i % 16 != 0) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned* at = rows[half] + i;  // 2 columns of each 4 bytes
            const bool inside = rows[half] && (!TAIL || column_of(i) < columns);
            if constexpr (PERMUTED) {
                uint4 four = make_uint4(0, 0, 0, 0);
                if (inside) four = *reinterpret_cast<const uint4*>(at);
                pairs[half][0] = four.x, pairs[half][1] = four.y;
                pairs[half][2] = four.z, pairs[half][3] = four.w;
            } else {
                pairs[half][0] = inside ? *at : 0;
            }
        }
    }

    __device__ __forceinline__ float2 at(int i, int half) const {
        const unsigned both = pairs[half][PERMUTED ? i / 4 % 4 : 0];
        return make_float2(from_bfloat16(both & 0xffff), from_bfloat16(both >> 16));
    }
};

// Of a product of two scales.
__device__ __forceinline__ bool is_usual(float product) {
    return product >= 9.0949470e-13f && product < 1.0995116e12f;  // 2^-40, 2^40
}

struct Given {
    const TensorMap& map;
    char* out;
    long long out_stride;  // bytes
    const float* a_scale;  // of the tensors, where OPERAND_SCALES is 1
    const float* b_scale;
    float scale;        // their product; 0 where it, or a bias, is beyond what is usual
    float out_inverse;  // of the scale that is given, where OUT_SCALES is 1
    float* out_scale;   // OUT_SCALES 2: [m]; 3: [N / 128, out_scale_stride]
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

// What the pieces of a row in a buffer are permuted by: of rows 8 apart the same.
__device__ __forceinline__ unsigned swizzle_of(int row) {
    return (row * CHUNK_BYTES >> 7 & SWIZZLE) << 4;
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

// Of this thread's two rows, the reciprocal deviation of the span that begins at `first`. Layer
// norm also takes this block's mean from each value, while it adds up their squares; what then is
// left of the mean of all blocks, a few deviations at most, is to be added.
__device__ __forceinline__ void statistics(
    Sums& y, int first, int columns, float eps, float scale, Exchange& exchange, float (&left)[2],
    float (&rstd)[2]) {
    const float count = TAIL ? static_cast<float>(columns) : static_cast<float>(SPAN_COLUMNS);
    float squares[2], mean[2] = {0.0f, 0.0f};
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
        float distance = y[first + i];
        if constexpr (NORM == 1) {
            distance -= mean[i / 2 % 2];
            if constexpr (TAIL) {
                if (column_of(i / 4 * 4) + i % 2 >= columns) distance = 0.0f;
            }
            y[first + i] = distance;
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
            left[half] = mean[half] - of_all;
            squares[half] = around;
        }
        all = static_cast<float>(SPAN);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float share = DEFERS ? scale * scale / all : 1.0f / all;
        rstd[half] = rsqrtf(fmaf(squares[half], share, eps));
        if constexpr (DEFERS) rstd[half] *= scale;
    }
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

// Values i, i + 1, i + 4, i + 5 and so on, of 8 neighbors of a row, if it is `inside`. Behind
// branches each store waited until the one before had read its registers: 3300 cycles a tile.
__device__ __forceinline__ void store_eight(
    char* to, bool inside, const Sums& y, int i, float inverse) {
    if constexpr (OUT == 2) {
        asm volatile(
            "{.reg .pred inside;\n setp.ne.b32 inside, %5, 0;\n"
            "@inside st.global.v4.b32 [%0], {%1, %2, %3, %4};}" ::"l"(to),
            "r"(bfloat16_pair(y[i], y[i + 1])), "r"(bfloat16_pair(y[i + 4], y[i + 5])),
            "r"(bfloat16_pair(y[i + 8], y[i + 9])), "r"(bfloat16_pair(y[i + 12], y[i + 13])),
            "r"(static_cast<int>(inside)));
    } else {
        unsigned pair[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            pair[j] = encode_pair<false>(y[i + j * 4] * inverse, y[i + j * 4 + 1] * inverse);
        }
        asm volatile(
            "{.reg .pred inside;\n setp.ne.b32 inside, %3, 0;\n"
            "@inside st.global.v2.b32 [%0], {%1, %2};}" ::"l"(to),
            "r"(pair[0] | pair[1] << 16), "r"(pair[2] | pair[3] << 16),
            "r"(static_cast<int>(inside)));
    }
}

__device__ __forceinline__ void finish(
    Sums& y, const Given& given, const Tile& tile, const float (&row_scale)[2], unsigned staging,
    const BeforeNorm& before_norm, const AfterNorm& after_norm, Exchange& exchange,
    Exchange& amax_exchange, int row) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, pair = lane % 4 * 2;
    const int in_tile = warp * 16 + lane / 4;
    const int of_thread = row + in_tile;
    const int columns = TAIL ? min(N - tile.column, BLOCK_N) : BLOCK_N;
    // Where the product of two scales is no usual number, one is applied after the other; where
    // some bias is not, all are added here.
    if constexpr (OPERAND_SCALES == 1 || ADDS) {
        if (given.scale == 0.0f) {  // rare
            float scales[2] = {1.0f, 1.0f};
            if constexpr (OPERAND_SCALES == 1) {
                const float product = *given.a_scale * *given.b_scale;
                scales[0] = is_usual(product) ? product : *given.a_scale;
                scales[1] = is_usual(product) ? 1.0f : *given.b_scale;
            }
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i) y[i] *= scales[0];
#pragma unroll
            for (int i = 0; i < (DEFERS || ADDS ? BLOCK_N / 2 : 0); i += 4) {
                float scale[2], bias[2] = {0.0f, 0.0f};
                before_norm.load(i * 2 + pair, scale, bias);
#pragma unroll
                for (int j = 0; j < 4; ++j) y[i + j] = fmaf(y[i + j], scales[1], bias[j % 2]);
            }
        }
    }
    const bool one_is_left = OPERAND_SCALES == 1 && !DEFERS && given.scale == 0.0f;
    const float usual_scale = one_is_left           ? *given.b_scale
                              : given.scale != 0.0f ? given.scale
                                                    : 1.0f;
    Beside residual(given.residual, given.residual_stride, tile, of_thread);
    Beside first(given.first, given.first_stride, tile, of_thread);
    Beside second(given.second, given.second_stride, tile, of_thread);
#pragma unroll
    for (int i = 0; i < (DEFERS ? 0 : BLOCK_N / 2); i += 4) {
        if constexpr (RESIDUAL == 1) {
            // No more loads at once than there are registers for.
            if (i % 64 == 0) asm volatile("" ::: "memory");
            residual.load(i, columns);
        }
        float scale[2] = {usual_scale, usual_scale}, bias[2] = {0.0f, 0.0f};
        before_norm.load(i * 2 + pair, scale, bias);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float2 v = make_float2(y[i + half * 2], y[i + half * 2 + 1]);
            if constexpr (SCALED) {
                v.x *= row_scale[half];
                v.y *= row_scale[half];
            }
            if constexpr (OPERAND_SCALES != 0) {
                v.x = fmaf(v.x, scale[0], bias[0]);
                v.y = fmaf(v.y, scale[1], bias[1]);
            } else if constexpr (BIASED && !ADDS) {
                v.x += bias[0];
                v.y += bias[1];
            }
            if constexpr (RESIDUAL == 1) {
                const float2 more = residual.at(i, half);
                v.x += more.x;
                v.y += more.y;
            }
            y[i + half * 2] = v.x;
            y[i + half * 2 + 1] = v.y;
        }
    }
    float folded[2] = {1.0f, 1.0f};
    const float out_inverse = OUT == 1 && OUT_SCALES == 1 ? given.out_inverse : 1.0f;
    float left[2] = {0.0f, 0.0f}, rstd[2] = {1.0f, 1.0f};
    // Values `from` to `to`, of one span.
    const auto normalize = [&](int from, int to) {
        const float sixth[2] = {rstd[0] * (1.0f / 6.0f), rstd[1] * (1.0f / 6.0f)};
        const float factor[2] = {
            MERGES ? rstd[0] * out_inverse : rstd[0], MERGES ? rstd[1] * out_inverse : rstd[1]};
        constexpr bool LEAVES = NORM == 1 && EXCHANGES;  // something of the mean
        const float offset[2] = {left[0] * factor[0], left[1] * factor[1]};
#pragma unroll
        for (int i = from; i < to; i += 4) {
            if constexpr (LAST >= 4) first.load(i, columns);
            if constexpr (LAST == 5) second.load(i, columns);
            if constexpr (RESIDUAL == 2) residual.load(i, columns);
            const int column = column_of(i);
            float weight[2] = {1.0f, 1.0f}, shift[2] = {0.0f, 0.0f};
            after_norm.load(i * 2 + pair, weight, shift);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float2 z = make_float2(y[i + half * 2], y[i + half * 2 + 1]);
                if constexpr (MERGES && LAST == 2) {
                    if constexpr (LEAVES) {
                        z.x += left[half];
                        z.y += left[half];
                    }
                    const float2 share = make_float2(
                        __saturatef(fmaf(z.x, sixth[half], 0.5f)),
                        __saturatef(fmaf(z.y, sixth[half], 0.5f)));
                    z.x *= factor[half] * share.x;
                    z.y *= factor[half] * share.y;
                } else if constexpr (LEAVES) {
                    z.x = fmaf(z.x, factor[half], offset[half]);
                    z.y = fmaf(z.y, factor[half], offset[half]);
                } else if constexpr (NORM != 0 && !FOLDS) {
                    z.x *= factor[half];
                    z.y *= factor[half];
                }
                if constexpr (WEIGHTED || SHIFTED) {
                    z.x = fmaf(z.x, weight[0], shift[0]);
                    z.y = fmaf(z.y, weight[1], shift[1]);
                }
                if constexpr (LAST < 4 && !(MERGES && LAST == 2)) {
                    z.x = activated<LAST>(z.x);
                    z.y = activated<LAST>(z.y);
                } else if constexpr (LAST >= 4) {
                    const float2 factor = first.at(i, half);
                    if constexpr (LAST == 4) {
                        z.x = factor.x * sigmoid(z.x);
                        z.y = factor.y * sigmoid(z.y);
                    } else {
                        const float2 more = second.at(i, half);
                        z.x = fmaf(factor.x, z.x, more.x);
                        z.y = fmaf(factor.y, z.y, more.y);
                    }
                }
                if constexpr (RESIDUAL == 2) {
                    const float2 more = residual.at(i, half);
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
            statistics(y, begin, columns, given.eps, usual_scale, exchange, left, rstd);
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
    // Values from `from` on are a group of 128 columns, which gets a scale of its own.
    const auto scale_group = [&](int from) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float scale = scale_for(largest_finite(y, from, 64, half));
            inverse[half] = __frcp_rn(scale);
            const int r = of_thread + half * 8, group = from / 64;
            if (lane % 4 == 0 && r < tile.end && group * 128 < columns) {
                given.out_scale[(tile.column / 128 + group) * given.out_scale_stride + r] = scale;
            }
        }
    };
    if constexpr (PERMUTED) {
        constexpr int GROUPS = OUT == 1 && OUT_SCALES == 3 ? 4 : 1;  // of 32 columns, at a time
        char* of_row[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            of_row[half] = given.out + (of_thread + half * 8) * given.out_stride +
                           (tile.column + column_of(0)) * OUT;
        }
#pragma unroll
        for (int from = 0; from < BLOCK_N / 2; from += GROUPS * 16) {
            if constexpr (EARLY) normalize(from, from + GROUPS * 16);
            if constexpr (OUT == 1 && OUT_SCALES == 3) scale_group(from);
#pragma unroll
            for (int i = from; i < from + GROUPS * 16; i += 16) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool inside =
                        of_thread + half * 8 < tile.end && (!TAIL || column_of(i) < columns);
                    store_eight(of_row[half] + i * 2 * OUT, inside, y, i + half * 2, inverse[half]);
                }
            }
        }
        return;
    }
#pragma unroll
    for (int start = 0; start < CHUNKS_OF_ROW; start += CHUNKS) {
        int published = start;
        if (lane == 0) wait_until_stores_have_read();
        __syncwarp();
#pragma unroll
        for (int chunk = start; chunk < start + CHUNKS && chunk < CHUNKS_OF_ROW; ++chunk) {
            const unsigned buffer = staging + (chunk - start) * CHUNK_SIZE;
            constexpr int GROUPS = CHUNK_COLUMNS / 8;
            if constexpr (EARLY) normalize(chunk * GROUPS * 4, (chunk + 1) * GROUPS * 4);
            if constexpr (OUT == 1 && OUT_SCALES == 3) scale_group(chunk * 64);
            if constexpr (OUT == 2 && GROUPS % 2 == 0) {
                const unsigned to = buffer + (warp * 16 + lane % 16) * CHUNK_BYTES;
                const unsigned piece = swizzle_of(lane % 8) ^ lane / 16 * 16;
#pragma unroll
                for (int group = 0; group < GROUPS; group += 2) {
                    const int i = (chunk * GROUPS + group) * 4;
                    const unsigned four[4] = {
                        bfloat16_pair(y[i], y[i + 1]), bfloat16_pair(y[i + 2], y[i + 3]),
                        bfloat16_pair(y[i + 4], y[i + 5]), bfloat16_pair(y[i + 6], y[i + 7])};
                    store_blocks(to + (piece ^ group * 16), four);
                }
            } else {
                const unsigned of_row = buffer + in_tile * CHUNK_BYTES + pair * OUT;
                const unsigned permuted = swizzle_of(lane / 4);
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int i = (chunk * GROUPS + group) * 4 + half * 2;
                        const unsigned to = of_row + half * 8 * CHUNK_BYTES + group * 8 * OUT % 16 +
                                            (permuted ^ (group * 8 * OUT & ~15));
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
            if ((chunk + 1 - start) % FENCED && chunk + 1 != CHUNKS_OF_ROW) continue;
            publish_shared_memory();
            __syncwarp();
            const int of_warp = row + warp * 16;
            if (lane == 0 && of_warp < tile.end) {
#pragma unroll
                for (int done = published; done <= chunk; ++done) {
                    if (TAIL && done * CHUNK_COLUMNS >= columns) continue;
                    store_box(
                        given.map, staging + (done - start) * CHUNK_SIZE + warp * 16 * CHUNK_BYTES,
                        tile.column + done * CHUNK_COLUMNS, of_warp);
                }
                commit_stores();
            }
            published = chunk + 1;
        }
    }
}
