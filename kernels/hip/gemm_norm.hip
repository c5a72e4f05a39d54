// A product of FP8 matrices, a norm of its rows, and what comes after, without leaving the registers:
//
//     y = (sum_k a[m, k] * b[n, k]) * sa * sb + bias[n];  d = f(norm(y) * weight + shift)
//
// a, b and their scales as in scaled_gemm.hip. A block makes 64 whole rows, each wave 16 of them, so
// that a row's statistics need no local memory: n <= TILE_N. Mean and variance are two passes over
// registers; loops over them are unrolled, because registers have no index. d: bfloat16, rows of any
// stride, or FP8 with one scale a row, one for each 128 columns (s[group, row]), or one that is given;
// rows of those start at multiples of 4 bytes.
//
// Macros: TILE_N (64 to 256, a multiple of 32), STAGES (2, or 1 where copies pass through registers),
// BY_GROUP, NORM (0 none, 1 layer, 2 rms), SPAN (columns that are normalized together: TILE_N means
// the whole row; else a multiple of 16 that divides n), ACTIVATION (0 none, 1 relu, 2 hardswish,
// 3 silu), OUT (0 bfloat16, 1 FP8 with scales of rows, 2 of 1x128, 3 a given one).
#include "products.hpp"

constexpr int WAVES = 4, TILE_M = 64, ACROSS = TILE_N / 16;
constexpr int AHEAD = 4;  // fragments of b
constexpr int GROUPS = (TILE_N + 127) / 128;  // of columns under one scale

struct Scales {
#if BY_GROUP
    float of_a, of_b[GROUPS];
#endif
};

// Of a row, whose columns four lanes share.
static __device__ inline float sum_of_row(float value) {
    value += value_across(value, 16);
    return value + value_across(value, 32);
}
static __device__ inline float largest_of_row(float value) {
    for (int distance = 16; distance <= 32; distance *= 2) {
        const float other = value_across(value, distance);
        value = other > value ? other : value;
    }
    return value;
}

static __device__ inline float activated(float z) {
#if ACTIVATION == 1
    return z > 0.0f || z != z ? z : 0.0f;
#elif ACTIVATION == 2
    const float gate = z + 3.0f;
    return z * ((gate < 0.0f ? 0.0f : gate > 6.0f ? 6.0f : gate) / 6.0f);
#elif ACTIVATION == 3
    return z / (1.0f + power_of_two(z * -1.44269504f));
#else
    return z;
#endif
}

static __device__ inline float scale_of(float largest) {
    if (largest == 0.0f) return 1.0f;
    const float scale = largest / LARGEST_FP8, smallest = float_of(0x00800000u);
    return scale > smallest ? scale : smallest;
}

static __device__ inline bool is_finite(float value) {
    return (bits_of(value) & 0x7f800000u) != 0x7f800000u;
}

