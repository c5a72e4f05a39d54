// Quantize tiles of 128 x 128 to FP8 with one read, as they lie, transposed, or both; byte for byte
// as lokakern.numerics.
//
//     s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(y / s))
//
//     y:          [rows, columns], bfloat16 or float32, rows y_stride elements apart
//     data:       [rows, columns], FP8 bytes, rows data_stride bytes apart
//     across:     [columns, rows], FP8 bytes, rows across_stride bytes apart: the transpose
//     scale:      float32; for SCALES of
//                 0  a group: of row r and 128 columns g at scale[g * scale_stride + r]
//                 1  a block: of 128 rows h and 128 columns g at scale[h * scale_stride + g]
//                 2  a row: of row r at scale[r], made before
//                 3  the tensor: at scale[0], made before
//     across_scale: the same of the transpose; of the tensor a copy
//     amax:       float32 bits, raised to the largest finite magnitude of y if DELAYED
//     parts:      float32 [tiles of rows, columns], the sums of each tile's columns if SUMS
//
// A thread holds 8 rows of a chunk, so that it has 8 neighbors both ways. What goes across passes
// through shared memory, 8 bytes of a column at a time, permuted so that no bank has two at once.
// Macros besides those of quantize.cuh, set by quantize_tile.py:
//
//     SCALES
//     ALONG, ACROSS  1 to write data, across
//     ACROSS_WHOLE   1 where every row of across starts at a multiple of 16 bytes
//     GATHER         1 to write nothing but amax of rows and columns, into the places of scales of
//                    rows, which were 0: their bits order as the values do
//     ANY_SCALE      1 for a scale that amax does not bound
//     DELAYED        1 to raise amax
//     SUMS           1 to write parts, for quantize_sums.cu
//     RAGGED         1 where columns are no multiple of a chunk
#include "quantize.cuh"
#include "quantize_sums.cuh"

constexpr int SIDE = 128, HELD = 8;
constexpr int CHUNKS = SIDE / CHUNK;  // of a row of a tile
constexpr int THREADS = CHUNKS * (SIDE / HELD);
constexpr int WARPS = THREADS / 32, BANDS = SIDE / HELD;
constexpr bool OF_GROUP = SCALES == 0, OF_BLOCK = SCALES == 1, OF_ROW = SCALES == 2;
constexpr bool BY_ROW = ALONG && (OF_GROUP || GATHER), BY_COLUMN = ACROSS && (OF_GROUP || GATHER);
constexpr bool BY_TILE = !GATHER && (OF_BLOCK || DELAYED);

struct alignas(16) Piece {
    unsigned word[4];
};

template <class Bounded, class Any, bool ANY>
struct Chosen {
    using Division = Bounded;
};
template <class Bounded, class Any>
struct Chosen<Bounded, Any, true> {
    using Division = Any;
};
using Division = Chosen<Divisor, AnyDivisor, ANY_SCALE != 0>::Division;

// Finite magnitudes of a word: of both halves, 0 for what is not finite, or of the one it is. A
// half of 0x7f80 or more carries into its highest bit.
__device__ __forceinline__ unsigned finite_magnitudes(unsigned word) {
    if constexpr (HALVES) {
        const unsigned size = word & 0x7fff7fffu;
        const unsigned over = (size + 0x00800080u & 0x80008000u) >> 15;
        return size & ~(over * 0xffffu);
    } else {
        const unsigned size = word & 0x7fffffffu;
        return size < INFINITY_BITS ? size : 0;
    }
}

