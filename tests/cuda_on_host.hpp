// CUDA C++ on a CPU, for tests: a block's threads are coroutines that take turns at each exchange.
// Stands in for kernels/cuda/ptx.cuh and for what NVRTC knows by itself.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

using std::max;
using std::min;

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

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

// --- coroutines

struct Thread {
    ucontext_t begin;
    jmp_buf where;
    bool begun = false, done = false;
};
static constexpr unsigned MOST_THREADS = 1024, STACK_BYTES = 64 << 10;
static ucontext_t scheduler_context;
static jmp_buf scheduler;
static std::vector<Thread> block;
static std::function<void()> body;
static unsigned exchanged[MOST_THREADS];

// Contexts begin threads; jumps, which ask nothing of the system, take turns between them.
static void run_thread() {
    body();
    block[threadIdx.x].done = true;
    _longjmp(scheduler, 1);
}

static void take_turn(Thread& thread) {
    if (_setjmp(scheduler)) return;
    if (thread.begun) _longjmp(thread.where, 1);
    thread.begun = true;
    swapcontext(&scheduler_context, &thread.begin);
}

// Every thread gets here before any goes on.
static void __syncthreads() {
    if (!_setjmp(block[threadIdx.x].where)) _longjmp(scheduler, 1);
}

static void run_block(unsigned index, unsigned threads, std::function<void()> kernel) {
    static char* const stacks = new char[MOST_THREADS * STACK_BYTES];
    body = kernel;
    blockDim.x = threads;
    block = std::vector<Thread>(threads);
    for (unsigned thread = 0; thread < threads; ++thread) {
        ucontext_t& context = block[thread].begin;
        getcontext(&context);
        context.uc_stack.ss_sp = stacks + thread * STACK_BYTES;
        context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&context, run_thread, 0);
    }
    for (bool running = true; running;) {
        running = false;
        for (unsigned thread = 0; thread < threads; ++thread) {
            if (block[thread].done) continue;
            threadIdx.x = thread;
            blockIdx.x = index;
            take_turn(block[thread]);
            running = running || !block[thread].done;
        }
    }
}

// All blocks of a grid, one after the other. Where blocks exchange values, all run twice: first to
// make their own values known, whose outputs the second run overwrites.
static std::vector<unsigned> of_blocks;
static bool known;

static void run_grid(
    unsigned blocks, unsigned threads, bool twice, std::function<void()> kernel) {
    gridDim.x = blocks;
    of_blocks.assign(blocks, 0);
    for (int run = twice ? 0 : 1; run < 2; ++run) {
        known = run == 1;
        for (unsigned index = 0; index < blocks; ++index) run_block(index, threads, kernel);
    }
}

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
    const auto first = of_blocks.begin() + blockIdx.x / BLOCKS * BLOCKS;
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

// To nearest even, saturating, NaN to 0x7f: by arithmetic in double, where all steps are exact.
static unsigned encode(float value, int mantissa_bits, int smallest_exponent, double largest) {
    if (std::isnan(value)) return 0x7f;
    const unsigned sign = std::signbit(value) ? 0x80 : 0;
    const double size = std::fabs(static_cast<double>(value));
    const int exponent = size == 0 ? smallest_exponent : max(std::ilogb(size), smallest_exponent);
    const double quantum = std::ldexp(1.0, exponent - mantissa_bits);
    const double rounded = min(std::nearbyint(size / quantum) * quantum, largest);
    if (rounded < std::ldexp(1.0, smallest_exponent)) {  // subnormal
        return sign | static_cast<unsigned>(rounded / std::ldexp(1.0, smallest_exponent - mantissa_bits));
    }
    const int power = std::ilogb(rounded);
    const unsigned fraction = static_cast<unsigned>(
        (std::ldexp(rounded, -power) - 1.0) * (1 << mantissa_bits));
    return sign | static_cast<unsigned>(power - smallest_exponent + 1) << mantissa_bits | fraction;
}

template <bool E5M2>
static unsigned encode_pair(float first, float second) {
    const int bits = E5M2 ? 2 : 3, smallest = E5M2 ? -14 : -6;
    const double largest = E5M2 ? 57344.0 : 448.0;
    return encode(first, bits, smallest, largest) | encode(second, bits, smallest, largest) << 8;
}
