// d[m, n] = (sum_k a[m, k] * b[n, k]) * sa * sb + bias[n] of FP8 matrices, rounded to bfloat16.
//
// a: [m, k] and b: [n, k], rows of any stride that is a multiple of 16 bytes, as the first is, less
// than 2^23; scales of rows, sa[m] and sb[n]; or sa[k / 128, m] and sb[n / 128, k / 128] of 1x128 and
// 128x128; or on gfx950 powers of two in a byte, sa[m, k / 32] and sb[n, k / 32] of 1x32, which the
// matrix instruction applies. What overflows of 1x128: RAISED in amd.hpp. Rows of d: any stride.
//
// A block of 4 waves, or of 8 (256 columns, 1x128), makes TILE_M x TILE_N sums, 128 of k at a time. One
// step in local memory is multiplied while the next comes, into a second stage or registers. Of 256
// columns with other scales, 4 waves have all 512 registers of their SIMDs: a wave reads 256 rows for
// 128 x 128 sums, not 192 for 128 x 64, and no other wave fills its waits.
//
// Macros: TILE_M, TILE_N (multiples of 32), SCALES (0 of rows, 1 of 1x128, 2 of 1x32).
#include "products.hpp"

#if SCALES == 2
typedef unsigned char Scale;
#else
typedef float Scale;
#endif

// Whether a wave has a SIMD for itself. With 1x128, sums are where vector instructions reach them: 256.
constexpr bool ALONE = TILE_N > 128 && SCALES != 1;
constexpr int WAVES_M = 2, WAVES_N = TILE_N > 128 && !ALONE ? 4 : 2, WAVES = WAVES_M * WAVES_N;
constexpr int WAVE_M = TILE_M / WAVES_M, WAVE_N = TILE_N / WAVES_N;
constexpr int DOWN = WAVE_M / 16, ACROSS = WAVE_N / 16;
constexpr int TOGETHER = ACROSS > 1 ? 2 : 1;  // fragments of b whose sums a lane stores at once
constexpr int STAGE = (TILE_M + TILE_N) * PARTS;  // places of a step
// What passes registers waits there until the step before has been read. With one stage of local memory
// instead of two, twice as many blocks fit a compute unit of gfx942, whose waves hide what comes late.
constexpr int STAGES = PAST_REGISTERS ? 2 : 1;
constexpr int AHEAD = ALONE ? DOWN / 2 : DOWN > 1 ? 2 : 1;  // fragments of a, which take 128 cycles to come
constexpr int HELD = ALONE ? DOWN : AHEAD;  // of these
// Instructions that do not wait for each other take turns. Behind which turn what came in registers is
// put into local memory: late, as it takes some 700 cycles to come, but 128 before others read it.
constexpr int TURNS = DOWN * (SCALES == 0 ? INSTRUCTIONS : ACROSS);
constexpr int AFTER = DOWN > 2 ? TURNS / DOWN : 1;  // turns
constexpr int LATE = TURNS > AFTER ? TURNS - AFTER - 1 : 0;
// No register is left for a bias in the loop.
constexpr bool IS_FULL = TILE_N == 256;
// Nor for the next scales beside what waits for local memory, a third product without its scales, and
// the number of a row: else 8 registers would lie in scratch memory.
constexpr bool LATE_SCALES = IS_FULL && SCALES == 1 && !PAST_REGISTERS;
constexpr int BEHIND = LATE_SCALES ? 1 : 2;
typedef unsigned int Stored __attribute__((ext_vector_type(2 * TOGETHER)));

// The column of each 16 * TOGETHER that row `line` of the j-th fragment of b is. A lane of `multiply`
// has four neighboring columns of the sums; those of two fragments are neighbors, too.
static __device__ inline int column_of(int j, int line) {
    return TOGETHER * (16 * (j / TOGETHER) + line / 4 * 4) + 4 * (j % TOGETHER) + line % 4;
}