extern "C" __global__ __launch_bounds__(256) void gemm_norm(
    const unsigned char* a, const float* a_scale, const unsigned char* b, const float* b_scale,
    void* out, float* out_scale, const float* bias, const float* weight, const float* shift, int m,
    int n, int k, int a_stride, int b_stride, int out_stride, int a_scale_stride,
    int b_scale_stride, int out_scale_stride, float eps) {
    __shared__ Words4 stages[STAGES][(TILE_M + TILE_N) * PARTS];
    const int first_m = block_index() * TILE_M, steps = (k + STEP - 1) / STEP;
    const int thread = thread_index(), lane = thread % WAVE;
    const int wave = uniform(thread / WAVE), wave_m = 16 * wave;
    const int quarter = lane / 16, line = lane % 16;
    const int row = first_m + wave_m + line;
    const int known_row = row < m ? row : m - 1;

    const auto same = [](int some) { return some; };
    const int rows = m - first_m < TILE_M ? m - first_m : TILE_M;
    Rows<TILE_M, WAVES> left_rows(
        a + static_cast<long>(first_m) * a_stride, rows, a_stride, k, wave, same);
    Rows<TILE_N, WAVES> right_rows(b, n, b_stride, k, wave, same);
    const auto begin = [&](int step) {
        left_rows.begin(stages[step % STAGES], false);
        right_rows.begin(stages[step % STAGES] + TILE_M * PARTS, false);
    };
    const auto end = [&](int step) {
        if (STAGES == 1) barrier();  // all have read what is overwritten
        left_rows.put(stages[step % STAGES]);
        right_rows.put(stages[step % STAGES] + TILE_M * PARTS);
        left_rows.wait();
        right_rows.wait();
        barrier();
    };

    Scales scales;  // of a step, which wait in registers for their turn
    const auto load_scales = [&](int step) {
#if BY_GROUP
        scales.of_a = a_scale[step * a_scale_stride + known_row];
        for (int group = 0; group < GROUPS; ++group)
            scales.of_b[group] = b_scale[(128 * group < n ? group : 0) * b_scale_stride + step];
#endif
    };

    Floats4 sums[ACROSS] = {};
    const auto add = [&](int step, const Scales& scales) {  // the product of a step
        const Words4* stage = stages[step % STAGES];
        const Words8 left = fragment(stage, wave_m + line, quarter);
        Words8 right[AHEAD];  // read before it is needed, which takes 128 cycles
        for (int j = 0; j < AHEAD; ++j)
            right[j] = fragment(stage, TILE_M + 16 * j + line, quarter);
#pragma unroll  // registers have no index
        for (int j = 0; j < ACROSS; ++j) {
            keep_order();
#if BY_GROUP
            const Floats4 part = multiply(right[j % AHEAD], left, Floats4{});
            sums[j] += part * scales.of_a * scales.of_b[j / 8];  // of_a * of_b underflows
#else
            sums[j] = multiply(right[j % AHEAD], left, sums[j]);
#endif
            if (j + AHEAD < ACROSS)
                right[j % AHEAD] = fragment(stage, TILE_M + 16 * (j + AHEAD) + line, quarter);
        }
    };
    load_scales(0);
    begin(0);
    end(0);
    for (int step = 0; step + 1 < steps; ++step) {
        const Scales own = scales;
        begin(step + 1);
        load_scales(step + 1);
        keep_order();
        add(step, own);
        end(step + 1);
    }
    if (k % STEP)
        clear_tail<TILE_M + TILE_N, WAVES * WAVE>(stages[(steps - 1) % STAGES], k % STEP);
    add(steps - 1, scales);
    for (Floats4& some : sums) settle(some);

    for (int j = 0; j < ACROSS; ++j) {
        for (int t = 0; t < 4; ++t) {
            const int column = 16 * j + 4 * quarter + t;
            if (column >= n) {
                sums[j][t] = 0.0f;
                continue;
            }
#if !BY_GROUP
            sums[j][t] = sums[j][t] * a_scale[known_row] * b_scale[column];
#endif
            if (bias) sums[j][t] += bias[column];
        }
    }
    constexpr int TOGETHER = SPAN / 16;
    const float count = static_cast<float>(SPAN == TILE_N ? n : SPAN);
#pragma unroll
    for (int first = 0; first < ACROSS; first += TOGETHER) {
        float mean = 0.0f, squares = 0.0f;
#if NORM == 1
#pragma unroll
        for (int j = first; j < first + TOGETHER; ++j)
            for (int t = 0; t < 4; ++t) mean += sums[j][t];
        mean = sum_of_row(mean) / count;
#endif
#pragma unroll
        for (int j = first; j < first + TOGETHER; ++j) {
            for (int t = 0; t < 4; ++t) {
                const float from = 16 * j + 4 * quarter + t < n ? sums[j][t] - mean : 0.0f;
                squares += from * from;
            }
        }
        const float deviation = square_root(sum_of_row(squares) / count + eps);
#pragma unroll
        for (int j = first; j < first + TOGETHER; ++j) {
            for (int t = 0; t < 4; ++t) {
                const int column = 16 * j + 4 * quarter + t;
                if (column >= n) continue;
                float z = NORM ? (sums[j][t] - mean) / deviation : sums[j][t];
                if (weight) z *= weight[column];
                if (shift) z += shift[column];
                sums[j][t] = activated(z);
            }
        }
    }

#if OUT
    // A group of columns, or all of them, under one scale.
    constexpr int UNDER = OUT == 2 && TILE_N > 128 ? 128 / 16 : ACROSS;
#else
    constexpr int UNDER = ACROSS;
#endif
#pragma unroll
    for (int first = 0; first < ACROSS; first += UNDER) {
#if OUT == 1 || OUT == 2
        float largest = 0.0f;
#pragma unroll
        for (int j = first; j < first + UNDER && j < ACROSS; ++j) {
            for (int t = 0; t < 4; ++t) {
                const float size = float_of(bits_of(sums[j][t]) & 0x7fffffffu);
                if (is_finite(size) && size > largest) largest = size;
            }
        }
        const float scale = scale_of(largest_of_row(largest));
        if (row < m && quarter == 0 && 16 * first < n)
            out_scale[(OUT == 2 ? static_cast<long>(first / 8) * out_scale_stride : 0) + row] = scale;
#elif OUT == 3
        const float scale = out_scale[0];
#endif
        if (row >= m) continue;
#pragma unroll
        for (int j = first; j < first + UNDER && j < ACROSS; ++j) {
            const int column = 16 * j + 4 * quarter;
            const long place = static_cast<long>(row) * out_stride + column;
#if OUT
            float ratios[4];
            for (int t = 0; t < 4; ++t)
                ratios[t] = is_finite(sums[j][t]) ? sums[j][t] / scale : float_of(0x7fc00000u);
            const unsigned word =
                encode_pair(ratios[0], ratios[1]) | encode_pair(ratios[2], ratios[3]) << 16;
            unsigned char* to = static_cast<unsigned char*>(out) + place;
            if (column + 4 <= n) {
                *reinterpret_cast<unsigned*>(to) = word;
                continue;
            }
            for (int t = 0; t < 4 && column + t < n; ++t)
                to[t] = static_cast<unsigned char>(word >> 8 * t);
#else
            for (int t = 0; t < 4 && column + t < n; ++t)
                static_cast<unsigned short*>(out)[place + t] = rounded(sums[j][t]);
#endif
        }
    }
}