__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    return HALVES ? larger_halves(a, b) : max(a, b);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_tile(
    const char* y, unsigned char* data, unsigned char* across, float* scale, float* across_scale,
    unsigned* amax, float* parts, int rows, int columns, long long y_stride, long long data_stride,
    long long across_stride, long long scale_stride, long long across_scale_stride) {
    __shared__ unsigned of_columns[WARPS][SIDE / PER_WORD];
    __shared__ float column_scale[SIDE];
    __shared__ unsigned of_warps[WARPS];
    __shared__ Piece of_bands[SUMS ? BANDS : 1][SIDE / 4];  // sums of columns
    __shared__ Piece turned[ACROSS && !GATHER ? SIDE * SIDE / 16 : 1];

    const int tiles = (columns + SIDE - 1) / SIDE;  // along a row
    const long long tile_row = blockIdx.x / tiles;
    const int tile_column = blockIdx.x % tiles;
    const int chunk = threadIdx.x % CHUNKS, band = threadIdx.x / CHUNKS;  // of 8 rows
    const long long row = tile_row * SIDE + band * HELD;
    const int column = tile_column * SIDE + chunk * CHUNK;
    const int rows_left = static_cast<int>(min(rows - row, static_cast<long long>(HELD)));
    const char* from = y + (row * y_stride + column) * INPUT_BYTES;
    begin_in_turn();

    unsigned word[HELD][4];
    {
        unsigned words[HELD][FETCHED];
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            fetch(from + i * y_stride * INPUT_BYTES, i < rows_left ? columns - column : 0, words[i]);
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            settle<RAGGED>(from + i * y_stride * INPUT_BYTES, i < rows_left ? columns - column : 0,
                           words[i], word[i]);
        }
    }

    if constexpr (SUMS) {  // rows beyond the end are 0
#pragma unroll
        for (int j = 0; j < CHUNK; j += 4) {
            Piece sums;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float value[HELD];
#pragma unroll
                for (int i = 0; i < HELD; ++i) value[i] = __uint_as_float(element(word[i], j + k));
                sums.word[k] = __float_as_uint(sum_by_twos<HELD>(value));
            }
            of_bands[band][(chunk * CHUNK + j) / 4] = sums;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < HELD; ++i) {  // 64 registers, else 96: the values would be kept
#pragma unroll
            for (int j = 0; j < 4; ++j) forget(word[i][j]);
        }
        const int mine = tile_column * SIDE + threadIdx.x;
        if (threadIdx.x < SIDE && mine < columns) {
            float value[BANDS];
#pragma unroll
            for (int i = 0; i < BANDS; ++i) {
                value[i] = __uint_as_float(of_bands[i][threadIdx.x / 4].word[threadIdx.x % 4]);
            }
            parts[tile_row * columns + mine] = sum_by_twos<BANDS>(value);
        }
    }

    // Largest magnitudes of the rows and columns of the tile.
    unsigned of_row[HELD] = {}, of_column[4] = {};
    if constexpr (BY_ROW || BY_COLUMN || BY_TILE) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const unsigned size = finite_magnitudes(word[i][j]);
                of_row[i] = larger(of_row[i], size);
                of_column[j] = larger(of_column[j], size);
            }
            if constexpr (HALVES) of_row[i] = max(of_row[i] << 16, of_row[i] & 0xffff0000u);
        }
    }
    if constexpr (BY_ROW) {
        if constexpr (HALVES) {  // two rows in a word
#pragma unroll
            for (int i = 0; i < HELD; i += 2) {
                unsigned two = of_row[i] >> 16 | of_row[i + 1];
#pragma unroll
                for (int distance = CHUNKS / 2; distance > 0; distance /= 2) {
                    two = larger_halves(two, value_across(two, distance));
                }
                of_row[i] = two << 16;
                of_row[i + 1] = two & 0xffff0000u;
            }
        } else {
#pragma unroll
            for (int i = 0; i < HELD; ++i) of_row[i] = largest_of_warp(of_row[i]);
        }
    }
    if constexpr (BY_COLUMN) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if constexpr (HALVES) {  // a warp has two bands
                of_column[j] = larger_halves(of_column[j], value_across(of_column[j], CHUNKS));
            }
            of_columns[threadIdx.x / 32][chunk * 4 + j] = of_column[j];
        }
    }
    if constexpr (BY_TILE) {
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < HELD; ++i) largest = max(largest, of_row[i]);
        largest = largest_of_warp(largest);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    }
    if constexpr (BY_COLUMN || BY_TILE) __syncthreads();

    if constexpr (GATHER) {
        if (ALONG && chunk == 0) {
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                if (i < rows_left) raise_to(reinterpret_cast<unsigned*>(scale) + row + i, of_row[i]);
            }
        }
    }
    if constexpr (BY_COLUMN) {
        const int mine = tile_column * SIDE + threadIdx.x;
        if (threadIdx.x < SIDE) {
            unsigned largest = 0;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) {
                largest = larger(largest, of_columns[warp][threadIdx.x / PER_WORD]);
            }
            if constexpr (HALVES) {
                largest = threadIdx.x % 2 == 0 ? largest << 16 : largest & 0xffff0000u;
            }
            if constexpr (GATHER) {
                if (mine < columns) {
                    raise_to(reinterpret_cast<unsigned*>(across_scale) + mine, largest);
                }
            } else {
                const float decode = decode_scale(largest);
                column_scale[threadIdx.x] = decode;
                if (mine < columns) across_scale[tile_row * across_scale_stride + mine] = decode;
            }
        }
        if constexpr (!GATHER) __syncthreads();
    }
    if constexpr (GATHER) return;

    float shared_scale = 1.0f;
    if constexpr (BY_TILE) {
        unsigned largest = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) largest = max(largest, of_warps[warp]);
        if constexpr (OF_BLOCK) shared_scale = decode_scale(largest);
        if (threadIdx.x == 0) {
            if constexpr (DELAYED) raise_to(amax, largest);
            if constexpr (OF_BLOCK && ALONG) {
                scale[tile_row * scale_stride + tile_column] = shared_scale;
            }
            if constexpr (OF_BLOCK && ACROSS) {
                across_scale[tile_column * across_scale_stride + tile_row] = shared_scale;
            }
        }
    }
    if constexpr (SCALES == 3) {
        shared_scale = *scale;
        if (ACROSS && ALONG && blockIdx.x == 0 && threadIdx.x == 0) *across_scale = shared_scale;
    }

    if constexpr (ALONG) {
        unsigned char* to = data + row * data_stride + column;
        const Division one(shared_scale);
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if (i >= rows_left) continue;
            float decode = shared_scale;
            if constexpr (OF_GROUP) decode = decode_scale(of_row[i]);
            if constexpr (OF_ROW) decode = scale[row + i];
            unsigned bytes[2];
            cast(word[i], OF_GROUP || OF_ROW ? Division(decode) : one, bytes);
            write<RAGGED>(bytes, to + i * data_stride, columns - column);
            if constexpr (OF_GROUP) {
                if (chunk == 0) scale[tile_column * scale_stride + row + i] = decode;
            }
        }
    }

    if constexpr (ACROSS) {
        unsigned long long* shared = reinterpret_cast<unsigned long long*>(turned);
        const Division one(shared_scale);
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            float decode = shared_scale;
            if constexpr (OF_GROUP) decode = column_scale[chunk * CHUNK + j];
            if constexpr (OF_ROW) decode = j < columns - column ? across_scale[column + j] : 1.0f;
            const Division divisor = OF_GROUP || OF_ROW ? Division(decode) : one;
            unsigned bytes[2];
#pragma unroll
            for (int i = 0; i < HELD; i += 4) {
                bytes[i / 4] = encode_pair<IS_E5M2>(divisor.divide(element(word[i], j)),
                                                    divisor.divide(element(word[i + 1], j))) |
                               encode_pair<IS_E5M2>(divisor.divide(element(word[i + 2], j)),
                                                    divisor.divide(element(word[i + 3], j))) << 16;
            }
            shared[(chunk * CHUNK + j) * (SIDE / HELD) + (band ^ chunk % 16)] =
                bytes[0] | static_cast<unsigned long long>(bytes[1]) << 32;
        }
        __syncthreads();
#pragma unroll
        for (int place = threadIdx.x; place < SIDE * SIDE / 16; place += THREADS) {
            const int from_column = place / 8, two = place % 8 * 2;  // bands
            const int permuted = from_column / CHUNK % 16;
            Piece piece = turned[from_column * 8 + (two ^ (permuted & ~1)) / 2];
            if (permuted & 1) {
                piece = Piece{{piece.word[2], piece.word[3], piece.word[0], piece.word[1]}};
            }
            const long long to_row = tile_column * static_cast<long long>(SIDE) + from_column;
            const long long first = tile_row * SIDE + two * HELD;
            const long long left = rows - first;
            if (to_row >= columns) continue;
            unsigned char* to = across + to_row * across_stride + first;
            if (ACROSS_WHOLE && left >= 16) {
                *reinterpret_cast<Piece*>(to) = piece;
            } else {
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    if (i < left) to[i] = piece.word[i / 4] >> i % 4 * 8 & 0xffu;
                }
            }
        }
    }
}