extern "C" __global__ __launch_bounds__(64 * WAVES) void scaled_gemm(
    const unsigned char* __restrict__ a, const Scale* __restrict__ a_scale,
    const unsigned char* __restrict__ b, const Scale* __restrict__ b_scale,
    unsigned short* __restrict__ out, const unsigned short* __restrict__ bias, int m, int n, int k,
    int a_stride, int b_stride, int out_stride, int a_scale_stride, int b_scale_stride) {
    __shared__ Words4 stages[STAGES * STAGE];
    const unsigned tiles_m = (m + TILE_M - 1u) / TILE_M, tiles_n = (n + TILE_N - 1u) / TILE_N;
    const unsigned tile = tile_of(block_index(), tiles_m * tiles_n);
    const int first_m = tile / tiles_n * TILE_M, first_n = tile % tiles_n * TILE_N;
    const int thread = thread_index(), lane = thread % WAVE, wave = uniform(thread / WAVE);
    const int quarter = lane / 16, line = lane % 16;
    const int wave_m = wave / WAVES_N * WAVE_M, wave_n = wave % WAVES_N * WAVE_N;

    const int rows = m - first_m < TILE_M ? m - first_m : TILE_M;
    const int columns = n - first_n < TILE_N ? n - first_n : TILE_N;
    Rows<TILE_M, WAVES> left_rows(
        a + static_cast<long>(first_m) * a_stride, rows, a_stride, k, wave,
        [](int row) { return row; });
    Rows<TILE_N, WAVES> right_rows(
        b + static_cast<long>(first_n) * b_stride, columns, b_stride, k, wave,
        [](int row) { return column_of(row / 16, row % 16); });
    const auto put = [&](Words4* stage) {
        left_rows.put(stage);
        right_rows.put(stage + TILE_M * PARTS);
    };
    const auto wait = [&] {
        left_rows.wait();
        right_rows.wait();
        barrier();
    };

    // A lane's rows are 16 apart, its columns 4 * TOGETHER neighbors of each 16 * TOGETHER.
    const int own_row = wave_m + line, own_column = wave_n + 4 * TOGETHER * quarter;
    // Scales of the step that is on its way, for a lane's rows and columns.
#if SCALES == 1
    float scales_of_a[DOWN], scales_of_b;
    const float* next_scales = a_scale + first_m;
    unsigned scale_bytes = 4 * rows, next_scale = 0;
    const int scaled_column = first_n + (wave_n < columns ? wave_n : 0);  // a wave's lie in the same 128
    const float* const column_scales = b_scale + scaled_column / 128 * b_scale_stride;
#elif SCALES == 2
    int scales_of_a[DOWN], scales_of_b[ACROSS];
    unsigned next_scale = 0;
#endif
    const auto load_scales = [&](int left) {  // of k, with this step
#if SCALES == 1
        const Buffer of_rows(next_scales, scale_bytes);
        for (int i = 0; i < DOWN; ++i)
            scales_of_a[i] = float_of(of_rows.load_4_bytes(4 * (own_row + 16 * i)));
        // As the others, though all lanes share it: waits for local memory would wait for a scalar, too.
        const Buffer of_columns(column_scales, (k + STEP - 1) / STEP * 4);
        scales_of_b = float_of(of_columns.load_4_bytes(next_scale));
        next_scales += a_scale_stride;
        scale_bytes = left <= STEP ? 0 : scale_bytes;
        next_scale += 4;
#elif SCALES == 2
        const Buffer of_a(a_scale + static_cast<long>(first_m) * a_scale_stride + next_scale,
                          rows * a_scale_stride - next_scale);
        const Buffer of_b(b_scale + static_cast<long>(first_n) * b_scale_stride + next_scale,
                          columns * b_scale_stride - next_scale);
        for (int i = 0; i < DOWN; ++i)
            scales_of_a[i] = of_a.load_byte((own_row + 16u * i) * a_scale_stride + quarter);
        for (int j = 0; j < ACROSS; ++j)
            scales_of_b[j] = of_b.load_byte((wave_n + column_of(j, line)) * static_cast<unsigned>(b_scale_stride) + quarter);
#endif
    };
    const auto begin = [&](Words4* stage, int left) {
        left_rows.begin(stage);
        right_rows.begin(stage + TILE_M * PARTS);
        if (!LATE_SCALES) load_scales(left);
    };
    const auto advance = [&](int left) {  // of k, with the step that has begun
        const bool is_last = left <= STEP;
        left_rows.advance(is_last);
        right_rows.advance(is_last);
#if SCALES == 2
        next_scale += is_last ? 0 : 4;
#endif
    };

    Floats4 sums[DOWN][ACROSS] = {};
    Words8 right[ACROSS], left[HELD];
    const auto read_left = [&](const Words4* stage, int i) {
        left[i % HELD] = fragment(stage, wave_m + 16 * i + line, quarter);
    };
    const auto read_right = [&](const Words4* stage, int j) {
        right[j] = fragment(stage, TILE_M + wave_n + 16 * j + line, quarter);
    };
    const auto read = [&](const Words4* stage) {  // what the first products need
        for (int i = 0; i < AHEAD; ++i) read_left(stage, i);
        for (int j = 0; j < ACROSS; ++j) read_right(stage, j);
    };
    // The product of a step. It calls `first` when its first fragments are on their way from local
    // memory, then `further`, and `last` behind product LATE. A product of 16 rows is too short to hide
    // what `first` loads: it is called before fragments are read, and `further` while these come.
    // Fragments of a are read two rows ahead.
    const auto add = [&](const Words4* stage, auto first, auto further, auto last) {
        if (DOWN > 1) read(stage);
#if SCALES == 1
        float factors[DOWN];
        for (int i = 0; i < DOWN; ++i) factors[i] = scales_of_a[i] * (scales_of_b * RAISED);
#elif SCALES == 2
        int of_a[DOWN], of_b[ACROSS];  // before the next ones come
        for (int i = 0; i < DOWN; ++i) of_a[i] = scales_of_a[i];
        for (int j = 0; j < ACROSS; ++j) of_b[j] = scales_of_b[j];
#endif
        keep_order();
        first();
        if (DOWN == 1) {
            keep_order();
            read(stage);
            keep_order();
        }
        further();
        keep_order();
#if SCALES == 1
        // Products without their scales, which are applied BEHIND products later: at once, they would
        // wait until the product is done.
        Floats4 parts[BEHIND + 1];
        const auto scale = [&](int done) {
            const int i = done / ACROSS, j = done % ACROSS;
            if (done >= 0) sums[i][j] += parts[done % (BEHIND + 1)] * factors[i];
        };
#endif
#pragma unroll  // registers have no index
        for (int i = 0; i < DOWN; ++i) {
#pragma unroll
#if SCALES == 0  // instructions of one product wait for each other: those of several take turns
            for (int part = 0; part < INSTRUCTIONS; ++part) {
                for (int j = 0; j < ACROSS; ++j)
                    sums[i][j] = multiply_part(right[j], left[i % HELD], sums[i][j], part);
                keep_order();
                if (i * INSTRUCTIONS + part == LATE) last();
            }
#else
            for (int j = 0; j < ACROSS; ++j) {
#if SCALES == 1
                const int number = i * ACROSS + j;
                parts[number % (BEHIND + 1)] = multiply_lowered(right[j], left[i % HELD]);
                if (number == LATE) last();
                scale(number - BEHIND);
#else
                sums[i][j] = multiply_scaled(
                    right[j], left[i % HELD], sums[i][j], of_b[j], of_a[i]);
#endif
            }
#endif
            if (i + AHEAD < DOWN) read_left(stage, i + AHEAD);
            keep_order();
        }
#if SCALES == 1
        for (int last = BEHIND; last > 0; --last) scale(DOWN * ACROSS - last);
#endif
    };
#if SCALES != 1
    // The product of a step by a wave alone, whose instructions run while a matrix instruction does. In
    // the first half, of the upper rows, the lower ones are read; in the second, whatever has been used
    // for the last time is read of the next step, `after`, unless the step `is_last`. `between` follows
    // each instruction of the first half, `begin` every fourth (gfx942) or each of the second: numbered.
    const auto add_alone = [&](auto is_last, const Words4* stage, const Words4* after, auto between,
                               auto begin) {
#if SCALES == 2
        int of_a[DOWN], of_b[ACROSS];  // before the next ones come
        for (int i = 0; i < DOWN; ++i) of_a[i] = scales_of_a[i];
        for (int j = 0; j < ACROSS; ++j) of_b[j] = scales_of_b[j];
#endif
        const auto add_part = [&](int i, int j, int part) {
#if SCALES == 0
            sums[i][j] = multiply_part(right[j], left[i], sums[i][j], part);
            if (!PAST_REGISTERS) stay(sums[i][j]);  // else clang moves 152 of 256 registers in each step
#else
            sums[i][j] = multiply_scaled(right[j], left[i], sums[i][j], of_b[j], of_a[i]);
#endif
            keep_order();
        };
        constexpr int HALF = DOWN / 2;
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
#pragma unroll
            for (int part = 0; part < INSTRUCTIONS; ++part) {
#pragma unroll
                for (int j = 0; j < ACROSS; ++j) {
                    add_part(i, j, part);
                    const int number = (i * INSTRUCTIONS + part) * ACROSS + j;
                    if (number < HALF) read_left(stage, HALF + number);
                    if constexpr (!is_last.VALUE) between(number);
                    keep_order();
                }
            }
        }
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) {
#pragma unroll
            for (int part = 0; part < INSTRUCTIONS; ++part) {
#pragma unroll
                for (int i = HALF; i < DOWN; ++i) {
                    add_part(i, j, part);
                    if constexpr (!is_last.VALUE)
                        if (i % INSTRUCTIONS == 0)
                            begin(((j * INSTRUCTIONS + part) * HALF + i - HALF) / INSTRUCTIONS);
                    keep_order();
                }
            }
            if constexpr (!is_last.VALUE) {
                if (j < HALF) read_left(after, j);
                read_right(after, j);
            }
            keep_order();
        }
    };
