// Quantize up to three matrices to FP8 in one launch, byte for byte as lokakern.numerics: each by
// its rows as it lies, or by its columns and transposed.
//
//     s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))
//
//     x:      [rows, columns], bfloat16 or float32, rows x_stride elements apart
//     data:   [rows, columns], FP8 bytes, rows data_stride bytes apart; [columns, rows] if turned
//     scale:  float32, one for each row of data
//     end:    first block behind those of the matrix, a multiple of CLUSTER
//
// By columns, a cluster owns a strip of CHUNKS chunks, and its blocks share the rows. They tell each
// other the amax of their parts, so that all of it takes one launch and no memory but the outputs. The
// last HELD tiles of a block stay in shared memory, on their way there all at once; tiles before them
// are read again, most of them from the L2. Macros besides those of quantize.cuh, set by
// quantize_together.py:
//
//     JOBS       matrices
//     TEAM0..2   threads that share a row, a power of two from 8 on; 0 if the matrix is turned
//     CLUSTER    blocks of a strip
//     CHUNKS     of a strip: 4 or 8, 64 or 128 bytes of each row
//     HELD       tiles of TILE rows in shared memory
//     RAGGED     1 where columns of a matrix are no multiple of a chunk
#include "quantize_turned.cuh"
#include "norm_backward_ptx.cuh"
#include "quantize_together_ptx.cuh"

constexpr int STRIP = CHUNKS * CHUNK;              // columns
constexpr int TILE = THREADS / CHUNKS * ROWS;      // rows
constexpr int WORDS = CHUNKS * 4;                  // of a row of a strip

struct Matrix {
    const char* x;
    unsigned char* data;
    float* scale;
    int rows, columns;
    long long x_stride, data_stride;
};

// Bits of the larger half as float32, or the word.
__device__ __forceinline__ unsigned as_float32(unsigned magnitudes) {
    return HALVES ? max(magnitudes << 16, magnitudes & 0xffff0000u) : magnitudes;
}

// --- by rows

template <int TEAM>
__device__ __forceinline__ void quantize_rows(const Matrix& of, unsigned block) {
    constexpr int ACCESSES = 4;  // chunks that a thread holds
    constexpr int TEAMS = THREADS / TEAM, STEP = TEAM * ACCESSES * CHUNK;
    __shared__ unsigned largest[WARPS];
    const int position = threadIdx.x % TEAM, team = threadIdx.x / TEAM;
    const long long row = static_cast<long long>(block) * TEAMS + team;
    const bool is_row = row < of.rows;
    const int columns = is_row ? of.columns : 0;
    const char* const from = of.x + (is_row ? row : 0) * of.x_stride * INPUT_BYTES;
    unsigned word[ACCESSES][4];
    const auto load = [&](int first) {
        unsigned words[ACCESSES][FETCHED];
#pragma unroll
        for (int i = 0; i < ACCESSES; ++i) {
            const int column = first + (i * TEAM + position) * CHUNK;
            fetch(from + static_cast<long long>(column) * INPUT_BYTES, columns - column, words[i]);
        }
#pragma unroll
        for (int i = 0; i < ACCESSES; ++i) {
            const int column = first + (i * TEAM + position) * CHUNK;
            settle<RAGGED>(from + static_cast<long long>(column) * INPUT_BYTES, columns - column,
                           words[i], word[i]);
        }
    };

    unsigned magnitudes = 0;
    const auto enlarge = [&](bool finite) {
#pragma unroll
        for (int i = 0; i < ACCESSES; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                magnitudes = larger(magnitudes, finite ? magnitudes_of<true>(word[i][j])
                                                       : magnitudes_of<false>(word[i][j]));
            }
        }
    };
    const int last = max(of.columns - 1, 0) / STEP * STEP;  // where what is held at last begins
    for (int first = 0; first <= last; first += STEP) {
        load(first);
        enlarge(false);
    }
    if (any_infinite(magnitudes)) {
        magnitudes = 0;
        for (int first = 0; first <= last; first += STEP) {
            if (last) load(first);
            enlarge(true);
        }
    }
    unsigned amax = as_float32(magnitudes);
    if constexpr (TEAM >= 32) {
        amax = largest_of_warp(amax);
    } else {
#pragma unroll
        for (int distance = TEAM / 2; distance > 0; distance /= 2) {
            amax = max(amax, value_across(amax, distance));
        }
    }
    if constexpr (TEAM > 32) {
        if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = amax;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TEAM / 32; ++i) amax = max(amax, largest[team * (TEAM / 32) + i]);
    }
    if (!is_row) return;
    const float decode = decode_scale(amax);
    const Divisor divisor(decode);
    unsigned char* const to = of.data + row * of.data_stride;
    if (position == 0) of.scale[row] = decode;
    for (int first = last; first >= 0; first -= STEP) {
        if (first != last) load(first);
#pragma unroll
        for (int i = 0; i < ACCESSES; ++i) {
            const int column = first + (i * TEAM + position) * CHUNK;
            if (column >= columns) continue;
            unsigned bytes[2];
            cast(word[i], divisor, bytes);
            write<RAGGED>(bytes, to + column, columns - column);
        }
    }
}

