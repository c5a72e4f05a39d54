// A CDNA GPU on a CPU, for tests: stands in for kernels/hip/amd.hpp. Each lane is a coroutine. Lanes
// of a wave take turns at what they do together; a wave runs on until a barrier of its block, before
// another begins, so that what a missing barrier would let through is seen in one of both orders of
// waves. FNUZ is 1 for gfx942 and 0 for gfx950. What runs lanes is compiled once: hip_on_host.cpp.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
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

constexpr int WAVE = 64, MOST_THREADS = 1024;

// --- hip_on_host.cpp

enum class Waits { NOT, FOR_WAVE, FOR_BLOCK, DONE };
extern int current, current_block;  // lane of its block
extern bool reversed;  // the order of waves; then copies land at once, else as late as they may
void wait_for(Waits what);
[[noreturn]] void fail(const char* why);

// Of a program: threads of a block, and the launch with its buffers and numbers.
extern const int THREADS_OF_A_BLOCK;
void call(const std::vector<char*>& p, const std::vector<long>& i);

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
