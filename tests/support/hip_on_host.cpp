// Runs one launch of a program of hip_on_host.hpp on buffers from a file, and writes them back.
#include "hip_on_host.hpp"

#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

constexpr std::size_t STACK_BYTES = 256 << 10;

// --- lanes that take turns

struct Lane {
    ucontext_t context;
    Waits waits = Waits::NOT;
};
static std::vector<Lane> lanes;
static ucontext_t scheduler;
static const void* scheduler_stack;
static std::size_t scheduler_bytes;
static std::vector<char*> buffers;
static std::vector<std::size_t> bytes;
static std::vector<long> numbers;
int current, current_block;
bool reversed;

static char* stack_of(int lane) {
    static char* const stacks = new char[MOST_THREADS * STACK_BYTES];
    return stacks + static_cast<std::size_t>(lane) * STACK_BYTES;
}

void fail(const char* why) {
    std::fprintf(stderr, "hip_on_host: %s\n", why);
    std::abort();
}

void wait_for(Waits what) {
    Lane& lane = lanes[current];
    lane.waits = what;
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(
        what == Waits::DONE ? nullptr : &fake, scheduler_stack, scheduler_bytes);
    swapcontext(&lane.context, &scheduler);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}

static void run_lane() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes);
    call(buffers, numbers);
    wait_for(Waits::DONE);
}

static void take_turn(int lane) {
    current = lane;
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stack_of(lane), STACK_BYTES);
    swapcontext(&scheduler, &lanes[lane].context);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}

// Lanes first to first + 63, until all of them wait for the block or are done.
static void run_wave(int first) {
    for (bool together = true; together;) {
        for (int lane = first; lane < first + LANES; ++lane)
            if (lanes[lane].waits != Waits::DONE) take_turn(lane);
        together = false;
        for (int lane = first; lane < first + LANES; ++lane)
            together = together || lanes[lane].waits == Waits::FOR_WAVE;
        for (int lane = first; together && lane < first + LANES; ++lane)
            if (lanes[lane].waits == Waits::FOR_BLOCK) fail("lanes of a wave went different ways");
    }
}

static void run_grid(int blocks, int threads) {
    for (current_block = 0; current_block < blocks; ++current_block) {
        lanes.assign(threads, Lane());
        for (int lane = 0; lane < threads; ++lane) {
            ucontext_t& context = lanes[lane].context;
            getcontext(&context);
            context.uc_stack.ss_sp = stack_of(lane);
            context.uc_stack.ss_size = STACK_BYTES;
            makecontext(&context, run_lane, 0);
        }
        for (bool running = true; running;) {
            running = false;
            for (int turn = 0; turn < threads / LANES; ++turn) {
                const int first = (reversed ? threads / LANES - 1 - turn : turn) * LANES;
                run_wave(first);
                for (int lane = first; lane < first + LANES; ++lane)
                    running = running || lanes[lane].waits != Waits::DONE;
            }
        }
    }
}

// --- buffers

static void read_buffers(const char* path) {
    std::FILE* file = std::fopen(path, "rb");
    if (!file) fail("no file of buffers");
    std::uint64_t size;
    while (std::fread(&size, sizeof size, 1, file) == 1) {
        char* memory = nullptr;
        if (size) memory = static_cast<char*>(std::aligned_alloc(16, (size + 15) / 16 * 16));
        if (size && std::fread(memory, 1, size, file) != size) fail("a buffer is cut");
        if (size % 16) __asan_poison_memory_region(memory + size, 16 - size % 16);
        buffers.push_back(memory);
        bytes.push_back(size);
    }
    std::fclose(file);
}

static void write_buffers(const char* path) {
    std::FILE* file = std::fopen(path, "wb");
    for (std::size_t i = 0; i < buffers.size(); ++i)
        if (bytes[i]) std::fwrite(buffers[i], 1, bytes[i], file);
    std::fclose(file);
}

int main(int, char** words) {
    read_buffers(words[1]);
    reversed = std::atoi(words[2]);
    for (char** word = words + 4; *word; ++word) numbers.push_back(std::atol(*word));
    run_grid(std::atoi(words[3]), THREADS_OF_A_BLOCK);
    write_buffers(words[1]);
}