// --- by columns

// Where a chunk of a row of a tile is kept. Eight threads read as many neighbors of a row at once,
// or four neighbors of two rows, which permuting puts into different banks.
__device__ __forceinline__ int place_of(int row, int chunk) {
    const int place = row * CHUNKS + chunk;
    return CHUNKS == 4 ? place ^ (row / ROWS % 2) * 4 : place;
}

__device__ __forceinline__ void quantize_columns(const Matrix& of, unsigned block) {
    __shared__ unsigned of_warps[WARPS][WORDS];
    __shared__ Pair told[CLUSTER][WORDS / 2];
    __shared__ float column_scale[STRIP];
    Piece* const memory = memory_of_block<Piece>();

    const int rank = block % CLUSTER, first_column = block / CLUSTER * STRIP;
    const int chunk = threadIdx.x % CHUNKS, band = threadIdx.x / CHUNKS;
    const int column = first_column + chunk * CHUNK, columns = of.columns - column;
    // Rows of a block: a multiple of 16, so that none shares 16 bytes of the output with another.
    const int share = (of.rows + CLUSTER * 16 - 1) / (CLUSTER * 16) * 16;
    const int first_row = min(rank * share, of.rows);
    const int rows = min(share, of.rows - first_row);
    const int tiles = (rows + TILE - 1) / TILE, before = max(tiles - HELD, 0);  // read twice
    const char* const from =
        of.x + (static_cast<long long>(first_row + band * ROWS) * of.x_stride + column) * INPUT_BYTES;
    const long long stride = of.x_stride * INPUT_BYTES;

    const auto load = [&](Part& part, int tile) {
        load_part(part, from + tile * (TILE * stride), stride, rows - tile * TILE - band * ROWS,
                  columns);
    };
    const auto keep = [&](int held, int tile) {
        Piece* const to = memory + held * (TILE * CHUNKS);
        if constexpr (IN_PLACE) {
            const char* const place = from + tile * (TILE * stride);
            const int left = rows - tile * TILE - band * ROWS;
            const int bytes = min(max(columns, 0), CHUNK) * INPUT_BYTES;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const bool is_row = i < left && bytes > 0;
                copy_later(to + place_of(band * ROWS + i, chunk), is_row ? place + i * stride : of.x,
                           is_row ? bytes : 0);
            }
        } else {
            Part part;
            load(part, tile);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                to[place_of(band * ROWS + i, chunk)] = Piece{
                    {part.word[i][0], part.word[i][1], part.word[i][2], part.word[i][3]}};
            }
        }
    };
    const auto take = [&](Part& part, int held) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const Piece piece = memory[held * (TILE * CHUNKS) + place_of(band * ROWS + i, chunk)];
#pragma unroll
            for (int j = 0; j < 4; ++j) part.word[i][j] = piece.word[j];
        }
    };

