// FP8 scaled GEMM on Hopper: mainloop.cuh with the epilogues of recommendation models.
//
//     v = (sum_k a[m, k] b[n, k]) * sa * sb + bias[n]
//     v = activation(v), or x0 * v + x
//     d = v, d + v, or cast(v / out_scale)
//
// Rows of d are staged in shared memory, CHUNK_BYTES wide, and leave by bulk copies that the next
// tile's products overlap. Macros beside those of mainloop.cuh:
//
//     TENSOR_SCALES, ROW_SCALES   1: scales that are applied here
//     OUT           2: bfloat16, 4: float32, 1: e4m3 with one scale; in bytes
//     BIAS          0: none, 2: bfloat16, 4: float32
//     BIAS_PAIRS    1: N is even and the bias starts at a multiple of two elements' bytes
//     ACTIVATION    0: none, 1: relu, 2: hardswish, 3: silu
//     CROSS         1: x0 * v + x, both [m, N] bfloat16; 2: pairs of columns are 4-byte aligned
//     ACCUMULATE    1: adds to d, float32
//     CHUNK_BYTES, CHUNKS   of a staged row, and how many are staged at once
//     FOLD          rows of d that a bulk copy takes for one, of those that lie side by side: it takes
//                   as long over a short row as over a long one
//     DIRECT        1: d is written element by element, because its rows are not 16-byte aligned
//     SHARED_BYTES  what the launch asks for
//     SM_BLOCKS     of an SM
#include "mainloop.cuh"

constexpr int COLUMNS = BLOCK_N / PARTS;  // of a tile that this block finishes
constexpr int CHUNK_COLUMNS = CHUNK_BYTES / OUT;
constexpr int CHUNKS_OF_ROW = (COLUMNS + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS;
constexpr int SWIZZLE = FOLD == 1 && (CHUNK_BYTES == 128 || CHUNK_BYTES == 64 || CHUNK_BYTES == 32)
                            ? CHUNK_BYTES / 16 - 1 : 0;
constexpr int CHUNK_SIZE = (64 * CHUNK_BYTES + 1023) / 1024 * 1024;
constexpr int STAGING_BYTES = DIRECT ? 0 : CHUNKS * CHUNK_SIZE;  // of a warpgroup
constexpr int SMALL_AT = OPERAND_BYTES + WARPGROUPS * STAGING_BYTES;
constexpr int VECTORS_AT = (SMALL_AT + SMALL_BYTES + 15) / 16 * 16;
constexpr int VECTOR_BYTES = ROW_SCALES ? BLOCK_N * 4 : 0;  // of a warpgroup: b's scales

static_assert(VECTORS_AT + WARPGROUPS * VECTOR_BYTES <= SHARED_BYTES, "shared memory");
static_assert(PARTS == 1 || WARPGROUPS * ROWS * BLOCK_N * 4 <= OPERAND_BYTES, "partial sums");
static_assert(DIRECT || CHUNK_BYTES % 16 == 0, "boxes are rows of 16 bytes");
static_assert(FOLD == 1 || (!DIRECT && BATCH == 1 && BLOCK_N == N && CHUNKS_OF_ROW == 1), "folded");

struct Output {
    const TensorMap& map;
    const float* a_scale;
    const float* b_scale;
    const void* bias;
    const unsigned short* x0;
    const unsigned short* x;
    const float* out_scale;
    char* d;
    long long stride, x0_stride, x_stride;  // of rows, in elements
};

__device__ __forceinline__ float from_bfloat16(unsigned bits) {
    return __uint_as_float(bits << 16);
}

__device__ __forceinline__ unsigned bfloat16_pair(float first, float second) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ __forceinline__ float activated(float v) {
    if constexpr (ACTIVATION == 1) return v > 0.0f || v != v ? v : 0.0f;
    if constexpr (ACTIVATION == 2) {
        // NaN stays: fminf and fmaxf drop it, the factor v does not.
        return v * fminf(fmaxf(v + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f);
    }
    if constexpr (ACTIVATION == 3) return v / (1.0f + __expf(-v));
    return v;
}

// b's scales of a tile's columns, for one warpgroup. Read after the next barrier.
__device__ __forceinline__ void load_scales(unsigned scales, const Output& out, const Tile& tile) {
#pragma unroll
    for (int i = 0; i < BLOCK_N; i += 128) {
        const int column = i + threadIdx.x % 128, n = tile.column + column;
        if (column >= BLOCK_N) break;
        const float scale = n < N ? out.b_scale[tile.batch * N + n] : 1.0f;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(scales + column * 4), "f"(scale) : "memory");
    }
}

// Two neighbors of the bias, 0 beyond its end.
__device__ __forceinline__ float2 load_bias(const void* bias, int n) {
    if constexpr (BIAS == 2) {
        const unsigned short* from = static_cast<const unsigned short*>(bias) + n;
        if constexpr (BIAS_PAIRS) {
            const unsigned pair = n < N ? *reinterpret_cast<const unsigned*>(from) : 0;
            return make_float2(from_bfloat16(pair & 0xffff), from_bfloat16(pair >> 16));
        }
        return make_float2(n < N ? from_bfloat16(from[0]) : 0.0f,
                           n + 1 < N ? from_bfloat16(from[1]) : 0.0f);
    } else {
        const float* from = static_cast<const float*>(bias) + n;
        return make_float2(n < N ? from[0] : 0.0f, n + 1 < N ? from[1] : 0.0f);
    }
}

// What a thread needs of rows: scales of its two.
struct Rows {
    float scale[2];

    __device__ __forceinline__ void load(const Output& out, const Tile& tile, int row, int m) {
        if constexpr (TENSOR_SCALES) {
            scale[0] = scale[1] = *out.a_scale;
        } else if constexpr (ROW_SCALES) {
            const long long first = BATCH > 1 ? static_cast<long long>(tile.batch) * m : 0;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int r = row + half * 8;
                scale[half] = r < tile.end ? out.a_scale[first + r] : 0.0f;
            }
        }
    }
};

