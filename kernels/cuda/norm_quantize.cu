// A norm of rows and what follows, in one read: what no GEMM could do on its way.
//
//     y = x [+ bias] [+ residual];   z = norm(y) weight + shift;   d = last(z) [+ residual]
//
// Blocks stay on their SM and walk over rows: weight and shift stay in registers, and the next rows
// are on their way while these are normalized. TEAM threads share a row. A thread holds ACCESSES
// chunks of 8 elements of each of LINES rows, and the chunks of a team lie one after the other, so
// that a team reads and writes whole lines of memory. Statistics are float32: the mean first, then
// squared distances from it.
//
// Macros, from norm_quantize.py:
//
//     COLUMNS      of a row, a multiple of 8
//     TEAM         a power of two up to 256
//     ACCESSES, LINES
//     SM_BLOCKS    of an SM, for whose registers there is room
//     INPUT_BYTES  of x: 2 bfloat16, 4 float32
//     NORM         0: none; 1: layer; 2: rms
//     SPAN         columns that share statistics: COLUMNS, or a power of two from 8 to 256
//     VECTORS      bits: 1 bias, 2 weight, 4 shift
//     VECTOR_ITEM  bytes of their elements: 4 float32, 2 bfloat16
//     RESIDUAL     0: none; 1: before the norm; 2: at the end
//     LAST         0: nothing; 1: relu; 2: hardswish; 3: silu; 4: gate sigmoid(z); 5: x0 z + x
//     OUT          bytes of an element: 2: bfloat16; 1: e4m3
//     OUT_SCALES   of e4m3: 1: one, given; 2: of rows; 3: of 128 of a row
#include "norm.cuh"
#include "ptx.cuh"

constexpr int THREADS = 256;
constexpr int CHUNK = 8;
constexpr int TEAMS = THREADS / TEAM;
constexpr int HELD = ACCESSES * CHUNK;
constexpr bool EXACT = COLUMNS == TEAM * HELD;
constexpr bool WHOLE = SPAN == COLUMNS;
// Under scales of rows a common factor of a row is one of its scale: no element is divided by it.
constexpr bool FOLDS = NORM == 2 && WHOLE && !(VECTORS & 6) && LAST == 0 && RESIDUAL != 2 &&
                       OUT == 1 && OUT_SCALES == 2;
static_assert(COLUMNS % CHUNK == 0 && COLUMNS <= TEAM * HELD, "a team holds a row");
static_assert(
    WHOLE || (SPAN % CHUNK == 0 && SPAN / CHUNK <= 32 && SPAN / CHUNK <= TEAM),
    "a warp holds a span");

constexpr int WORDS = CHUNK * INPUT_BYTES / 4;
using Raw = unsigned[LINES][ACCESSES][WORDS];

__device__ __forceinline__ float half_of(unsigned word, int which) {
    return __uint_as_float(which ? word & 0xffff0000u : word << 16);
}

template <int ITEM>
__device__ __forceinline__ void load_chunk(
    const void* from, long long place, float (&value)[CHUNK]) {
    const char* at = static_cast<const char*>(from) + place * ITEM;
    unsigned word[CHUNK * ITEM / 4];
#pragma unroll
    for (int i = 0; i < ITEM / 2; ++i) load_16_cached_bytes(at + i * 16, word + i * 4);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        value[i] = ITEM == 2 ? half_of(word[i / 2], i % 2) : __uint_as_float(word[i % (2 * ITEM)]);
    }
}

