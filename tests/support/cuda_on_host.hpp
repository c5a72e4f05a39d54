// CUDA C++ on a CPU, for tests: a block's threads are coroutines that take turns at each exchange.
// Stands in for kernels/cuda/ptx.cuh and for what NVRTC knows by itself. What runs them is compiled
// once, from cuda_on_host.cpp: it would be half of the work for each of 300 programs.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

using std::max;
using std::min;

struct Index {
    unsigned x;
};
extern Index threadIdx, blockIdx, blockDim, gridDim;

static float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __frcp_rn(float a) { return 1.0f / a; }
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

// --- cuda_on_host.cpp

static constexpr unsigned MOST_THREADS = 1024;
extern unsigned exchanged[MOST_THREADS];
extern unsigned* of_blocks;  // what each made known in the first run
extern bool known;           // whether this is the second

// Every thread gets here before any goes on.
void __syncthreads();

// All blocks of a grid, one after the other. Where blocks exchange values, all run twice: first to
// make their own values known, whose outputs the second run overwrites.
void run_grid(unsigned blocks, unsigned threads, bool twice, void (*kernel)(const void*),
              const void* arguments);

template <typename Kernel>
static void run_grid(unsigned blocks, unsigned threads, bool twice, const Kernel& kernel) {
    run_grid(blocks, threads, twice, [](const void* of) { (*static_cast<const Kernel*>(of))(); },
             &kernel);
}

// To nearest even, saturating, NaN to 0x7f: by arithmetic in double, where all steps are exact.
unsigned encode(float value, int mantissa_bits, int smallest_exponent, double largest);

// Words for a block's memory: from the next round of the whole grid on, the block finds them there.
void tell(unsigned block, void* place, const void* eight_bytes);
void take_told(unsigned block);
void forget_told();

// A value of every thread of the warp, then what to make of them. A block where only some warps
// exchange works too: the others wait one turn more at their own barrier or are done.
template <typename Use>
static unsigned exchange(unsigned value, Use use) {
    const unsigned thread = threadIdx.x, first = thread / 32 * 32;
    exchanged[thread] = value;
    __syncthreads();
    const unsigned result = use(&exchanged[first], thread % 32);
    __syncthreads();
    return result;
}

// --- ptx.cuh

static void load_16_bytes(const void* from, unsigned* word) {
    if (reinterpret_cast<std::uintptr_t>(from) % 16) __builtin_trap();
    std::memcpy(word, from, 16);
}

static void load_16_cached_bytes(const void* from, unsigned* word) { load_16_bytes(from, word); }
static void begin_in_turn() {}

static unsigned shifted_words(unsigned low, unsigned high, int bits) {
    return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> bits);
}

static void begin_in_cluster() {}
template <int BLOCKS>
static unsigned largest_of_cluster(unsigned value, unsigned*) {
    of_blocks[blockIdx.x] = value;
    if (!known) return value;
    const unsigned* first = of_blocks + blockIdx.x / BLOCKS * BLOCKS;
    return *std::max_element(first, first + BLOCKS);
}

// Blocks run one after the other, and all of them twice: the second run finds what the first wrote.
static void barrier_of_grid() { __syncthreads(); }
static unsigned load_from_l2(const unsigned* from) { return *from; }
static void raise_to(unsigned* place, unsigned value) { *place = max(*place, value); }

static unsigned larger_halves(unsigned a, unsigned b) {
    return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff);
}

static unsigned largest_of_warp(unsigned value) {
    return exchange(value, [](const unsigned* of, unsigned) { return *std::max_element(of, of + 32); });
}

static unsigned value_across(unsigned value, int distance) {
    return exchange(value, [=](const unsigned* of, unsigned lane) { return of[lane ^ distance]; });
}

static bool any_of_warp(bool condition) { return largest_of_warp(condition); }

template <bool E5M2>
static unsigned encode_pair(float first, float second) {
    const int bits = E5M2 ? 2 : 3, smallest = E5M2 ? -14 : -6;
    const double largest = E5M2 ? 57344.0 : 448.0;
    return encode(first, bits, smallest, largest) | encode(second, bits, smallest, largest) << 8;
}

// What norm.cuh needs of what NVRTC knows by itself.
static float __int_as_float(int bits) { return __uint_as_float(bits); }
static float __fdividef(float a, float b) { return a / b; }
#define __expf(v) std::exp(v)  // the name of a function of glibc's
static float __saturatef(float v) { return v > 0.0f ? std::min(v, 1.0f) : 0.0f; }
static float rsqrtf(float v) { return 1.0f / std::sqrt(v); }

static float __shfl_xor_sync(unsigned, float value, int distance) {
    return __uint_as_float(value_across(__float_as_uint(value), distance));
}

struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