// v / s by Markstein's division, see quantize.cuh; infinities stay, and saturate.
__device__ __forceinline__ float quotient(float v, float scale, float inverse) {
    const float near = v * inverse;
    const float corrected = fmaf(fmaf(near, scale, -v), -inverse, near);
    return fabsf(near) < __uint_as_float(0x7f800000u) ? corrected : near;
}

// Two neighbors of a row, from sums to what is stored but for the cast. `column` counts from the
// tile's first, `row` within the product.
__device__ __forceinline__ float2 finished(
    float first, float second, const Output& out, const Tile& tile, unsigned scales,
    float row_scale, float b_scale, float out_scale, float inverse, int row, int column,
    int m) {
    float2 v = make_float2(first, second);
    if constexpr (TENSOR_SCALES || ROW_SCALES) {
        float2 scale = make_float2(b_scale, b_scale);
        if constexpr (ROW_SCALES) scale = load_shared_pair(scales + column * 4);
        v.x = v.x * row_scale * scale.x;
        v.y = v.y * row_scale * scale.y;
    }
    if constexpr (BIAS) {
        const float2 bias = load_bias(out.bias, tile.column + column);
        v.x += bias.x;
        v.y += bias.y;
    }
    if constexpr (CROSS) {
        const int n = tile.column + column;
        const long long r = row + (BATCH > 1 ? static_cast<long long>(tile.batch) * m : 0);
        const unsigned short* x0 = out.x0 + r * out.x0_stride + n;
        const unsigned short* x = out.x + r * out.x_stride + n;
        if constexpr (CROSS == 2) {
            if (row < tile.end && n < N) {
                const unsigned factor = *reinterpret_cast<const unsigned*>(x0);
                const unsigned term = *reinterpret_cast<const unsigned*>(x);
                v.x = fmaf(from_bfloat16(factor & 0xffff), v.x, from_bfloat16(term & 0xffff));
                v.y = fmaf(from_bfloat16(factor >> 16), v.y, from_bfloat16(term >> 16));
            }
        } else if (row < tile.end) {
            if (n < N) v.x = fmaf(from_bfloat16(x0[0]), v.x, from_bfloat16(x[0]));
            if (n + 1 < N) v.y = fmaf(from_bfloat16(x0[1]), v.y, from_bfloat16(x[1]));
        }
    } else {
        v.x = activated(v.x);
        v.y = activated(v.y);
    }
    if constexpr (OUT == 1) {
        v.x = quotient(v.x, out_scale, inverse);
        v.y = quotient(v.y, out_scale, inverse);
    }
    return v;
}

