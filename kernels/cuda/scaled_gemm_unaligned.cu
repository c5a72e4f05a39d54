// The scaled GEMM of scaled_gemm.cu for outputs whose rows are not 16-byte aligned.
//
// Bulk copies cannot write such rows, and scaled_gemm.cu then writes element by element. Here each
// warp stages its 16 rows of a tile in shared memory, as for bulk copies, and writes them in pieces
// of 16 bytes (unaligned_rows.cuh). No warp waits for another but for b's scales.
//
// Macros are those of scaled_gemm.cu with DIRECT of 1, so that it takes no map of the output, and with
// CHUNK_BYTES and CHUNKS as if DIRECT were 0. SHARED_BYTES includes the staged rows. And:
//
//     DENSE         1: a tile has whole rows, and they lie side by side: 16 rows leave as one
struct Output;
struct Tile;
struct Rows;

// The kernel in scaled_gemm.cu calls `finish` with a Tile and Rows that are not const, so it prefers
// this overload to its own.
__device__ void finish(
    float (&sums)[BLOCK_N / PARTS / 2], const Output& out, Tile& tile, Rows& rows, unsigned staging,
    unsigned scales, int warpgroup, int row, int from, int m);

#include "scaled_gemm.cu"

__device__ __forceinline__ void load_shared_piece(unsigned address, unsigned* word) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(address));
}

template <int ITEM>
__device__ __forceinline__ unsigned load_shared_element(unsigned address) {
    unsigned value;
    if constexpr (ITEM == 2) {
        unsigned short half;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address));
        value = half;
    } else {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
    }
    return value;
}

template <int ITEM>
__device__ __forceinline__ void store_shared_element(unsigned address, unsigned value) {
    if constexpr (ITEM == 2) {
        asm volatile("st.shared.u16 [%0], %1;"
                     ::"r"(address), "h"(static_cast<unsigned short>(value)) : "memory");
    } else {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
    }
}

__device__ __forceinline__ void store_piece(char* to, const unsigned (&word)[4], bool there) {
    asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %5, 0;\n"
                 "@there st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}"
                 ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]),
                 "r"(static_cast<unsigned>(there)) : "memory");
}

template <int ITEM>
__device__ __forceinline__ void store_element(char* to, unsigned value, bool there) {
    if constexpr (ITEM == 2) {
        asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n"
                     "@there st.global.u16 [%0], %1;\n}"
                     ::"l"(to), "h"(static_cast<unsigned short>(value)),
                     "r"(static_cast<unsigned>(there)) : "memory");
    } else {
        asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n"
                     "@there st.global.u32 [%0], %1;\n}"
                     ::"l"(to), "r"(value), "r"(static_cast<unsigned>(there)) : "memory");
    }
}

#include "unaligned_rows.cuh"

constexpr int WARP_ROWS = 16;
constexpr int STAGED_BYTES = CHUNKS * CHUNK_SIZE;  // of a warpgroup
constexpr int STAGED_AT = VECTORS_AT + WARPGROUPS * VECTOR_BYTES;

static_assert(DIRECT && !ACCUMULATE && FOLD == 1 && (OUT == 2 || OUT == 4), "other outputs");
static_assert(STAGED_AT + WARPGROUPS * STAGED_BYTES <= SHARED_BYTES, "shared memory of rows");
static_assert(!DENSE || (BLOCK_N >= N && PARTS == 1 && N * OUT <= CHUNK_BYTES), "whole rows");

// Rows as chunks, permuted as bulk copies would read them: free of conflicts of banks.
struct StagedChunks {
    unsigned buffer;
    int first;  // row of the warp

    __device__ __forceinline__ unsigned at(int row, int piece) const {
        constexpr int OF_CHUNK = CHUNK_BYTES / PIECE;
        const int offset = (first + row) * CHUNK_BYTES + piece % OF_CHUNK * PIECE;
        return buffer + piece / OF_CHUNK * CHUNK_SIZE + swizzled(offset);
    }
};

// Rows side by side.
struct StagedLine {
    unsigned buffer;

    __device__ __forceinline__ unsigned at(int, int piece) const { return buffer + piece * PIECE; }
};

// Two neighbors of a row, as they are stored.
__device__ __forceinline__ void stage_pair(unsigned to, float2 v, bool first, bool second) {
    if constexpr (OUT == 2) {
        const unsigned pair = bfloat16_pair(v.x, v.y);
        if (first) store_shared_element<OUT>(to, pair);
        if (second) store_shared_element<OUT>(to + OUT, pair >> 16);
    } else {
        if (first) store_shared_element<OUT>(to, __float_as_uint(v.x));
        if (second) store_shared_element<OUT>(to + OUT, __float_as_uint(v.y));
    }
}

// The same, from which the compiler cannot derive addresses before products fill the registers.
__device__ __forceinline__ unsigned afresh(unsigned lane) {
    asm volatile("" : "+r"(lane));
    return lane;
}