#endif
    // Where less than a whole step is left: what lies behind it counts as 0, with scales of 1.
    const auto end_tail = [&](Words4* stage, int left) {
        clear_tail<TILE_M + TILE_N, WAVES * WAVE>(stage, left);
#if SCALES == 2
        for (int& scale : scales_of_a) scale = 32 * quarter < left ? scale : ONE_E8M0;
        for (int& scale : scales_of_b) scale = 32 * quarter < left ? scale : ONE_E8M0;
#endif
    };

#if SCALES == 0
    float of_rows[DOWN];
    Floats4 of_columns[ACROSS];
    const Buffer row_scales(a_scale + first_m, 4 * rows);
    const Buffer column_scales(b_scale + first_n, 4 * columns);
    const auto load_scales_of_rows = [&] {
        for (int i = 0; i < DOWN; ++i)
            of_rows[i] = float_of(row_scales.load_4_bytes(4 * (own_row + 16 * i)));
        for (int j = 0; j < ACROSS; ++j)
            of_columns[j] = __builtin_bit_cast(
                Floats4, column_scales.load_16_bytes(4 * (own_column + column_of(j, 0))));
    };
    constexpr bool LATE_ROWS = ALONE && !PAST_REGISTERS;  // no register is left for them in the loop
    if (!LATE_ROWS) load_scales_of_rows();
