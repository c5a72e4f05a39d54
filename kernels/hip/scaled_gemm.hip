// d[m, n] = (sum_k a[m, k] * b[n, k]) * sa * sb + bias[n] of FP8 matrices, rounded to bfloat16.
//
// a: [m, k] and b: [n, k], rows of any stride that is a multiple of 16 bytes, as the first is; scales
// of rows, sa[m] and sb[n]; or sa[k / 128, m] and sb[n / 128, k / 128] of 1x128 and 128x128; or on
// gfx950 powers of two in a byte, sa[m, k / 32] and sb[n, k / 32] of 1x32, which the matrix
// instruction applies. Rows of d: any stride.
//
// A block of 4 waves makes TILE_M x TILE_N sums, 128 of k at a time. Local memory holds two steps:
// one is multiplied while the next comes.
//
// Macros: TILE_M, TILE_N (multiples of 32), SCALES (0 of rows, 1 of 1x128, 2 of 1x32).
#include "products.hpp"

#if SCALES == 2
typedef unsigned char Scale;
#else
typedef float Scale;
#endif

constexpr int THREADS = 256;
constexpr int WAVE_M = TILE_M / 2, WAVE_N = TILE_N / 2;
constexpr int DOWN = WAVE_M / 16, ACROSS = WAVE_N / 16;
constexpr int COPIES = (TILE_M + TILE_N) * PARTS / THREADS;
extern "C" __global__ __launch_bounds__(256) void scaled_gemm(
    const unsigned char* a, const Scale* a_scale, const unsigned char* b, const Scale* b_scale,
    unsigned short* out, const unsigned short* bias, int m, int n, int k, int a_stride,
    int b_stride, int out_stride, int a_scale_stride, int b_scale_stride) {
    __shared__ Words4 stages[2][(TILE_M + TILE_N) * PARTS];
    const int tiles_m = (m + TILE_M - 1) / TILE_M, tiles_n = (n + TILE_N - 1) / TILE_N;
    const int tile = tile_of(block_index(), tiles_m * tiles_n);
    const int first_m = tile / tiles_n * TILE_M, first_n = tile % tiles_n * TILE_N;
    const int steps = (k + STEP - 1) / STEP;
    const int thread = thread_index(), lane = thread % WAVE, wave = thread / WAVE;
    const int quarter = lane / 16, line = lane % 16;
    const int wave_m = wave / 2 * WAVE_M, wave_n = TILE_M + wave % 2 * WAVE_N;

    Copies<COPIES> copies;
    const Operand left_rows{a, first_m, m - 1, a_stride}, right_rows{b, first_n, n - 1, b_stride};
    const auto begin = [&](int step) {
        for (int i = 0; i < COPIES; ++i) {
            const int place = i * THREADS + thread;
            copies.begin(
                i, source_of(left_rows, right_rows, TILE_M, place, step, k),
                &stages[step % 2][place]);
        }
    };
    const auto end = [&](int step) {
        for (int i = 0; i < COPIES; ++i) copies.end(i, &stages[step % 2][i * THREADS + thread]);
        barrier();
    };

    Floats4 sums[DOWN][ACROSS] = {};
    const auto add = [&](auto last, int step) {  // the product of a step
        constexpr bool IS_LAST = decltype(last)::value;
        const Words4* stage = stages[step % 2];
        const int count = k - step * STEP;
        Words8 left[DOWN];
        for (int i = 0; i < DOWN; ++i) left[i] = fragment<IS_LAST>(stage, wave_m + 16 * i + line, quarter, count);
#if SCALES == 2
        const auto scale_of = [&](const Scale* scale, int stride, int row, int last) {
            const long start = static_cast<long>(row < last ? row : last) * stride;
            return !IS_LAST || 32 * quarter < count ? scale[start + 4 * step + quarter] : ONE_E8M0;
        };
        int of_rows[DOWN];
        for (int i = 0; i < DOWN; ++i)
            of_rows[i] = scale_of(a_scale, a_scale_stride, first_m + wave_m + 16 * i + line, m - 1);
#endif
#pragma unroll  // registers have no index
        for (int j = 0; j < ACROSS; ++j) {
            const Words8 right = fragment<IS_LAST>(stage, wave_n + 16 * j + line, quarter, count);
#if SCALES == 1
            const int column = first_n + wave_n - TILE_M + 16 * j;
            const float of_b = b_scale[(column < n ? column : n - 1) / 128 * b_scale_stride + step];
#elif SCALES == 2
            const int row_of_b = first_n + wave_n - TILE_M + 16 * j + line;
            const int of_b = scale_of(b_scale, b_scale_stride, row_of_b, n - 1);
#endif
#pragma unroll
            for (int i = 0; i < DOWN; ++i) {
#if SCALES == 1
                const int row = first_m + wave_m + 16 * i + line;
                const float of_a = a_scale[step * a_scale_stride + (row < m ? row : m - 1)];
                const Floats4 part = multiply(right, left[i], Floats4{});
                for (int t = 0; t < 4; ++t) sums[i][j][t] += part[t] * of_a * of_b;
#elif SCALES == 2
                sums[i][j] = multiply_scaled(right, left[i], sums[i][j], of_b, of_rows[i]);
#else
                sums[i][j] = multiply(right, left[i], sums[i][j]);
#endif
            }
        }
    };
    begin(0);
    end(0);
    for (int step = 0; step + 1 < steps; ++step) {
        begin(step + 1);
        add(Flag<false>{}, step);
        end(step + 1);
    }
    add(Flag<true>{}, steps - 1);
    for (auto& row : sums)
        for (Floats4& some : row) settle(some);

    for (int i = 0; i < DOWN; ++i) {
        const int row = first_m + wave_m + 16 * i + line;
        if (row >= m) continue;
        for (int j = 0; j < ACROSS; ++j) {
            for (int t = 0; t < 4; ++t) {
                const int column = first_n + wave_n - TILE_M + 16 * j + 4 * quarter + t;
                if (column >= n) continue;
                float value = sums[i][j][t];
#if SCALES == 0
                value = value * a_scale[row] * b_scale[column];
#endif
                if (bias) value += number(bias[column]);
                out[static_cast<long>(row) * out_stride + column] = rounded(value);
            }
        }
    }
}