// Takes the place of scaled_gemm.cu's, with the same arguments.
__device__ __forceinline__ void finish(
    float (&sums)[BLOCK_N / PARTS / 2], const Output& out, Tile& tile, Rows& rows, unsigned staging,
    unsigned scales, int warpgroup, int row, int from, int m) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const float b_scale = TENSOR_SCALES ? *out.b_scale : 1.0f;
    const int first = row + warp * WARP_ROWS;  // of the warp
    const int pair = lane % 4 * 2;
    const unsigned buffer = staging - OPERAND_BYTES + STAGED_AT + warpgroup * STAGED_BYTES;
    const auto finished_pair = [&](int i, int half, int column) {
        return finished(sums[i], sums[i + 1], out, tile, scales, rows.scale[half], b_scale, 1.0f, 1.0f,
                        first + lane / 4 + half * 8, column, m);
    };
    // Where the warp's rows go.
    const auto place_of = [&](int columns_before) {
        const long long r = first + (BATCH > 1 ? static_cast<long long>(tile.batch) * m : 0);
        return out.d + (r * out.stride + tile.column + from + columns_before) * OUT;
    };
    // Others have written b's scales; lanes have read what they staged before.
    if constexpr (ROW_SCALES) synchronize_warpgroup(warpgroup);
    if constexpr (DENSE) {
        const unsigned of_warp = buffer + warp * WARP_ROWS * CHUNK_BYTES;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i += 2) {
            const int half = i / 2 % 2, column = i / 4 * 8 + pair;
            const float2 v = finished_pair(i, half, column);
            const unsigned to = of_warp + ((lane / 4 + half * 8) * N + column) * OUT;
            stage_pair(to, v, column < N, column + 1 < N);
        }
        if constexpr (ROW_SCALES) synchronize_warpgroup(warpgroup);  // they may be overwritten
        __syncwarp();
        const int there = max(0, min(WARP_ROWS, tile.end - first));
        copy_rows<OUT, 1, WARP_ROWS * N * OUT / PIECE>(
            StagedLine{of_warp}, place_of(0), 0, there > 0, there * N * OUT, afresh(lane));
        return;
    }
#pragma unroll
    for (int start = 0; start < CHUNKS_OF_ROW; start += CHUNKS) {
        constexpr int GROUPS = CHUNK_COLUMNS / 8;  // of 8 columns
        const int end = min(start + CHUNKS, CHUNKS_OF_ROW);
        __syncwarp();
#pragma unroll
        for (int chunk = start; chunk < end; ++chunk) {
            const unsigned to = buffer + (chunk - start) * CHUNK_SIZE;
            unsigned blocks[2 * GROUPS];
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int i = (chunk * GROUPS + group) * 4 + half * 2;
                    const int inside = group * 8 + pair;
                    const float2 v = finished_pair(i, half, from + chunk * CHUNK_COLUMNS + inside);
                    const int r = warp * WARP_ROWS + lane / 4 + half * 8;
                    if constexpr (OUT == 2) {
                        blocks[group * 2 + half] = bfloat16_pair(v.x, v.y);
                    } else {
                        asm volatile("st.shared.v2.f32 [%0], {%1, %2};"
                                     ::"r"(to + swizzled(r * CHUNK_BYTES + inside * OUT)),
                                     "f"(v.x), "f"(v.y) : "memory");
                    }
                }
            }
            if constexpr (OUT == 2) {
                const int r = warp * WARP_ROWS + lane % 16;
#pragma unroll
                for (int group = 0; group + 1 < GROUPS; group += 2) {
                    const unsigned four[4] = {blocks[group * 2], blocks[group * 2 + 1],
                                              blocks[group * 2 + 2], blocks[group * 2 + 3]};
                    const int offset = r * CHUNK_BYTES + (group + lane / 16) * PIECE;
                    store_blocks(to + swizzled(offset), four);
                }
                if constexpr (GROUPS % 2) {
                    const unsigned two[2] = {blocks[GROUPS * 2 - 2], blocks[GROUPS * 2 - 1]};
                    store_blocks(to + swizzled(r * CHUNK_BYTES + (GROUPS - 1) * PIECE), two);
                }
            }
        }
        if constexpr (ROW_SCALES) {
            if (end == CHUNKS_OF_ROW) synchronize_warpgroup(warpgroup);  // they may be overwritten
        }
        __syncwarp();
        const int before = start * CHUNK_COLUMNS;
        const int columns = min(N - tile.column - from, COLUMNS) - before;
        const int bytes = min(columns, CHUNKS * CHUNK_COLUMNS) * OUT;
        if (bytes <= 0) continue;
        copy_rows<OUT, WARP_ROWS, CHUNKS * CHUNK_BYTES / PIECE>(
            StagedChunks{buffer, warp * WARP_ROWS}, place_of(before), out.stride * OUT,
            max(0, min(WARP_ROWS, tile.end - first)), bytes, afresh(lane));
    }
}