#endif
    unsigned short of_bias[ACROSS][4];
    const auto load_bias = [&] {
        // From the first one on: one address and its offsets save a third of the prologue.
        const Buffer biases(bias, bias ? 2u * n : 0);
        for (int j = 0; j < ACROSS; ++j)
            for (int t = 0; t < 4; ++t)
                of_bias[j][t] =
                    biases.load_2_bytes(2u * (first_n + own_column) + 2 * column_of(j, t));
    };
    if (!IS_FULL) load_bias();

    Words4 *now = stages, *next = stages + (STAGES - 1) * STAGE;
    int remaining = k;  // with this step
    const auto swap = [&] {
        remaining -= STEP;
        Words4* const was = now;
        now = next;
        next = was;
    };
    if constexpr (!ALONE) {
        begin(now, remaining);
        if (LATE_SCALES) load_scales(remaining);
        advance(remaining);
        put(now);
        wait();
        if (remaining < STEP) end_tail(now, remaining);
        const auto turn = [&] {
            const auto first = [&] { begin(next, remaining - STEP); };
            const auto further = [&] { advance(remaining - STEP); };
            const auto last = [&] {
                if (LATE_SCALES) keep_order();
                if (STAGES == 1) barrier();  // all have read what is overwritten
                put(next);
                if (LATE_SCALES) load_scales(remaining - STEP);
                keep_order();
            };
            add(now, first, further, last);
            wait();
            swap();
        };
        turn();
        while (remaining >= STEP) turn();
        if (remaining > 0) {
            end_tail(now, remaining);
            add(now, [] {}, [] {}, [] {});
        }
    }
#if SCALES != 1
    else {
        // Loads begin two steps ahead, where a step has just been read; scales one step ahead.
        constexpr int LEFT = left_rows.COUNT, BOTH = LEFT + right_rows.COUNT;
        const auto begin_one = [&](Words4* stage, int number, int left) {  // of k, with its step
            const bool ends = 0 < left && left <= STEP;
            if (number < LEFT) left_rows.begin(stage, number, ends);
            else if (number < BOTH) right_rows.begin(stage + TILE_M * PARTS, number - LEFT, ends);
        };
        const auto put_one = [&](Words4* stage, int number) {
            if (number < LEFT) left_rows.put(stage, number);
            else if (number < BOTH) right_rows.put(stage + TILE_M * PARTS, number - LEFT);
        };
        const auto advance_scales = [&](int left) {
#if SCALES == 2
            load_scales(left);
            next_scale += left <= STEP ? 0 : 4;
#endif
        };
        advance_scales(remaining);
        for (int i = 0; i < BOTH; ++i) begin_one(now, i, remaining);
        put(now);
        wait();
        if (remaining < STEP) end_tail(now, remaining);
        for (int i = 0; i < BOTH; ++i) begin_one(next, i, remaining - STEP);
        read(now);
        const auto turn = [&] {
            const auto between = [&](int number) {
                constexpr int LAST = DOWN / 2 * INSTRUCTIONS * ACROSS - 1, READ = LAST / 4;
                if (STAGES == 1) {
                    if (number == READ) barrier();  // all have read what is overwritten
                    if (number > READ && number % 4 == 0) put_one(next, number / 4 - READ / 4 - 1);
                }
                if (number == LAST) wait();
            };
            add_alone(Constant<0>{}, now, next, between, [&](int number) {
                if (number == 0) advance_scales(remaining - STEP);
                begin_one(now, number, remaining - 2 * STEP);
            });
            swap();
        };
        turn();
        while (remaining >= STEP) turn();
        if (remaining > 0) {
            end_tail(now, remaining);
            read(now);
            add_alone(Constant<1>{}, now, next, [](int) {}, [](int) {});
        }
    }
