// What runs programs of cuda_on_host.hpp.
#include "cuda_on_host.hpp"

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

Index threadIdx, blockIdx, blockDim, gridDim;
unsigned exchanged[MOST_THREADS];
unsigned* of_blocks;
bool known;

struct Thread {
    ucontext_t begin;
    jmp_buf where;
    bool begun = false, done = false;
};
static constexpr std::size_t STACK_BYTES = 64 << 10;
static ucontext_t scheduler_context;
static jmp_buf scheduler;
static std::vector<Thread> block;
static void (*body)(const void*);
static const void* arguments_of_body;

// Contexts begin threads; jumps, which ask nothing of the system, take turns between them.
static void run_thread() {
    body(arguments_of_body);
    block[threadIdx.x].done = true;
    _longjmp(scheduler, 1);
}

static void take_turn(Thread& thread) {
    if (_setjmp(scheduler)) return;
    if (thread.begun) _longjmp(thread.where, 1);
    thread.begun = true;
    swapcontext(&scheduler_context, &thread.begin);
}

void __syncthreads() {
    if (!_setjmp(block[threadIdx.x].where)) _longjmp(scheduler, 1);
}

static void run_block(unsigned index, unsigned threads) {
    static char* const stacks = new char[MOST_THREADS * STACK_BYTES];
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

void run_grid(unsigned blocks, unsigned threads, bool twice, void (*kernel)(const void*),
              const void* arguments) {
    std::vector<unsigned> values(blocks);
    of_blocks = values.data();
    gridDim.x = blocks;
    body = kernel;
    arguments_of_body = arguments;
    for (int run = twice ? 0 : 1; run < 2; ++run) {
        known = run == 1;
        for (unsigned index = 0; index < blocks; ++index) run_block(index, threads);
    }
}

unsigned encode(float value, int mantissa_bits, int smallest_exponent, double largest) {
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

static std::map<std::pair<unsigned, void*>, unsigned long long> told;

void tell(unsigned block, void* place, const void* eight_bytes) {
    std::memcpy(&told[{block, place}], eight_bytes, 8);
}

void take_told(unsigned block) {
    for (const auto& [where, words] : told) {
        if (where.first == block) std::memcpy(where.second, &words, 8);
    }
}

void forget_told() { told.clear(); }