// Writes a pair where bulk copies cannot.
__device__ __forceinline__ void store_direct(
    const Output& out, const Tile& tile, float2 v, int row, int column, int m) {
    const int n = tile.column + column;
    if (row >= tile.end || n >= N) return;
    const long long r = row + (BATCH > 1 ? static_cast<long long>(tile.batch) * m : 0);
    char* to = out.d + (r * out.stride + n) * OUT;
    const bool both = n + 1 < N;
    if constexpr (OUT == 4) {
        float* d = reinterpret_cast<float*>(to);
        if constexpr (ACCUMULATE) {
            d[0] += v.x;
            if (both) d[1] += v.y;
        } else {
            d[0] = v.x;
            if (both) d[1] = v.y;
        }
    } else if constexpr (OUT == 2) {
        const unsigned pair = bfloat16_pair(v.x, v.y);
        reinterpret_cast<unsigned short*>(to)[0] = pair;
        if (both) reinterpret_cast<unsigned short*>(to)[1] = pair >> 16;
    } else {
        const unsigned pair = encode_pair<false>(v.x, v.y);
        to[0] = pair;
        if (both) to[1] = pair >> 8;
    }
}

__device__ __forceinline__ unsigned swizzled(unsigned offset) {
    return SWIZZLE ? offset ^ (offset >> 7 & SWIZZLE) << 4 : offset;
}

// Writes a warpgroup's sums of columns `from` to `from + COLUMNS` of its tile. `row` is the tile's
// first of this warpgroup.
__device__ __forceinline__ void finish(
    float (&sums)[COLUMNS / 2], const Output& out, const Tile& tile, const Rows& rows,
    unsigned staging, unsigned scales, int warpgroup, int row, int from, int m) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool elected = threadIdx.x % 128 == 0;
    const float b_scale = TENSOR_SCALES ? *out.b_scale : 1.0f;
    const float out_scale = OUT == 1 ? *out.out_scale : 1.0f;
    const float inverse = OUT == 1 ? __frcp_rn(out_scale) : 1.0f;
    const int of_thread = row + warp * 16 + lane / 4;
    const int pair = lane % 4 * 2;
    const bool direct = DIRECT || (BATCH == 0 && row + ROWS > tile.end);
    if (direct) {
        if constexpr (DIRECT || BATCH == 0) {
            if constexpr (ROW_SCALES) synchronize_warpgroup(warpgroup);
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i += 2) {
                const int half = i / 2 % 2, r = of_thread + half * 8;
                const int column = from + i / 4 * 8 + pair;
                const float2 v =
                    finished(sums[i], sums[i + 1], out, tile, scales, rows.scale[half], b_scale,
                             out_scale, inverse, r, column, m);
                store_direct(out, tile, v, r, column, m);
            }
            // The scales may be overwritten.
            if constexpr (ROW_SCALES) synchronize_warpgroup(warpgroup);
        }
        return;
    }
    if constexpr (!DIRECT) {
#pragma unroll
        for (int start = 0; start < CHUNKS_OF_ROW; start += CHUNKS) {
            if (elected) wait_until_stores_have_read();
            synchronize_warpgroup(warpgroup);
#pragma unroll
            for (int chunk = start; chunk < min(start + CHUNKS, CHUNKS_OF_ROW); ++chunk) {
                const unsigned buffer = staging + (chunk - start) * CHUNK_SIZE;
                constexpr int GROUPS = CHUNK_COLUMNS / 8;  // of 8 columns
                unsigned blocks[2 * GROUPS];
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int i = (chunk * GROUPS + group) * 4 + half * 2;
                        const int r = of_thread + half * 8;
                        const int inside = group * 8 + pair;
                        const int column = from + chunk * CHUNK_COLUMNS + inside;
                        const float2 v =
                            finished(sums[i], sums[i + 1], out, tile, scales, rows.scale[half],
                                     b_scale, out_scale, inverse, r, column, m);
                        const unsigned offset =
                            (warp * 16 + lane / 4 + half * 8) * CHUNK_BYTES + inside * OUT;
                        if constexpr (OUT == 2) {
                            blocks[group * 2 + half] = bfloat16_pair(v.x, v.y);
                        } else if constexpr (OUT == 4) {
                            asm volatile("st.shared.v2.f32 [%0], {%1, %2};"
                                         ::"r"(buffer + swizzled(offset)), "f"(v.x), "f"(v.y)
                                         : "memory");
                        } else {
                            asm volatile("st.shared.u16 [%0], %1;"
                                         ::"r"(buffer + swizzled(offset)),
                                         "h"(static_cast<unsigned short>(encode_pair<false>(v.x, v.y)))
                                         : "memory");
                        }
                    }
                }
                if constexpr (OUT == 2) {
                    const int in_warp = warp * 16 + lane % 16;
#pragma unroll
                    for (int group = 0; group + 1 < GROUPS; group += 2) {
                        const unsigned four[4] = {blocks[group * 2], blocks[group * 2 + 1],
                                                  blocks[group * 2 + 2], blocks[group * 2 + 3]};
                        const unsigned offset =
                            in_warp * CHUNK_BYTES + (group + lane / 16) * 16;
                        store_blocks(buffer + swizzled(offset), four);
                    }
                    if constexpr (GROUPS % 2) {
                        const unsigned two[2] = {blocks[GROUPS * 2 - 2], blocks[GROUPS * 2 - 1]};
                        const unsigned offset = in_warp * CHUNK_BYTES + (GROUPS - 1) * 16;
                        store_blocks(buffer + swizzled(offset), two);
                    }
                }
            }
            publish_shared_memory();
            synchronize_warpgroup(warpgroup);
            if (elected) {
#pragma unroll
                for (int chunk = start; chunk < min(start + CHUNKS, CHUNKS_OF_ROW); ++chunk) {
                    const unsigned buffer = staging + (chunk - start) * CHUNK_SIZE;
                    const int x = tile.column + from + chunk * CHUNK_COLUMNS;
                    if (x >= N || row >= tile.end) break;
                    if constexpr (BATCH > 1) {
                        if constexpr (ACCUMULATE) {
                            add_box(out.map, buffer, x, row, tile.batch);
                        } else {
                            store_box(out.map, buffer, x, row, tile.batch);
                        }
                    } else if constexpr (ACCUMULATE) {
                        add_box(out.map, buffer, x, row / FOLD);
                    } else {
                        store_box(out.map, buffer, x, row / FOLD);
                    }
                }
                commit_stores();
            }
        }
    }
}

