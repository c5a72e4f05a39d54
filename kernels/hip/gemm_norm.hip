// A product of FP8 matrices, a norm of its rows, and what comes after, without leaving the registers:
//
//     y = (sum_k a[m, k] * b[n, k]) * sa * sb + bias[n];  d = f(norm(y) * weight + shift)
//
// a, b and their scales as in scaled_gemm.hip. A block makes 64 whole rows: n <= TILE_N. Mean and
// variance are two passes over registers; waves that share a row exchange its sums through local
// memory. Loops over registers are unrolled, because registers have no index. d: bfloat16, rows of any
// stride, or FP8 with one scale a row, one for each 128 columns (s[group, row]), or one that is given.
//
// Macros: TILE_N (64, 128, 192, 256), BY_GROUP, NORM (0 none, 1 layer, 2 rms), SPAN (columns that are
// normalized together: TILE_N means the whole row; else a multiple of 16 that divides n), ACTIVATION (0
// none, 1 relu, 2 hardswish, 3 silu, 4 gelu, 5 gelu by tanh), OUT (0 bfloat16, 1 FP8 with scales of
// rows, 2 of 1x128, 3 a given one).
#include "products.hpp"

// A wave reads as many rows of local memory as it has rows and columns: 128 of 64 x 64 sums, 272 of
// 16 x 256. 192 columns would split groups of 128 among four waves.
constexpr int WAVES = 4, WAVES_N = TILE_N == 192 ? 1 : TILE_N == 256 ? 4 : 2;
constexpr int TILE_M = 64, WAVE_M = TILE_M * WAVES_N / WAVES, WAVE_N = TILE_N / WAVES_N;
constexpr int DOWN = WAVE_M / 16, ACROSS = WAVE_N / 16;
// Rows of b that only one wave reads come from memory to its registers, others through local memory.
#define ALONE (TILE_N == 256)
constexpr int STAGED = TILE_M + (ALONE ? 0 : TILE_N), STAGE = STAGED * PARTS;  // rows, places of a step
// The next step waits in registers where copies pass through them. Then two blocks of 128 columns fit
// a compute unit of gfx942, and hide each other's waits.
constexpr int STAGES = PAST_REGISTERS ? 2 : 1;
// Fragments of b, which take 128 cycles to come. Those from memory are loaded one step ahead.
constexpr int AHEAD = ALONE ? ACROSS : DOWN == 2 ? 2 : DOWN == 4 ? 3 : 4;
// Products before the scale of one is applied, which waits until it is done. With three, fewer waves of
// 128 columns would fit a SIMD of gfx950.
constexpr int BEHIND = ALONE ? 3 : 2;
constexpr int LATE = ACROSS - (DOWN > 1 ? 1 : 2);  // products before what came is put into local memory
// Whether there are registers for bias, weight and shift before the loop.
constexpr bool VECTORS_FIRST = ACROSS <= 4 && !(PAST_REGISTERS && TILE_N == 64);
constexpr int OWN = SPAN < WAVE_N ? SPAN : WAVE_N;  // columns of a span that a wave has
constexpr int TOGETHER = OWN % 64 == 0 ? 4 : OWN % 32 == 0 ? 2 : 1;  // fragments stored at once
constexpr int UNDER = OUT == 2 && ACROSS > 8 ? 8 : ACROSS;  // fragments under one scale
// Waves under one scale.
constexpr int UNDER_WAVES = OUT == 2 && TILE_N > 128 ? (WAVE_N < 128 ? 128 / WAVE_N : 1) : WAVES_N;
#if OUT
typedef unsigned char Output;
#else
typedef unsigned short Output;
#endif
constexpr int SIZE = sizeof(Output), WORDS = SIZE;  // of four outputs
typedef unsigned int Stored __attribute__((ext_vector_type(WORDS * TOGETHER)));
typedef float OfRows __attribute__((ext_vector_type(DOWN)));  // one number for each row of a lane