#endif
    for (auto& row : sums)
        for (Floats4& some : row) {
            if (ALONE) stay(some);
            else settle(some);
        }

#if SCALES == 0
    if (LATE_ROWS) load_scales_of_rows();
#endif
    int stored_row = thread;
    if (LATE_SCALES) hide(stored_row);  // else the row would take a register of the loop
    stored_row = wave_m + stored_row % 16;
    unsigned short* to =
        out + static_cast<long>(first_m + stored_row) * out_stride + first_n + own_column;
    const bool is_aligned = (reinterpret_cast<unsigned long>(out) | 2u * out_stride) % 16 == 0;
    const bool is_whole = rows == TILE_M && columns == TILE_N && is_aligned;
    const auto scaled = [&](int i, int j) {
#if SCALES == 0
        return sums[i][j] * of_rows[i] * of_columns[j];
#else
        return SCALES == 1 ? lowered(sums[i][j]) : sums[i][j];
#endif
    };
    const auto with_bias = [&](Floats4 four, int j) {
        for (int t = 0; t < 4; ++t) four[t] += number(of_bias[j][t]);
        return four;
    };
    typedef Stored Row[ACROSS / TOGETHER];
    const auto convert = [&](Row& words, int j, Floats4 four) {
        for (int pair = 0; pair < 2; ++pair)
            words[j / TOGETHER][2 * (j % TOGETHER) + pair] =
                bfloat16_pair(four[2 * pair], four[2 * pair + 1]);
    };
    const auto store = [&](const Row& words, auto whole) {
        for (int j = 0; j < ACROSS; j += TOGETHER) {
            const Stored some = words[j / TOGETHER];
            const int column = column_of(j, 0), left = columns - own_column - column;
            if (whole.VALUE || (is_aligned && left >= 4 * TOGETHER)) {
                *reinterpret_cast<Stored*>(to + column) = some;
            } else {
                for (int t = 0; t < 4 * TOGETHER; ++t)
                    if (t < left)
                        to[column + t] = static_cast<unsigned short>(some[t / 2] >> t % 2 * 16);
            }
        }
        to += 16l * out_stride;
    };
    if constexpr (ALONE) {
        // Row by row: sums lie where vector instructions do not reach them, and not all fit elsewhere.
        const auto finish = [&](auto has_bias, auto whole) {
#pragma unroll
            for (int i = 0; i < DOWN; ++i) {
                Row words;
                for (int j = 0; j < ACROSS; ++j) {
                    stay(sums[i][j]);
                    const Floats4 four = scaled(i, j);
                    convert(words, j, has_bias.VALUE ? with_bias(four, j) : four);
                }
                if (!whole.VALUE && stored_row + 16 * i >= rows) break;
                store(words, whole);
            }
        };
        const auto finish_tile = [&](auto whole) {
            if (bias) {
                load_bias();
                finish(Constant<1>{}, whole);
            } else {
                finish(Constant<0>{}, whole);
            }
        };
        if (is_whole)
            finish_tile(Constant<1>{});
        else
            finish_tile(Constant<0>{});
    } else {
        for (int i = 0; i < DOWN; ++i)
            for (int j = 0; j < ACROSS; ++j) sums[i][j] = scaled(i, j);
        if (IS_FULL) load_bias();
        if (bias) {
            for (int j = 0; j < ACROSS; ++j)
                for (int i = 0; i < DOWN; ++i) sums[i][j] = with_bias(sums[i][j], j);
        }
        Row words[DOWN];
        for (int i = 0; i < DOWN; ++i)
            for (int j = 0; j < ACROSS; ++j) convert(words[i], j, sums[i][j]);
        if (is_whole) {
            for (int i = 0; i < DOWN; ++i) store(words[i], Constant<1>{});
        } else {
#pragma unroll
            for (int i = 0; i < DOWN; ++i) {
                if (stored_row + 16 * i >= rows) break;
                store(words[i], Constant<0>{});
            }
        }
    }
}