// Of a tile whose K is shared by a cluster: every block adds up, in the order of blocks, the columns
// that it finishes.
__device__ __forceinline__ void add_parts(
    Sums& sums, float (&total)[COLUMNS / 2], const Memory& memory, int warpgroup) {
    constexpr int GROUPS = BLOCK_N / 8, TAKEN = COLUMNS / 8;
    const unsigned thread = threadIdx.x % 128;
    const unsigned base = memory.base + warpgroup * (ROWS * BLOCK_N * 4) + thread * 16;
    asm volatile("bar.sync 8, %0;" ::"n"(MATH_THREADS) : "memory");  // all stages are read
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const float* v = &sums[group * 4];
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                     ::"r"(base + group * 2048), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                     : "memory");
    }
    synchronize_cluster();
    const int first = rank_in_cluster() * TAKEN;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const unsigned other = address_in(base, part);
#pragma unroll
        for (int group = 0; group < TAKEN; ++group) {
            const float4 v = load_from_cluster(other + (first + group) * 2048);
            float* to = &total[group * 4];
            to[0] = part ? to[0] + v.x : v.x;
            to[1] = part ? to[1] + v.y : v.y;
            to[2] = part ? to[2] + v.z : v.z;
            to[3] = part ? to[3] + v.w : v.w;
        }
    }
}

// Parameters cannot be arrays: one for each slice of a.
#define SLICES_1(name) , const __grid_constant__ TensorMap name##_0
#define SLICES_2(name) SLICES_1(name) , const __grid_constant__ TensorMap name##_1
#define SLICES_3(name) SLICES_2(name) , const __grid_constant__ TensorMap name##_2
#define SLICES_4(name) SLICES_3(name) , const __grid_constant__ TensorMap name##_3
#define SLICES_5(name) SLICES_4(name) , const __grid_constant__ TensorMap name##_4
#define SLICES_6(name) SLICES_5(name) , const __grid_constant__ TensorMap name##_5
#define SLICES_7(name) SLICES_6(name) , const __grid_constant__ TensorMap name##_6
#define SLICES_8(name) SLICES_7(name) , const __grid_constant__ TensorMap name##_7
#define ADDRESSES_1(name) &name##_0
#define ADDRESSES_2(name) ADDRESSES_1(name), &name##_1
#define ADDRESSES_3(name) ADDRESSES_2(name), &name##_2
#define ADDRESSES_4(name) ADDRESSES_3(name), &name##_3
#define ADDRESSES_5(name) ADDRESSES_4(name), &name##_4
#define ADDRESSES_6(name) ADDRESSES_5(name), &name##_5
#define ADDRESSES_7(name) ADDRESSES_6(name), &name##_6
#define ADDRESSES_8(name) ADDRESSES_7(name), &name##_7
#define PASTED_(a, b) a##b
#define PASTED(a, b) PASTED_(a, b)
#define SLICES_OF_A(name) PASTED(SLICES_, A_SLICES)(name)
#define ADDRESSES_OF_A(name) PASTED(ADDRESSES_, A_SLICES)(name)