struct Sum {
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct Largest {
    static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

// Of neighbors, a power of two of threads of a warp; the same in all of them.
template <class Way, int NEIGHBORS>
__device__ __forceinline__ float of_neighbors(float value) {
#pragma unroll
    for (int distance = NEIGHBORS / 2; distance > 0; distance /= 2) {
        value = Way::of(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
}

// Of a team. `turn` says which of two places in shared memory: between two uses of one all threads
// meet, for the other.
template <class Way>
__device__ __forceinline__ float of_team(float value, int& turn) {
    value = of_neighbors < Way, TEAM<32 ? TEAM : 32>(value);
    if constexpr (TEAM > 32) {
        __shared__ float of_warps[2][THREADS / 32];
        of_warps[turn][threadIdx.x / 32] = value;
        __syncthreads();
        const int first = threadIdx.x / TEAM * (TEAM / 32);
        value = of_warps[turn][first];
#pragma unroll
        for (int warp = 1; warp < TEAM / 32; ++warp)
            value = Way::of(value, of_warps[turn][first + warp]);
        turn ^= 1;
    }
    return value;
}

// Of the spans that this thread has a part of: one of a whole row, or one of each chunk.
template <class Way>
__device__ __forceinline__ void of_spans(float (&value)[ACCESSES], int& turn) {
    if constexpr (WHOLE) {
        float all = value[0];
#pragma unroll
        for (int i = 1; i < ACCESSES; ++i) all = Way::of(all, value[i]);
        all = of_team<Way>(all, turn);
#pragma unroll
        for (int i = 0; i < ACCESSES; ++i) value[i] = all;
    } else {
#pragma unroll
        for (int i = 0; i < ACCESSES; ++i) value[i] = of_neighbors<Way, SPAN / CHUNK>(value[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, SM_BLOCKS) norm_quantize(
    const void* x, const void* bias, const void* weight, const void* shift,
    const unsigned short* residual, const unsigned short* first_given,
    const unsigned short* second_given, void* out, float* out_scale, int rows, float eps,
    long long x_stride, long long out_stride, long long out_scale_stride, long long residual_stride,
    long long first_stride, long long second_stride) {
    begin_in_turn();
    const int position = threadIdx.x % TEAM;
    const long long first_row =
        static_cast<long long>(blockIdx.x) * (TEAMS * LINES) + threadIdx.x / TEAM;
    const long long step = static_cast<long long>(gridDim.x) * (TEAMS * LINES);
    const auto fetch = [&](Raw& raw, long long row) {
#pragma unroll
        for (int line = 0; line < LINES; ++line, row += TEAMS) {
#pragma unroll
            for (int i = 0; i < ACCESSES; ++i) {
                const int column = (i * TEAM + position) * CHUNK;
                if ((EXACT || column < COLUMNS) && row < rows) {
                    const char* at =
                        static_cast<const char*>(x) + (row * x_stride + column) * INPUT_BYTES;
#pragma unroll
                    for (int j = 0; j < WORDS; j += 4) load_16_bytes(at + j * 4, &raw[line][i][j]);
                } else {
#pragma unroll
                    for (int j = 0; j < WORDS; ++j) raw[line][i][j] = 0;
                }
            }
        }
    };
    int turn = 0;
    Raw next;
    fetch(next, first_row);
    float factor[ACCESSES][CHUNK], more[ACCESSES][CHUNK];
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        const int column = (i * TEAM + position) * CHUNK;
        if (EXACT || column < COLUMNS) {
            if constexpr (VECTORS & 2) load_chunk<VECTOR_ITEM>(weight, column, factor[i]);
            if constexpr (VECTORS & 4) load_chunk<VECTOR_ITEM>(shift, column, more[i]);
        }
    }
    const float static_inverse = OUT == 1 && OUT_SCALES == 1 ? __frcp_rn(*out_scale) : 1.0f;
    for (long long start = first_row; start - threadIdx.x / TEAM < rows; start += step) {
        Raw raw;
#pragma unroll
        for (int i = 0; i < LINES * ACCESSES * WORDS; ++i) (&raw[0][0][0])[i] = (&next[0][0][0])[i];
        fetch(next, start + step);  // on its way while these rows are normalized
#pragma unroll
        for (int line = 0; line < LINES; ++line) {
            const long long row = start + line * TEAMS;
            float v[ACCESSES][CHUNK];
#pragma unroll
            for (int i = 0; i < ACCESSES; ++i) {
                const int column = (i * TEAM + position) * CHUNK;
                const bool inside = (EXACT || column < COLUMNS) && row < rows;
#pragma unroll
                for (int j = 0; j < CHUNK; ++j) {
                    v[i][j] = INPUT_BYTES == 2 ? half_of(raw[line][i][j / 2 % WORDS], j % 2)
                                               : __uint_as_float(raw[line][i][j % WORDS]);
                }
                if ((VECTORS & 1) && inside) {
                    float plus[CHUNK];
                    load_chunk<VECTOR_ITEM>(bias, column, plus);
#pragma unroll
                    for (int j = 0; j < CHUNK; ++j) v[i][j] += plus[j];
                }
                if (RESIDUAL == 1 && inside) {
                    float plus[CHUNK];
                    load_chunk<2>(residual, row * residual_stride + column, plus);
#pragma unroll
                    for (int j = 0; j < CHUNK; ++j) v[i][j] += plus[j];
                }
            }
            float mean[ACCESSES], rstd[ACCESSES];
#pragma unroll
            for (int i = 0; i < ACCESSES; ++i) {
                mean[i] = 0.0f;
                if constexpr (NORM == 1) {
                    mean[i] = ((v[i][0] + v[i][1]) + (v[i][2] + v[i][3])) +
                              ((v[i][4] + v[i][5]) + (v[i][6] + v[i][7]));
                }
            }
            if constexpr (NORM == 1) {
                of_spans<Sum>(mean, turn);
#pragma unroll
                for (int i = 0; i < ACCESSES; ++i) mean[i] *= 1.0f / SPAN;
            }
            if constexpr (NORM != 0) {
#pragma unroll
                for (int i = 0; i < ACCESSES; ++i) {
                    const int column = (i * TEAM + position) * CHUNK;
                    float left = 0.0f, right = 0.0f;
#pragma unroll
                    for (int j = 0; j < CHUNK; j += 2) {
                        const float one = v[i][j] - mean[i], other = v[i][j + 1] - mean[i];
                        left = fmaf(one, one, left);
                        right = fmaf(other, other, right);
                    }
                    rstd[i] = EXACT || column < COLUMNS ? left + right : 0.0f;
                }
                of_spans<Sum>(rstd, turn);
#pragma unroll
                for (int i = 0; i < ACCESSES; ++i)
                    rstd[i] = rsqrtf(fmaf(rstd[i], 1.0f / SPAN, eps));
            }
            float amax[ACCESSES];
#pragma unroll
            for (int i = 0; i < ACCESSES; ++i) {
                const int column = (i * TEAM + position) * CHUNK;
                const bool inside = (EXACT || column < COLUMNS) && row < rows;
                float first[CHUNK], second[CHUNK], last[CHUNK];
                if (LAST >= 4 && inside)
                    load_chunk<2>(first_given, row * first_stride + column, first);
                if (LAST == 5 && inside)
                    load_chunk<2>(second_given, row * second_stride + column, second);
                if (RESIDUAL == 2 && inside)
                    load_chunk<2>(residual, row * residual_stride + column, last);
                amax[i] = 0.0f;
#pragma unroll
                for (int j = 0; j < CHUNK; ++j) {
                    float z = v[i][j];
                    if constexpr (NORM == 1) z -= mean[i];
                    if constexpr (NORM != 0 && !FOLDS) z *= rstd[i];
                    if constexpr (VECTORS & 2) z *= factor[i][j];
                    if constexpr (VECTORS & 4) z += more[i][j];
                    if constexpr (LAST < 4) z = activated<LAST>(z);
                    if constexpr (LAST == 4) z = first[j] * sigmoid(z);
                    if constexpr (LAST == 5) z = fmaf(first[j], z, second[j]);
                    if constexpr (RESIDUAL == 2) z += last[j];
                    if (!inside) z = 0.0f;
                    v[i][j] = z;
                    if constexpr (OUT == 1 && OUT_SCALES != 1) {
                        // Infinity is NaN under a scale of its own, and no part of it.
                        if (fabsf(z) == INFINITE) v[i][j] = NOT_A_NUMBER;
                        amax[i] = fmaxf(amax[i], fabsf(v[i][j]));
                    }
                }
            }
            float inverse[ACCESSES];
#pragma unroll
            for (int i = 0; i < ACCESSES; ++i) inverse[i] = static_inverse;
            if constexpr (OUT == 1 && OUT_SCALES == 2) {
                float all = amax[0];
#pragma unroll
                for (int i = 1; i < ACCESSES; ++i) all = fmaxf(all, amax[i]);
                all = of_team<Largest>(all, turn);
                float scale = scale_for(all), by = __frcp_rn(scale);
                if constexpr (FOLDS) fold(rstd[0], all, scale, by);
                if (position == 0 && row < rows) out_scale[row] = scale;
#pragma unroll
                for (int i = 0; i < ACCESSES; ++i) inverse[i] = by;
            }
            if constexpr (OUT == 1 && OUT_SCALES == 3) {
#pragma unroll
                for (int i = 0; i < ACCESSES; ++i) {
                    const int column = (i * TEAM + position) * CHUNK;
                    const float scale =
                        scale_for(of_neighbors < Largest, TEAM<16 ? TEAM : 16>(amax[i]));
                    if (column % 128 == 0 && column < COLUMNS && row < rows) {
                        out_scale[column / 128 * out_scale_stride + row] = scale;
                    }
                    inverse[i] = __frcp_rn(scale);
                }
            }
#pragma unroll
            for (int i = 0; i < ACCESSES; ++i) {
                const int column = (i * TEAM + position) * CHUNK;
                if (!((EXACT || column < COLUMNS) && row < rows)) continue;
                char* to = static_cast<char*>(out) + (row * out_stride + column) * OUT;
                if constexpr (OUT == 2) {
                    uint4 eight;
                    eight.x = bfloat16_pair(v[i][0], v[i][1]);
                    eight.y = bfloat16_pair(v[i][2], v[i][3]);
                    eight.z = bfloat16_pair(v[i][4], v[i][5]);
                    eight.w = bfloat16_pair(v[i][6], v[i][7]);
                    *reinterpret_cast<uint4*>(to) = eight;
                } else {
                    uint2 eight;
                    const float by = inverse[i];
                    eight.x = encode_pair<false>(v[i][0] * by, v[i][1] * by) |
                              encode_pair<false>(v[i][2] * by, v[i][3] * by) << 16;
                    eight.y = encode_pair<false>(v[i][4] * by, v[i][5] * by) |
                              encode_pair<false>(v[i][6] * by, v[i][7] * by) << 16;
                    *reinterpret_cast<uint2*>(to) = eight;
                }
            }
        }
    }
}
