// A CDNA GPU on a CPU, for tests: stands in for kernels/hip/amd.hpp. Each lane is a coroutine. Lanes
// of a wave take turns at what they do together; a wave runs on until a barrier of its block, before
// another begins, so that what a missing barrier would let through is seen in one of both orders of
// waves. FNUZ is 1 for gfx942 and 0 for gfx950.
#pragma once
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)
#define LARGEST_FP8 (FNUZ ? 240.0f : 448.0f)
#define NAN_FP8 (FNUZ ? 0x80u : 0x7fu)

template <typename T, int COUNT>
struct alignas(4 * COUNT) Vector {
    T of[COUNT] = {};
    T& operator[](int i) { return of[i]; }
    T operator[](int i) const { return of[i]; }
};
typedef Vector<unsigned, 4> Words4;
typedef Vector<int, 8> Words8;
typedef Vector<float, 4> Floats4;

constexpr int WAVE = 64, MOST_THREADS = 1024, STACK_BYTES = 256 << 10;

// --- lanes that take turns

enum class Waits { NOT, FOR_WAVE, FOR_BLOCK, DONE };
struct Lane {
    ucontext_t context;
    Waits waits = Waits::NOT;
};
static std::vector<Lane> lanes;
static ucontext_t scheduler;
static const void* scheduler_stack;
static std::size_t scheduler_bytes;
static std::function<void()> body;
static int current, current_block;
static bool reversed;  // the order of waves; then copies land at once, else as late as they may

static char* stack_of(int lane) {
    static char* const stacks = new char[MOST_THREADS * STACK_BYTES];
    return stacks + static_cast<std::size_t>(lane) * STACK_BYTES;
}

static void fail(const char* why) {
    std::fprintf(stderr, "hip_on_host: %s\n", why);
    std::abort();
}

static void wait_for(Waits what) {
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
    body();
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
        for (int lane = first; lane < first + WAVE; ++lane)
            if (lanes[lane].waits != Waits::DONE) take_turn(lane);
        together = false;
        for (int lane = first; lane < first + WAVE; ++lane)
            together = together || lanes[lane].waits == Waits::FOR_WAVE;
        for (int lane = first; together && lane < first + WAVE; ++lane)
            if (lanes[lane].waits == Waits::FOR_BLOCK) fail("lanes of a wave went different ways");
    }
}

static void run_grid(int blocks, int threads, std::function<void()> kernel) {
    body = kernel;
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
            for (int turn = 0; turn < threads / WAVE; ++turn) {
                const int first = (reversed ? threads / WAVE - 1 - turn : turn) * WAVE;
                run_wave(first);
                for (int lane = first; lane < first + WAVE; ++lane)
                    running = running || lanes[lane].waits != Waits::DONE;
            }
        }
    }
}

// --- amd.hpp

static int thread_index() { return current; }
static int block_index() { return current_block; }
static int lane_index() { return current % WAVE; }
static void barrier() { wait_for(Waits::FOR_BLOCK); }