#pragma unroll
    for (int held = 0; held < HELD; ++held) keep(held, before + held);
    unsigned magnitudes[4];
    const auto find = [&](bool finite) {
#pragma unroll
        for (int j = 0; j < 4; ++j) magnitudes[j] = 0;
#pragma unroll 1
        for (int tile = 0; tile < before; ++tile) {
            Part part;
            load(part, tile);
            enlarge(magnitudes, part, finite);
        }
        await_copies();  // of this thread, which takes no others
#pragma unroll 1
        for (int held = 0; held < HELD; ++held) {
            Part part;
            take(part, held);
            enlarge(magnitudes, part, finite);
        }
    };
    find(false);
    if (any_infinite(magnitudes[0]) || any_infinite(magnitudes[1]) || any_infinite(magnitudes[2]) ||
        any_infinite(magnitudes[3])) {
        find(true);
    }

    write_largest<CHUNKS>(magnitudes, of_warps);
    __syncthreads();
    await_begun_cluster();
    for (int i = threadIdx.x; i < CLUSTER * WORDS / 2; i += THREADS) {
        const int pair = i % (WORDS / 2);
        unsigned both[2] = {0, 0};
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            both[0] = larger(both[0], of_warps[warp][pair * 2]);
            both[1] = larger(both[1], of_warps[warp][pair * 2 + 1]);
        }
        store_in_cluster(&told[rank][pair], i / (WORDS / 2),
                         Pair{__uint_as_float(both[0]), __uint_as_float(both[1])});
    }
    meet_in_cluster();
    if (threadIdx.x < STRIP) {
        const int word = threadIdx.x / PER_WORD;
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < CLUSTER; ++i) {
            const Pair pair = load_now(&told[i][word / 2]);
            largest = larger(largest, __float_as_uint(word % 2 ? pair.second : pair.first));
        }
        const float decode = decode_scale(of_column(largest, threadIdx.x));
        column_scale[threadIdx.x] = decode;
        if (rank == 0 && first_column + static_cast<int>(threadIdx.x) < of.columns) {
            of.scale[first_column + threadIdx.x] = decode;
        }
    }
    __syncthreads();

    // The memory of the tile, which is in registers then, takes what leaves.
    const auto write_tile = [&](const Part& part, int held, int tile) {
        Piece* const turned = memory + held * (TILE * CHUNKS);
        __syncthreads();
        turn<CHUNKS>(part, column_scale, turned);
        __syncthreads();
        write_turned<CHUNKS>(turned, of.data + first_column * of.data_stride + first_row +
                             tile * TILE, of.data_stride, of.columns - first_column,
                             rows - tile * TILE);
    };
#pragma unroll 1
    for (int held = 0; held < HELD; ++held) {
        Part part;
        take(part, held);
        write_tile(part, held, before + held);
    }
#pragma unroll 1
    for (int tile = before - 1; tile >= 0; --tile) {
        Part part;
        load(part, tile);
        write_tile(part, tile % HELD, tile);
    }
}

template <int TEAM>
__device__ __forceinline__ void quantize_matrix(const Matrix& of, unsigned block) {
    if constexpr (TEAM == 0) {
        begin_in_cluster();
        begin_in_turn();
        quantize_columns(of, block);
    } else {
        begin_in_turn();
        quantize_rows<TEAM>(of, block);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, IN_PLACE ? 3 : 2) quantize_together(
    const char* x0, unsigned char* data0, float* scale0, const char* x1, unsigned char* data1,
    float* scale1, const char* x2, unsigned char* data2, float* scale2, int rows0, int columns0,
    int end0, int rows1, int columns1, int end1, int rows2, int columns2, int end2,
    long long x_stride0, long long data_stride0, long long x_stride1, long long data_stride1,
    long long x_stride2, long long data_stride2) {
    const int block = blockIdx.x;
    if (JOBS == 1 || block < end0) {
        quantize_matrix<TEAM0>({x0, data0, scale0, rows0, columns0, x_stride0, data_stride0}, block);
        return;
    }
    if constexpr (JOBS > 1) {
        if (JOBS == 2 || block < end1) {
            quantize_matrix<TEAM1>({x1, data1, scale1, rows1, columns1, x_stride1, data_stride1},
                                   block - end0);
            return;
        }
    }
    if constexpr (JOBS > 2) {
        quantize_matrix<TEAM2>({x2, data2, scale2, rows2, columns2, x_stride2, data_stride2},
                               block - end1);
    }
}