extern "C" __global__ void __launch_bounds__(THREADS, SM_BLOCKS) scaled_gemm(
    const float* a_scale, const float* b_scale, char* d,
#if BIAS
    const void* bias,
#endif
#if CROSS
    const unsigned short* x0, const unsigned short* x,
#endif
#if OUT == 1
    const float* out_scale,
#endif
#if BATCH == 0
    const int* offsets,
#endif
    int m, long long stride,
#if CROSS
    long long x0_stride, long long x_stride,
#endif
#if BATCH != 1
    int groups,
#endif
#if SCALES == 1
    int block_scale_step, int block_scale_column,
#endif
    const __grid_constant__ TensorMap b_map
#if !DIRECT
    , const __grid_constant__ TensorMap d_map
#endif
#if SCALES == 2
    , const __grid_constant__ TensorMap b_scale_map
#endif
    SLICES_OF_A(a_map)
#if SCALES
    SLICES_OF_A(a_scale_map)
#endif
) {
    extern __shared__ char shared[];
    const unsigned base = shared_address(shared);
    if (base % 1024) asm volatile("trap;");  // swizzles are counted from there
    const Memory memory{base, base + SMALL_AT};
    const Operands operands{
        {ADDRESSES_OF_A(a_map)},
#if SCALES
        {ADDRESSES_OF_A(a_scale_map)},
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
#if BATCH == 0
        offsets, m, groups
#elif BATCH > 1
        nullptr, m, groups
#else
        nullptr, m, 1
#endif
    };
    const Output out{
#if DIRECT
        b_map,
#else
        d_map,
#endif
        a_scale, b_scale,
#if BIAS
        bias,
#else
        nullptr,
#endif
#if CROSS
        x0, x,
#else
        nullptr, nullptr,
#endif
#if OUT == 1
        out_scale,
#else
        nullptr,
#endif
        d, stride,
#if CROSS
        x0_stride, x_stride
#else
        0, 0
#endif
    };
    if (threadIdx.x == MATH_THREADS) initialize(memory, operands);
    if constexpr (PARTS > 1) {
        synchronize_cluster();
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
        const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be uniform
        const int pipeline = RESIDENT ? warpgroup : 0;
        const int inside = RESIDENT ? 0 : warpgroup;  // of the pipeline's tile
        const unsigned staging = base + OPERAND_BYTES + warpgroup * STAGING_BYTES;
        const unsigned scales = base + VECTORS_AT + warpgroup * VECTOR_BYTES;
        Walk walk(operands, pipeline);
        Place place;
        Tile tile;
        Sums sums;
        bool first = true;
        while (walk.next(tile)) {
            const int row = tile.row + inside * ROWS;
            Rows rows;
            rows.load(out, tile, row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, m);
            if constexpr (ROW_SCALES) {
                if (!RESIDENT || first) load_scales(scales, out, tile);
            }
            Multiplier{memory, operands, tile, pipeline, inside, first}.multiply_tile(sums, place);
            first = false;
#if PARTS > 1
            float part[COLUMNS / 2];
            add_parts(sums, part, memory, warpgroup);
#else
            float (&part)[COLUMNS / 2] = sums;
#endif
            finish(part, out, tile, rows, staging, scales, warpgroup, row,
                   PARTS > 1 ? rank_in_cluster() * COLUMNS : 0, m);
        }
        if (threadIdx.x % 128 == 0) wait_until_stores_have_read();
        __syncwarp();
    }
    // Others may still read this block's shared memory, or arrive at its barriers.
    if constexpr (PARTS > 1) synchronize_cluster();
}
