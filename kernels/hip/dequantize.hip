// x = rn(q * s), to bfloat16 or float32.
//
// q: [rows, columns], rows of any stride that is a multiple of 16 bytes; x: any row stride. One kernel
// serves all scales: s[row / ROWS_OF_SCALE * down_stride + column / COLUMNS_OF_SCALE * across_stride];
// those of 32 columns are powers of two in a byte, 2^(byte - 127).
//
// A thread has 16 neighboring bytes of q.
//
// Macros: WIDE (whether x is float32), ROWS_OF_SCALE, COLUMNS_OF_SCALE.
#include "numbers.hpp"

#if COLUMNS_OF_SCALE == 32
typedef unsigned char Scale;
// 2^-127, which is subnormal, has no exponent of its own.
static __device__ inline float number_of(Scale byte) {
    const unsigned exponent = static_cast<unsigned>(byte) << 23;
    return float_of(byte == 255 ? 0x7fc00000u : byte ? exponent : 0x00400000u);
}
#else
typedef float Scale;
static __device__ inline float number_of(Scale scale) { return scale; }
#endif

constexpr int THREADS = 256, EACH = 16;

extern "C" __global__ __launch_bounds__(256) void dequantize(
    const unsigned char* data, const Scale* scale, void* out, int rows, int columns,
    long data_stride, long out_stride, int down_stride, int across_stride) {
    const int across = (columns + EACH - 1) / EACH;
    const long piece = static_cast<long>(block_index()) * THREADS + thread_index();
    if (piece >= static_cast<long>(rows) * across) return;
    const long row = piece / across;
    const int column = static_cast<int>(piece % across) * EACH;
    const float own = number_of(
        scale[row / ROWS_OF_SCALE * down_stride + column / COLUMNS_OF_SCALE * across_stride]);
    const Words4 bytes = load_16_bytes(data + row * data_stride + column);
    for (int i = 0; i < 4; ++i) {
        const float four[4] = {decoded<0>(bytes[i]), decoded<1>(bytes[i]), decoded<2>(bytes[i]),
                               decoded<3>(bytes[i])};
        for (int j = 0; j < 4; ++j) {
            if (column + 4 * i + j >= columns) return;
            const long place = row * out_stride + column + 4 * i + j;
#if WIDE
            static_cast<float*>(out)[place] = four[j] * own;
#else
            static_cast<unsigned short*>(out)[place] = rounded(four[j] * own);
#endif
        }
    }
}