static unsigned bits_of(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static float float_of(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static float square_root(float value) { return std::sqrt(value); }
static float power_of_two(float exponent) { return std::exp2(exponent); }

static Words4 load_16_bytes(const void* from) {
    if (reinterpret_cast<std::uintptr_t>(from) % 16) fail("a load of 16 bytes is not aligned");
    Words4 words;
    std::memcpy(words.of, from, 16);
    return words;
}

// What every lane of a wave shows the others; two sets, so that one wait between is enough.
template <typename T>
static const T* shown(const T& own) {
    static T sets[MOST_THREADS / WAVE][2][WAVE];
    static unsigned turns[MOST_THREADS];
    const int lane = current, wave = lane / WAVE;
    T* set = sets[wave][turns[lane]++ % 2];
    set[lane % WAVE] = own;
    wait_for(Waits::FOR_WAVE);
    return set;
}

static float value_across(float value, int distance) {
    return shown(value)[lane_index() ^ distance];
}

// --- FP8, by arithmetic in double, where all steps are exact

constexpr int SMALLEST_EXPONENT = FNUZ ? -7 : -6;

static unsigned encode(float value) {
    if (std::isnan(value)) return NAN_FP8;
    const double size = std::fabs(static_cast<double>(value));
    int exponent = SMALLEST_EXPONENT;
    if (size > 0 && std::isfinite(size)) exponent = std::max(exponent, std::ilogb(size));
    double steps = std::nearbyint(std::ldexp(std::min(size, 1e30), 3 - exponent));
    if (std::ldexp(steps, exponent - 3) > LARGEST_FP8) {
        exponent = std::ilogb(LARGEST_FP8);
        steps = std::ldexp(LARGEST_FP8, 3 - exponent);
    }
    const unsigned code =
        static_cast<unsigned>((exponent - SMALLEST_EXPONENT) * 8) + static_cast<unsigned>(steps);
    const bool negative = std::signbit(value) && !(FNUZ && code == 0);
    return code | (negative ? 0x80u : 0u);
}

static unsigned encode_pair(float first, float second) {
    return encode(first) | encode(second) << 8;
}

static float decode(unsigned byte) {
    const unsigned size = byte & 0x7f;
    if (FNUZ ? byte == 0x80 : size == 0x7f) return std::numeric_limits<float>::quiet_NaN();
    const int power = static_cast<int>(size >> 3);
    const double steps = (size & 7) + (power ? 8 : 0);
    const double value = std::ldexp(steps, std::max(power, 1) - 1 + SMALLEST_EXPONENT - 3);
    return static_cast<float>(byte & 0x80 ? -value : value);
}

template <int BYTE>
static float decoded(unsigned word) {
    return decode(word >> 8 * BYTE & 0xff);
}

struct Row {
    float of[32];
    double scale;
};

static Row row_of(const Words8& words, int scale) {
    Row row;
    for (int i = 0; i < 32; ++i)
        row.of[i] = decode(static_cast<unsigned>(words[i / 4]) >> 8 * (i % 4) & 0xff);
    row.scale = std::ldexp(1.0, scale - 127);
    return row;
}

constexpr int ONE_E8M0 = 127;

static Floats4 multiply_scaled(
    const Words8& x, const Words8& y, Floats4 sums, int x_scale, int y_scale) {
    struct Both {
        Row x, y;
    };
    const Both* of = shown(Both{row_of(x, x_scale), row_of(y, y_scale)});
    const int lane = lane_index();
    for (int t = 0; t < 4; ++t) {
        double sum = sums[t];
        for (int k = 0; k < 128; ++k) {
            const int one = 4 * (lane / 16) + t, other = lane % 16;  // rows
            // Bytes lie in quarters of both halves, scales in quarters of the whole.
            const int from = 16 * (k % 64 / 16), place = 16 * (k / 64) + k % 16, scale = 16 * (k / 32);
            sum += static_cast<double>(of[from + one].x.of[place]) * of[from + other].y.of[place] *
                   of[scale + one].x.scale * of[scale + other].y.scale;
        }
        sums[t] = static_cast<float>(sum);
    }
    return sums;
}
static Floats4 multiply(const Words8& x, const Words8& y, Floats4 sums) {
    return multiply_scaled(x, y, sums, ONE_E8M0, ONE_E8M0);
}

static void settle(Floats4&) {}

// They land as soon or as late as the hardware may let them.
template <int COUNT>
class Copies {
public:
    void begin(int number, const void* from, Words4* to) {
        held_[number] = load_16_bytes(from);
        if (!FNUZ && reversed) *to = held_[number];
    }
    void end(int number, Words4* to) {
        if (FNUZ || !reversed) *to = held_[number];
    }

private:
    Words4 held_[COUNT];
};

// --- the program: runs one launch on buffers from a file, and writes them back

struct Buffers {
    std::vector<char*> of;
    std::vector<std::size_t> bytes;
};

static Buffers read_buffers(const char* path) {
    std::FILE* file = std::fopen(path, "rb");
    if (!file) fail("no file of buffers");
    Buffers found;
    std::uint64_t size;
    while (std::fread(&size, sizeof size, 1, file) == 1) {
        char* memory = nullptr;
        if (size) memory = static_cast<char*>(std::aligned_alloc(16, (size + 15) / 16 * 16));
        if (size && std::fread(memory, 1, size, file) != size) fail("a buffer is cut");
        if (size % 16) __asan_poison_memory_region(memory + size, 16 - size % 16);
        found.of.push_back(memory);
        found.bytes.push_back(size);
    }
    std::fclose(file);
    return found;
}

static void write_buffers(const char* path, const Buffers& buffers) {
    std::FILE* file = std::fopen(path, "wb");
    for (std::size_t i = 0; i < buffers.of.size(); ++i)
        if (buffers.bytes[i]) std::fwrite(buffers.of[i], 1, buffers.bytes[i], file);
    std::fclose(file);
}