constexpr int GROUPS = (ACROSS + 7) / 8;  // of 128 columns

// The column that row `line` of a wave's j-th fragment of b is: a lane has 4 * TOGETHER neighbors.
static __device__ inline int column_of(unsigned j, unsigned line) {
    return TOGETHER * (16 * (j / TOGETHER) + line / 4 * 4) + 4 * (j % TOGETHER) + line % 4;
}

struct Sum {
    __device__ inline float operator()(float x, float y) const { return x + y; }
};
struct Largest {  // of sizes, whose bits are in the order of the numbers
    __device__ inline float operator()(float x, float y) const {
        return float_of(bits_of(x) > bits_of(y) ? bits_of(x) : bits_of(y));
    }
};

#if ACTIVATION >= 3
// x of each z, where the activation is z / (1 + 2^-x).
static __device__ inline Floats4 exponents(Floats4 z, Floats4 more) {
#if ACTIVATION == 3
    return __builtin_elementwise_fma(z, all<Floats4>(1.44269504f), more);
#else
    // x is odd, so z p(z^2): of GELU fitted, of that by tanh 2 sqrt(2 / pi) (z + 0.044715 z^3) log2(e),
    // see gelu.cuh of the kernels in CUDA.
#if ACTIVATION == 4
    constexpr float TERMS[] = {4.25724256e-9f, -3.38525126e-7f, 1.06554126e-5f, -1.53404442e-4f,
                               -1.15744762e-4f, 0.10486605f, 2.3021965f};
#else
    constexpr float TERMS[] = {0.10294324f, 2.3022082f};
#endif
    const Floats4 square = z * z;
    Floats4 p = all<Floats4>(TERMS[0]);
    for (unsigned i = 1; i < sizeof TERMS / sizeof TERMS[0]; ++i)
        p = __builtin_elementwise_fma(square, p, all<Floats4>(TERMS[i]));
    return __builtin_elementwise_fma(z, p, more);
#endif
}
#endif

static __device__ inline Floats4 activated(Floats4 z) {
#if ACTIVATION == 1
    for (int t = 0; t < 4; ++t) z[t] = at_least_0(z[t]);
#elif ACTIVATION == 2
    Floats4 gate;
    for (int t = 0; t < 4; ++t) gate[t] = between_0_and_1(__builtin_fmaf(z[t], 1.0f / 6.0f, 0.5f));
    z *= gate;
#elif ACTIVATION >= 3
    // z * (e / (e + 2^-25)), where e = 2^(x - 25) is 1 at most, and 0 of NaN. So four sums lie between
    // 2^-25 and 1, and share a reciprocal: NaN and infinity stay where they are.
    constexpr float LEAST = 0x1p-25f;
    Floats4 e = exponents(z, all<Floats4>(-25.0f));
    for (int t = 0; t < 4; ++t) e[t] = between_0_and_1(power_of_two(e[t]));
    const Floats4 sums = e + LEAST;
    const Floats2 first{sums[0], sums[1]}, second{sums[2], sums[3]}, both = first * second;
    const Floats2 inverse = Floats2{both[1], both[0]} * reciprocal(both[0] * both[1]);
    const Floats2 of_first = inverse * second, of_second = inverse * first;
    z *= e * Floats4{of_first[0], of_first[1], of_second[0], of_second[1]};
#endif
    return z;
}

static __device__ inline float scale_of(float largest) {
    if (largest == 0.0f) return 1.0f;
    const float scale = largest / LARGEST_FP8, smallest = float_of(0x00800000u);
    return scale > smallest ? scale : smallest;
}

static __device__ inline bool is_finite(float value) {
    return (bits_of(value) & 0x7f800000u) != 0x7f800000u;
}

// Tiles of 64 columns wait in the loop on gfx950 with four waves, but not with five.
#if TILE_N == 64 && !defined(__gfx942__)
#define WAVES_AT_ONCE WAVES_OF_SIMD(5)
#else
#define WAVES_AT_ONCE
#endif

