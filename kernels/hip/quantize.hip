// Quantize rows, or groups of their columns, to FP8 with one or two reads of x:
//
//     s = max(rn(amax / MAX), 2^-126),  1 where amax is 0;  q = cast(rn(x / s))
//
// Scales of 32 columns are rounded up to powers of two, and stored as a byte: 2^(byte - 127).
//
// x: [rows, columns], bfloat16 or float32, any row stride; q: [rows, columns], rows of any stride
// that is a multiple of 16 bytes. amax is over finite values. Scales of 128 columns:
// s[group, row]; of 32: s[row, group].
//
// A team of TEAM lanes has a row, or a group, 8 neighboring numbers a lane at once. Rows that are
// longer than a team holds are read twice, the second time from the cache.
//
// Macros: GROUP (columns under one scale: 128 or 32; 0: the row), WIDE (whether x is float32), ALIGNED
// (whether rows of x start at multiples of 16 bytes).
#include "numbers.hpp"

constexpr int THREADS = 256, EACH = 8;
constexpr int TEAM = GROUP ? GROUP / EACH : WAVE;
#if GROUP == 32
typedef unsigned char Scale;
#else
typedef float Scale;
#endif
#if WIDE
typedef float Number;
#else
typedef unsigned short Number;
#endif

// 8 numbers from x[column] on; 0 past the last.
static __device__ inline void load(const Number* x, int column, int columns, float* numbers) {
#if ALIGNED
    if (column + EACH <= columns) {
        constexpr int WORDS = EACH * static_cast<int>(sizeof(Number)) / 4;
        for (int i = 0; i < WORDS; i += 4) {
            const Words4 four = load_16_bytes(reinterpret_cast<const unsigned*>(x + column) + i);
            for (int j = 0; j < 4; ++j) {
#if WIDE
                numbers[i + j] = float_of(four[j]);
#else
                numbers[2 * (i + j)] = float_of(four[j] << 16);
                numbers[2 * (i + j) + 1] = float_of(four[j] & 0xffff0000u);
#endif
            }
        }
        return;
    }
#endif
    for (int i = 0; i < EACH; ++i) numbers[i] = column + i < columns ? number(x[column + i]) : 0.0f;
}

static __device__ inline float largest_of(const float* numbers) {
    float largest = 0.0f;
    for (int i = 0; i < EACH; ++i) {
        const float size = float_of(bits_of(numbers[i]) & 0x7fffffffu);
        if (bits_of(size) < 0x7f800000u && size > largest) largest = size;
    }
    return largest;
}

static __device__ inline float scale_of(float largest) {
    if (largest == 0.0f) return 1.0f;
    const float scale = largest / LARGEST_FP8, smallest = float_of(0x00800000u);
    if (!(scale > smallest)) return smallest;
    return GROUP == 32 ? float_of((bits_of(scale) + 0x007fffffu) & 0x7f800000u) : scale;
}

// As it is stored: of a power of two its exponent.
static __device__ inline Scale stored(float scale) {
#if GROUP == 32
    return static_cast<Scale>(bits_of(scale) >> 23);
#else
    return scale;
#endif
}

// 8 numbers as FP8; what is past the last column is not written.
static __device__ inline void store(
    unsigned char* data, int column, int columns, const float* numbers, float scale) {
    unsigned pairs[EACH / 2];
    for (int i = 0; i < EACH / 2; ++i) {
        float two[2];
        for (int j = 0; j < 2; ++j) {
            const float value = numbers[2 * i + j];
            const bool finite = (bits_of(value) & 0x7f800000u) != 0x7f800000u;
            two[j] = finite ? value / scale : float_of(0x7fc00000u);
        }
        pairs[i] = encode_pair(two[0], two[1]);
    }
    if (column + EACH <= columns) {
        unsigned* words = reinterpret_cast<unsigned*>(data + column);
        for (int i = 0; i < EACH / 4; ++i) words[i] = pairs[2 * i] | pairs[2 * i + 1] << 16;
        return;
    }
    for (int i = 0; i < EACH; ++i)
        if (column + i < columns)
            data[column + i] = static_cast<unsigned char>(pairs[i / 2] >> 8 * (i % 2));
}

extern "C" __global__ __launch_bounds__(256) void quantize(
    const Number* x, unsigned char* data, Scale* scale, int rows, int columns, long x_stride,
    long data_stride, int scale_stride) {
    const int teams = GROUP ? (columns + GROUP - 1) / (GROUP ? GROUP : 1) : 1;
    const long team = (static_cast<long>(block_index()) * THREADS + thread_index()) / TEAM;
    const int place = thread_index() % TEAM;
    const bool counts = team < static_cast<long>(rows) * teams;
    const long row = counts ? team / teams : 0;
    const int group = counts ? static_cast<int>(team % teams) : 0;
    const Number* from = x + row * x_stride;
    const int first = group * GROUP + EACH * place, step = GROUP ? GROUP : WAVE * EACH;
    const int end = GROUP && (group + 1) * GROUP < columns ? (group + 1) * GROUP : columns;

    float numbers[EACH], largest = 0.0f;
    for (int column = first; column < end; column += step) {
        load(from, column, end, numbers);
        const float here = largest_of(numbers);
        largest = here > largest ? here : largest;
    }
    for (int distance = TEAM / 2; distance; distance /= 2) {
        const float other = value_across(largest, distance);
        largest = other > largest ? other : largest;
    }
    if (!counts) return;
    const float own = scale_of(largest);
    const long of_group = static_cast<long>(GROUP == 32 ? row : group) * scale_stride;
    if (place == 0) scale[of_group + (GROUP == 32 ? group : row)] = stored(own);
    unsigned char* to = data + row * data_stride;
    for (int column = first; column < end; column += step) {
        if (step < end - first || column != first) load(from, column, end, numbers);
        store(to, column, end, numbers, own);
    }
}
