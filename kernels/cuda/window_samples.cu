// What a watch takes of some matrices in one launch: the largest magnitudes of rows and of columns,
// some rows as they are, and of these some elements, and means and standard deviations of columns.
//
//     x:            [rows, columns], contiguous, bfloat16, float16 or float32
//     row_sizes:    float32 [read_rows], of rows read_first + i read_step; 0 before
//     column_sizes: float32 [columns], of the same rows; 0 before
//     kept:         [kept_rows, columns], as x, of rows (kept_first + i kept_step) mod rows
//     elements:     float32, every element_step-th of kept, as it lies
//     deviations, means: float32 [columns], of kept; sums are of float64, the mean first
//
// torch takes 3 launches for each matrix, and reads it twice; later some 10 for all of them. Here it
// is read once, and the host makes one launch. Magnitudes are compared as integers, by which a NaN is
// the largest: the order does not matter, and bits are those of torch but for NaNs.
//
// Blocks of a matrix are first those of tiles of TILE_ROWS x SPAN, for magnitudes, and then those of
// strips of 32 columns, for all else, if kept_rows is not 0.
//
// Macros, from window_samples.py: TILE_ROWS; SPAN, 256; MOST_KEPT, 256 rows; MOST_MATRICES.
#include "ptx.cuh"

constexpr int LANES = 32;
constexpr int WARPS = 8;
constexpr int THREADS = LANES * WARPS;
constexpr int CHUNK = SPAN / LANES;      // columns of a thread of a tile
constexpr int OF_WARP = TILE_ROWS / WARPS;
constexpr int HELD = OF_WARP < 8 ? OF_WARP : 8;  // rows of a thread whose loads are in flight
constexpr int KEPT = MOST_KEPT / WARPS;  // rows of a thread of a strip
static_assert(CHUNK == 8 && OF_WARP % HELD == 0 && MOST_KEPT % WARPS == 0);

enum Kind { BFLOAT16, FLOAT16, FLOAT32 };

// As `Matrix` of lokakern/native/window.cpp.
struct Matrix {
    const char* x;
    unsigned *row_sizes, *column_sizes;
    char* kept;
    float *elements, *deviations, *means;
    long long rows, kept_first, kept_step;
    int columns, kind;
    int read_first, read_step, read_rows;
    int kept_rows, element_step;
    int is_whole;                    // whether all rows start at multiples of 16 bytes
    unsigned tiles, end;             // blocks of magnitudes, and the first block of the next matrix
};

struct Table {
    Matrix of[MOST_MATRICES];
};

template <int KIND>
constexpr int BYTES = KIND == FLOAT32 ? 4 : 2;

// One element as it lies.
template <int KIND>
static __device__ __forceinline__ unsigned load(const char* from) {
    if constexpr (KIND == FLOAT32) {
        return *reinterpret_cast<const unsigned*>(from);
    } else {
        return *reinterpret_cast<const unsigned short*>(from);
    }
}

template <int KIND>
static __device__ __forceinline__ unsigned magnitude(unsigned bits) {
    return bits & (KIND == FLOAT32 ? 0x7fffffffu : 0x7fffu);
}

// The bits of a magnitude as float32, exactly.
template <int KIND>
static __device__ __forceinline__ unsigned widened(unsigned size) {
    if constexpr (KIND == FLOAT32) return size;
    if constexpr (KIND == BFLOAT16) return size << 16;
    if (size >= 0x7c00u) return 0x7f800000u | (size & 0x3ffu) << 13;
    // 2^112: a float16 without its bias in the place of a float32's, subnormal ones, too.
    return __float_as_uint(__fmul_rn(__uint_as_float(size << 13), __uint_as_float(0x77800000u)));
}

template <int KIND>
static __device__ __forceinline__ float value_of(unsigned bits) {
    const unsigned size = magnitude<KIND>(bits);
    const unsigned sign = (bits ^ size) << (KIND == FLOAT32 ? 0 : 16);
    return __uint_as_float(widened<KIND>(size) | sign);
}