extern "C" __global__ __launch_bounds__(256) WAVES_AT_ONCE void gemm_norm(
    const unsigned char* __restrict__ a, const float* __restrict__ a_scale,
    const unsigned char* __restrict__ b, const float* __restrict__ b_scale, void* __restrict__ out,
    float* __restrict__ out_scale, const float* __restrict__ bias, const float* __restrict__ weight,
    const float* __restrict__ shift, int m, int n, int k, int a_stride, int b_stride, int out_stride,
    int a_scale_stride, int b_scale_stride, int out_scale_stride, float eps) {
    __shared__ Words4 stages[STAGES * STAGE];
    const int first_m = block_index() * TILE_M;
    const int thread = thread_index(), lane = thread % WAVE, wave = uniform(thread / WAVE);
    const int quarter = lane / 16, line = lane % 16;
    const int wave_m = wave / WAVES_N * WAVE_M, wave_n = wave % WAVES_N * WAVE_N;
    // A lane has DOWN neighboring rows, 16 apart in local memory.
    const int place = wave_m + line, own_row = wave_m + DOWN * line;
    const int own_column = wave_n + 4 * TOGETHER * quarter;

    const int rows = m - first_m < TILE_M ? m - first_m : TILE_M;
    Rows<TILE_M, WAVES> left_rows(
        a + static_cast<long>(first_m) * a_stride, rows, a_stride, k, wave,
        [](unsigned row) {
            return row / WAVE_M * WAVE_M + row % 16 * DOWN + row % WAVE_M / 16;
        });
#if ALONE
    Fragments<ACROSS> right_rows(
        b, n, b_stride, k, [&](int j) { return wave_n + column_of(j, line); });
#else
    Rows<TILE_N, WAVES> right_rows(b, n, b_stride, k, wave, [](unsigned row) {
        return row / WAVE_N * WAVE_N + column_of(row % WAVE_N / 16, row % 16);
    });
#endif
    OfRows scales_of_a;  // of the step that is on its way
    float scales_of_b[GROUPS];
    Floats2 factors[GROUPS][(DOWN + 1) / 2];  // of a step's sums, for pairs of rows
    const float* next_scales = a_scale + first_m;
    unsigned next_scale = 0;
    const auto begin = [&](Words4* stage) {
        left_rows.begin(stage);
        left_rows.advance();
#if !ALONE
        right_rows.begin(stage + TILE_M * PARTS);
        right_rows.advance();
#endif
#if BY_GROUP
        const Buffer of_rows(next_scales, 4 * rows);
        scales_of_a = of_rows.load_floats<OfRows>(4 * own_row);
        for (int group = 0; group < GROUPS; ++group) {
            const int column = wave_n + 128 * group < n ? wave_n + 128 * group : 0;
            // As the others, though all lanes share it: waits for local memory would wait for a scalar.
            const Buffer of_b(b_scale + column / 128 * b_scale_stride, (k + STEP - 1) / STEP * 4);
            scales_of_b[group] = float_of(of_b.load_4_bytes(next_scale));
        }
        next_scales += a_scale_stride;
        next_scale += 4;
#endif
    };
    const auto put = [&](Words4* stage) {
        left_rows.put(stage);
#if !ALONE
        right_rows.put(stage + TILE_M * PARTS);
#endif
    };
    const auto wait = [&] {
#if ALONE
        left_rows.wait<right_rows.LOADS>();
#else
        left_rows.wait();
        right_rows.wait();
#endif
#if BY_GROUP
        for (int group = 0; group < GROUPS; ++group)
            for (int i = 0; i < DOWN; ++i)
                factors[group][i / 2][i % 2] = scales_of_a[i] * (scales_of_b[group] * RAISED);
#endif
        barrier();
    };
    const auto end_tail = [&](Words4* stage, int left) {
        clear_tail<STAGED, WAVES * WAVE>(stage, left);
#if ALONE
        right_rows.clear_tail(left);
#endif
    };

    Floats4 sums[DOWN][ACROSS] = {};
    // The product of a step. It calls `first` when its first fragments are on their way from local
    // memory, `last` before its last products, when it has read all of them, and `used` behind the
    // products of each fragment of b.
    const auto add = [&](const Words4* stage, auto first, auto last, auto used) {
        Words8 left[DOWN], right[AHEAD];
        const auto read = [&](int j) {
#if ALONE
            right[j] = right_rows.fragment(j);
#else
            right[j % AHEAD] = fragment(stage, TILE_M + wave_n + 16 * j + line, quarter);
#endif
        };
        read(0);
        for (int i = 0; i < DOWN; ++i) left[i] = fragment(stage, place + 16 * i, quarter);
        for (int j = 1; j < AHEAD; ++j) read(j);
        keep_order();
        first();
        keep_order();
#if BY_GROUP
        Floats4 parts[BEHIND + 1];  // products without their scales
        const auto scale = [&](int done) {
            const int i = done % DOWN, j = done / DOWN;
            if (done >= 0)
                sums[i][j] += parts[done % (BEHIND + 1)] * factors[j / 8][i / 2][i % 2];
        };
        // Else clang 22 copies one beside a register that a load is filling, and waits for the load.
        for (auto& of : factors)
            for (Floats2& pair : of) hide(pair);
#endif
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) {
            if (j == LATE) last();
#if BY_GROUP
#pragma unroll
            for (int i = 0; i < DOWN; ++i) {
                const int number = j * DOWN + i;
                parts[number % (BEHIND + 1)] = multiply_lowered(right[j % AHEAD], left[i]);
                scale(number - BEHIND);
            }
#else
#pragma unroll
            for (int part = 0; part < INSTRUCTIONS; ++part) {  // those of one product wait for each other
                for (int i = 0; i < DOWN; ++i)
                    sums[i][j] = multiply_part(right[j % AHEAD], left[i], sums[i][j], part);
                keep_order();
            }
#endif
            if (j + AHEAD < ACROSS) read(j + AHEAD);
            used(j);
            keep_order();
        }
#if BY_GROUP
        for (int last = BEHIND; last > 0; --last) scale(DOWN * ACROSS - last);
#endif
    };

    // What the epilogue needs comes before the loop, if there are registers for it.
    OfRows of_rows;
    Floats4 of_columns[ACROSS], of_bias[ACROSS], of_weight[ACROSS], of_shift[ACROSS];
    const auto load = [&](const float* from, Floats4* to) {
        const Buffer columns(from, from ? 4 * n : 0);
        for (int j = 0; j < ACROSS; ++j)
            to[j] = __builtin_bit_cast(
                Floats4, columns.load_16_bytes(4 * (own_column + column_of(j, 0))));
    };
    const auto load_row_scales = [&] {
#if !BY_GROUP
        const Buffer row_scales(a_scale + first_m, 4 * rows);
        of_rows = row_scales.load_floats<OfRows>(4 * own_row);
        load(b_scale, of_columns);
#endif
    };
    const auto load_vectors = [&] {
        load(bias, of_bias);
        load(weight, of_weight);
        load(shift, of_shift);
    };
    if (ACROSS <= 4) load_row_scales();
    if (VECTORS_FIRST) load_vectors();

    Words4 *now = stages, *next = stages + (STAGES - 1) * STAGE;
    int left = k;  // with this step
    const auto load_next = [&](int j) {
#if ALONE
        right_rows.load(j);
#endif
    };
    begin(now);
    keep_order();  // `wait` counts loads
    for (int j = 0; j < ACROSS; ++j) load_next(j);
    keep_order();
    put(now);
    wait();
    const auto turn = [&] {
        const auto first = [&] { begin(next); };
        const auto last = [&] {
            if (STAGES == 1) barrier();  // all have read what is overwritten
            put(next);
        };
        add(now, first, last, load_next);
        wait();
        left -= STEP;
        Words4* const was = now;
        now = next;
        next = was;
    };
    if (left > STEP) {
        turn();
        while (left > STEP) turn();
    } else {
        for (auto& row : sums)
            for (Floats4& some : row) hide(some);  // else its zeros would be made before the branch
    }
    if (left < STEP) end_tail(now, left);
    add(now, [] {}, [] {}, [](int) {});  // the last step: nothing is loaded
    if (STAGES == 1) barrier();  // before sums are exchanged there
    for (auto& row : sums)
        for (Floats4& some : row) settle(some);

    if (ACROSS > 4) load_row_scales();
    if (!VECTORS_FIRST) load_vectors();
    // Twice: for whole tiles, where nothing is checked, and for all others.
    const auto finish = [&](auto whole) {
        constexpr bool IS_WHOLE = decltype(whole)::VALUE;
        for (int i = 0; i < DOWN; ++i)
            for (int j = 0; j < ACROSS; ++j)
                sums[i][j] = BY_GROUP ? lowered(sums[i][j]) : sums[i][j] * of_rows[i] * of_columns[j];
        if (bias) {
            for (int i = 0; i < DOWN; ++i)
                for (int j = 0; j < ACROSS; ++j) sums[i][j] += of_bias[j];
        }
        const auto clear_columns = [&] {  // past n
            if (IS_WHOLE) return;
            for (int j = 0; j < ACROSS; ++j)
                for (int t = 0; t < 4; ++t)
                    for (int i = 0; i < DOWN; ++i)
                        sums[i][j][t] = own_column + column_of(j, t) < n ? sums[i][j][t] : 0.0f;
        };

        // Of rows, whose columns four lanes share, and WAVES neighboring waves.
        float* exchanged = reinterpret_cast<float*>(next);
        const auto of_whole_rows = [&](OfRows values, auto both, auto count) {
            constexpr int COUNT = decltype(count)::VALUE;
            for (int distance = 16; distance <= 32; distance *= 2)
                for (int i = 0; i < DOWN; ++i)
                    values[i] = both(values[i], value_across(values[i], distance));
            if constexpr (COUNT > 1) {
                float* const own = exchanged + exchange_place(place, wave % WAVES_N, WAVES_N);
                if (quarter == 0) {
                    for (int i = 0; i < DOWN; ++i) own[16 * i * WAVES_N] = values[i];
                }
                barrier();
                const float* from = exchanged + place * WAVES_N + wave % WAVES_N / COUNT * COUNT;
                for (int i = 0; i < DOWN; ++i) {
                    const auto* pairs = reinterpret_cast<const Floats2*>(from + 16 * i * WAVES_N);
                    values[i] = both(pairs[0][0], pairs[0][1]);
                    if (COUNT == 4) values[i] = both(values[i], both(pairs[1][0], pairs[1][1]));
                }
                exchanged += TILE_M * WAVES_N;  // the next ones go elsewhere: nobody waits for readers
            }
            return values;
        };
#if NORM
        const Constant<SPAN / OWN> sharing;
        const float share = SPAN == TILE_N ? (IS_WHOLE ? 1.0f / TILE_N : reciprocal(n)) : 1.0f / SPAN;
        clear_columns();
#pragma unroll
        for (int first = 0; first < ACROSS; first += OWN / 16) {
            const auto total = [](Floats4 four) {
                const Floats2 two = Floats2{four[0], four[1]} + Floats2{four[2], four[3]};
                return two[0] + two[1];
            };
            OfRows values;
#if NORM == 1
            for (int i = 0; i < DOWN; ++i) {
                Floats4 four{};
                for (int j = first; j < first + OWN / 16; ++j) four += sums[i][j];
                values[i] = total(four);
            }
            const OfRows less = of_whole_rows(values * -share, Sum{}, sharing);
            for (int i = 0; i < DOWN; ++i)
                for (int j = first; j < first + OWN / 16; ++j) sums[i][j] += less[i];  // packed, as differences are not
            clear_columns();
#endif
            for (int i = 0; i < DOWN; ++i) {
                Floats4 four{};
                for (int j = first; j < first + OWN / 16; ++j) four += sums[i][j] * sums[i][j];
                values[i] = total(four);
            }
            const OfRows squares = of_whole_rows(values * share, Sum{}, sharing);
            for (int i = 0; i < DOWN; ++i) {
                const float inverse = reciprocal_root(squares[i] + eps);
                for (int j = first; j < first + OWN / 16; ++j) sums[i][j] *= inverse;
            }
        }
#endif
        if (weight) {
            for (int i = 0; i < DOWN; ++i)
                for (int j = 0; j < ACROSS; ++j) sums[i][j] *= of_weight[j];
        }
        if (shift) {
            for (int i = 0; i < DOWN; ++i)
                for (int j = 0; j < ACROSS; ++j) sums[i][j] += of_shift[j];
        }
        for (auto& row : sums)
            for (Floats4& some : row) some = activated(some);

        Stored words[DOWN][ACROSS / TOGETHER];
#if OUT
        clear_columns();
#pragma unroll
        for (int first = 0; first < ACROSS; first += UNDER) {
            OfRows scale, largest{};
            Floats4 nothing{};  // NaN where a number is not finite
            for (int i = 0; i < DOWN; ++i) {
                for (int j = first; j < first + UNDER && j < ACROSS; ++j) {
                    largest[i] = largest_size(largest[i], sums[i][j]);
                    if (!NAN_IS_LARGEST) nothing += sums[i][j] * 0.0f;
                }
                if (NAN_IS_LARGEST) nothing[i] = largest[i] * 0.0f;
            }
            const bool are_finite =
                !any_lane(nothing[0] + nothing[1] + nothing[2] + nothing[3] != 0.0f);
#if OUT == 3
            for (int i = 0; i < DOWN; ++i) scale[i] = out_scale[0];
            const bool has_all_bits = (bits_of(scale[0]) + 1) << 9 == 0;
            const bool is_usual = are_finite && !any_lane(!(scale[0] > 0x1p-60f && scale[0] < 0x1p60f) ||
                                                          has_all_bits);
#else
            if (!are_finite) {
                for (int i = 0; i < DOWN; ++i) {
                    largest[i] = 0.0f;
                    for (int j = first; j < first + UNDER && j < ACROSS; ++j) {
                        for (int t = 0; t < 4; ++t) {
                            // Not compared: on gfx950, clang 22 crashes on it behind silu.
                            const float size = __builtin_fabsf(sums[i][j][t]);
                            largest[i] = __builtin_fmaxf(largest[i], is_finite(size) ? size : 0.0f);
                        }
                    }
                }
            }
            largest = of_whole_rows(largest, Largest{}, Constant<UNDER_WAVES>{});
            // Of bits less 1, of which 0 has the most; and of the fraction above that from which a scale's
            // has all bits.
            unsigned smallest = ~0u, nearest = ~0u;
            for (int i = 0; i < DOWN; ++i) {
                const unsigned bits = bits_of(largest[i]) - 1;
                smallest = bits < smallest ? bits : smallest;
                const unsigned above = (bits_of(largest[i]) + 1 - bits_of(LARGEST_FP8)) << 9;
                nearest = above < nearest ? above : nearest;
            }
            const bool is_usual =
                are_finite && !any_lane(smallest < bits_of(0x1p-50f) - 1 || nearest == 0);
            if (is_usual) {
                constexpr float NEAR = 1.0f / LARGEST_FP8, REST = 1.0 / LARGEST_FP8 - NEAR;
                scale = quotient(largest, Inverse<OfRows>{all<OfRows>(NEAR), all<OfRows>(REST)});
                for (int i = 0; i < DOWN; ++i) scale[i] = largest[i] == 0.0f ? 1.0f : scale[i];
            } else {
                for (int i = 0; i < DOWN; ++i) scale[i] = scale_of(largest[i]);
            }
            if (quarter == 0 && wave % WAVES_N % UNDER_WAVES == 0 &&
                (IS_WHOLE || wave_n + 16 * first < n)) {
                for (int i = 0; i < DOWN; ++i) {
                    const long group = OUT == 2 ? (wave_n + 16 * first) / 128 : 0;
                    if (IS_WHOLE || own_row + i < rows)
                        out_scale[group * out_scale_stride + first_m + own_row + i] = scale[i];
                }
            }
#endif
            if (is_usual) {
                for (int i = 0; i < DOWN; ++i) {
                    const Inverse<float> inverse = inverse_of(scale[i]);
                    const Inverse<Floats4> inverses{all<Floats4>(inverse.near),
                                                    all<Floats4>(inverse.rest)};
                    for (int j = first; j < first + UNDER && j < ACROSS; ++j) {
                        Floats4 some = sums[i][j];
#if OUT == 3
                        const float limit = LARGEST_FP8 * scale[i];
                        for (int t = 0; t < 4; ++t)
                            some[t] = __builtin_amdgcn_fmed3f(some[t], -limit, limit);
#endif
                        words[i][j / TOGETHER][j % TOGETHER] = encode_four(quotient(some, inverses));
                    }
                }
            } else {
                for (int i = 0; i < DOWN; ++i) {
                    for (int j = first; j < first + UNDER && j < ACROSS; ++j) {
                        float ratios[4];
                        for (int t = 0; t < 4; ++t)
                            ratios[t] = is_finite(sums[i][j][t]) ? sums[i][j][t] / scale[i]
                                                                 : float_of(0x7fc00000u);
                        words[i][j / TOGETHER][j % TOGETHER] =
                            encode_pair(ratios[0], ratios[1]) | encode_pair(ratios[2], ratios[3]) << 16;
                    }
                }
            }
        }
#else
        for (int i = 0; i < DOWN; ++i) {
            for (int j = 0; j < ACROSS; ++j) {
                for (int pair = 0; pair < 2; ++pair)
                    words[i][j / TOGETHER][2 * (j % TOGETHER) + pair] =
                        bfloat16_pair(sums[i][j][2 * pair], sums[i][j][2 * pair + 1]);
            }
        }
#endif
        unsigned char* to = static_cast<unsigned char*>(out) +
                            SIZE * (static_cast<long>(first_m + own_row) * out_stride + own_column);
        if constexpr (IS_WHOLE) {
            for (int i = 0; i < DOWN; ++i, to += static_cast<long>(SIZE) * out_stride)
                for (int j = 0; j < ACROSS; j += TOGETHER)
                    *reinterpret_cast<Stored*>(to + SIZE * column_of(j, 0)) = words[i][j / TOGETHER];
            return;
        }
        for (int i = 0; i < DOWN; ++i, to += static_cast<long>(SIZE) * out_stride) {
            if (own_row + i >= rows) break;
            for (int j = 0; j < ACROSS; ++j) {
                for (int t = 0; t < 4; ++t) {
                    const int column = column_of(j, t), byte = SIZE * t;
                    const unsigned word = words[i][j / TOGETHER][WORDS * (j % TOGETHER) + byte / 4];
                    if (own_column + column < n)
                        *reinterpret_cast<Output*>(to + SIZE * column) =
                            static_cast<Output>(word >> 8 * (byte % 4));
                }
            }
        }
    };
    const bool is_aligned = (reinterpret_cast<unsigned long>(out) | SIZE * out_stride) % 16 == 0;
    if (rows == TILE_M && n == TILE_N && is_aligned)
        finish(Constant<1>{});
    else
        finish(Constant<0>{});
}
