// Adds the parts of sums that scaled_gemm_split.cu leaves in memory, and rounds once. Parts are added
// in one order, whichever block of that launch was done first.
//
//     parts: float32 [count, elements], contiguous
//     out:   float32, bfloat16 or float16 [elements]
//
// Macros, from scaled_gemm_split.py:
//
//     LINES  threads that share an element: each adds every LINES-th part, and one what they have
//     WIDTH  elements of a thread: 4 where all start at multiples of their bytes, else 1
//     OUT    4: float32, 2: bfloat16, 1: float16
#include "half_ptx.cuh"
#include "ptx.cuh"

constexpr int THREADS = 256;
constexpr int COLUMNS = THREADS / LINES;
static_assert(THREADS % LINES == 0 && (WIDTH == 1 || WIDTH == 4));

// What leaves in one store.
struct alignas(16) Floats {
    float value[4];
};
struct alignas(8) Words {
    unsigned value[2];
};

// To the nearest, ties to even.
__device__ __forceinline__ unsigned to_bfloat16(float value) {
    const unsigned bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

__device__ __forceinline__ unsigned rounded(float value) {
    return OUT == 2 ? to_bfloat16(value) : half_pair(value, 0.0f) & 0xffff;
}

__device__ __forceinline__ void store(char* out, long long first, const float* sum) {
    if constexpr (OUT == 4) {
        float* to = reinterpret_cast<float*>(out) + first;
        if constexpr (WIDTH == 4) {
            *reinterpret_cast<Floats*>(to) = Floats{{sum[0], sum[1], sum[2], sum[3]}};
        } else {
            *to = *sum;
        }
    } else {
        unsigned short* to = reinterpret_cast<unsigned short*>(out) + first;
        if constexpr (WIDTH == 4) {
            *reinterpret_cast<Words*>(to) = Words{
                {rounded(sum[0]) | rounded(sum[1]) << 16, rounded(sum[2]) | rounded(sum[3]) << 16}};
        } else {
            *to = static_cast<unsigned short>(rounded(*sum));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_parts(
    const float* parts, char* out, int count, int elements) {
    __shared__ float of_lines[LINES][COLUMNS * WIDTH];

    const int mine = threadIdx.x % COLUMNS, line = threadIdx.x / COLUMNS;
    const long long first = (static_cast<long long>(blockIdx.x) * COLUMNS + mine) * WIDTH;
    begin_in_turn();

    float sum[WIDTH] = {};
    if (first < elements) {
#pragma unroll 4
        for (int part = line; part < count; part += LINES) {
            const float* from = parts + static_cast<long long>(part) * elements + first;
            if constexpr (WIDTH == 4) {
                unsigned word[4];
                load_16_bytes(from, word);
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[i] += __uint_as_float(word[i]);
            } else {
                *sum += *from;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) of_lines[line][i * COLUMNS + mine] = sum[i];
    __syncthreads();
    if (line > 0 || first >= elements) return;
#pragma unroll
    for (int other = 1; other < LINES; ++other) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sum[i] += of_lines[other][i * COLUMNS + mine];
    }
    store(out, first, sum);
}