// The magnitudes of a tile.
template <int KIND>
static __device__ __forceinline__ void take_sizes(const Matrix& m, int tile, unsigned* shared) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int spans = (m.columns + SPAN - 1) / SPAN;
    const int first_column = tile % spans * SPAN, column = first_column + lane * CHUNK;
    const int first_row = tile / spans * TILE_ROWS + warp * OF_WARP;
    const bool in_pieces = m.is_whole && column + CHUNK <= m.columns;
    constexpr int WORDS = CHUNK * BYTES<KIND> / 4;

    unsigned of_column[CHUNK];
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) of_column[j] = 0;
#pragma unroll 1
    for (int begin = 0; begin < OF_WARP; begin += HELD) {
        unsigned word[HELD][WORDS];
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int row = first_row + begin + i;
#pragma unroll
            for (int j = 0; j < WORDS; ++j) word[i][j] = 0;
            if (row >= m.read_rows) continue;
            const long long place = m.read_first + static_cast<long long>(row) * m.read_step;
            const char* const from = m.x + (place * m.columns + column) * BYTES<KIND>;
            if (in_pieces) {
#pragma unroll
                for (int j = 0; j < WORDS; j += 4) load_16_bytes(from + 4 * j, word[i] + j);
            } else {
#pragma unroll
                for (int j = 0; j < CHUNK; ++j) {
                    if (column + j >= m.columns) continue;
                    const unsigned bits = load<KIND>(from + j * BYTES<KIND>);
                    if constexpr (KIND == FLOAT32) {
                        word[i][j] = bits;
                    } else {
                        word[i][j / 2] |= bits << j % 2 * 16;
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            unsigned of_row = 0;
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                unsigned bits;
                if constexpr (KIND == FLOAT32) {
                    bits = word[i][j];
                } else {
                    bits = word[i][j / 2] >> j % 2 * 16;
                }
                const unsigned size = magnitude<KIND>(bits);
                of_column[j] = max(of_column[j], size);
                of_row = max(of_row, size);
            }
            of_row = largest_of_warp(of_row);
            const int row = first_row + begin + i;
            if (lane == 0 && row < m.read_rows && of_row) {
                raise_to(m.row_sizes + row, widened<KIND>(of_row));
            }
        }
    }
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) shared[warp * SPAN + j * LANES + lane] = of_column[j];
    __syncthreads();
    for (int mine = threadIdx.x; mine < SPAN; mine += THREADS) {
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            largest = max(largest, shared[i * SPAN + mine % CHUNK * LANES + mine / CHUNK]);
        }
        const int to = first_column + mine;
        if (to < m.columns && largest) raise_to(m.column_sizes + to, widened<KIND>(largest));
    }
}

// The sum of what the threads of a column have.
static __device__ __forceinline__ double sum_of_column(double sum, double* shared) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    __syncthreads();
    shared[warp * LANES + lane] = sum;
    __syncthreads();
    double total = 0.0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) total += shared[i * LANES + lane];
    return total;
}

// Rows of a strip, and what is made of them.
template <int KIND>
static __device__ __forceinline__ void keep_rows(const Matrix& m, int strip, double* shared) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int column = strip * LANES + lane;
    const bool is_inside = column < m.columns;
    // Of rows of this thread, each WARPS after the one before: without a division for each. `to` is
    // `pick` elements' steps and `rest`.
    const long long step = m.kept_step * WARPS % m.rows;
    long long place = (m.kept_first + m.kept_step * warp) % m.rows;
    int to = warp * m.columns + column;
    int pick = to / m.element_step, rest = to % m.element_step;
    const int step_to = WARPS * m.columns;
    const int step_pick = step_to / m.element_step, step_rest = step_to % m.element_step;

    float value[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        const int row = warp + i * WARPS;
        value[i] = 0.0f;
        if (is_inside && row < m.kept_rows) {
            const long long from = place * m.columns + column;
            const unsigned bits = load<KIND>(m.x + from * BYTES<KIND>);
            if constexpr (KIND == FLOAT32) {
                reinterpret_cast<unsigned*>(m.kept)[to] = bits;
            } else {
                reinterpret_cast<unsigned short*>(m.kept)[to] = static_cast<unsigned short>(bits);
            }
            value[i] = value_of<KIND>(bits);
            if (rest == 0) m.elements[pick] = value[i];
        }
        place += step;
        if (place >= m.rows) place -= m.rows;
        to += step_to;
        pick += step_pick;
        rest += step_rest;
        if (rest >= m.element_step) {
            rest -= m.element_step;
            ++pick;
        }
    }
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) sum += value[i];
    const double mean = sum_of_column(sum, shared) / m.kept_rows;
    double squares = 0.0;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        const double beside = value[i] - mean;
        if (warp + i * WARPS < m.kept_rows) squares += beside * beside;
    }
    const double variance = sum_of_column(squares, shared) / m.kept_rows;
    if (is_inside && warp == 0) {
        m.means[column] = static_cast<float>(mean);
        m.deviations[column] = static_cast<float>(sqrt(variance));
    }
}

template <int KIND>
static __device__ __forceinline__ void take(const Matrix& m, unsigned block, double* shared) {
    if (block < m.tiles) {
        take_sizes<KIND>(m, static_cast<int>(block), reinterpret_cast<unsigned*>(shared));
    } else {
        keep_rows<KIND>(m, static_cast<int>(block - m.tiles), shared);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    window_samples(const __grid_constant__ Table table) {
    __shared__ double shared[WARPS * SPAN / 2];
    int which = 0;
    while (blockIdx.x >= table.of[which].end) ++which;
    const Matrix& m = table.of[which];
    const unsigned block = blockIdx.x - (which ? table.of[which - 1].end : 0);
    if (m.kind == BFLOAT16) {
        take<BFLOAT16>(m, block, shared);
    } else if (m.kind == FLOAT16) {
        take<FLOAT16>(m, block, shared);
    } else {
        take<FLOAT32>(m, block, shared);
    }
}
