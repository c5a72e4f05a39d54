// A CDNA GPU on a CPU, for tests: what kernels/hip/amd.hpp asks of the compiler for one, so that it
// runs here too, from its own source. Each lane is a coroutine. Lanes of a wave take turns at what they
// do together; a wave runs on until a barrier of its block, before another begins, so that what a
// missing barrier would let through is seen in one of both orders of waves. A program defines
// __gfx942__ or not, which means gfx950. What runs lanes is compiled once: hip_on_host.cpp.
//
// Instructions do as their manual says, and where it leaves something open what would do harm.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)
#define ext_vector_type(count) vector_size(4 * (count))  // all elements of amd.hpp have 4 bytes
#define address_space(number)

#ifdef __gfx942__
constexpr bool FNUZ = true;
#else
constexpr bool FNUZ = false;
#endif
constexpr float LARGEST = FNUZ ? 240.0f : 448.0f;
constexpr unsigned NAN_BYTE = FNUZ ? 0x80 : 0x7f;

constexpr int LANES = 64, MOST_THREADS = 1024;

// --- hip_on_host.cpp

enum class Waits { NOT, FOR_WAVE, FOR_BLOCK, DONE };
extern int current, current_block;  // lane of its block
extern bool reversed;  // the order of waves; then copies land at once, else as late as they may
void wait_for(Waits what);
[[noreturn]] void fail(const char* why);

// Of a program: threads of a block, and the launch with its buffers and numbers.
extern const int THREADS_OF_A_BLOCK;
void call(const std::vector<char*>& p, const std::vector<long>& i);

// --- threads

#define __builtin_amdgcn_workitem_id_x() current
#define __builtin_amdgcn_workgroup_id_x() current_block

// Local memory is another's to read only past both fences: without them the compiler may keep a
// write from before a barrier, or a read from after it, on the other side.
enum class Fence { NONE, RELEASED, BARRIER };
static Fence fences[MOST_THREADS];

static void fence(int order, const char* scope) {
    if (std::strcmp(scope, "workgroup")) fail("a fence that is not the block's");
    if (order == __ATOMIC_RELEASE) fences[current] = Fence::RELEASED;
    if (order == __ATOMIC_ACQUIRE) fences[current] = Fence::NONE;
}
static void block_barrier() {
    if (fences[current] != Fence::RELEASED) fail("a barrier without a release before it");
    fences[current] = Fence::BARRIER;
    wait_for(Waits::FOR_BLOCK);
}
#define __builtin_amdgcn_fence fence
#define __builtin_amdgcn_s_barrier block_barrier

// What every lane of a wave shows the others; two sets, so that one wait between is enough.
template <typename T>
static const T* shown(const T& own) {
    if (fences[current] == Fence::BARRIER) fail("a barrier without an acquire behind it");
    static T sets[MOST_THREADS / LANES][2][LANES];
    static unsigned turns[MOST_THREADS];
    const int lane = current, wave = lane / LANES;
    T* set = sets[wave][turns[lane]++ % 2];
    set[lane % LANES] = own;
    wait_for(Waits::FOR_WAVE);
    return set;
}

static int first_of(int value) { return shown(value)[0]; }
#define __builtin_amdgcn_readfirstlane first_of
#define __builtin_amdgcn_sched_barrier(kept)  // lanes run in the order of the source

static int permuted(int from, int value) { return shown(value)[from / 4 % LANES]; }
#define __builtin_amdgcn_ds_bpermute permuted

static unsigned long ballot(bool is_so) {
    const bool* of = shown(is_so);
    unsigned long lanes = 0;
    for (int lane = 0; lane < LANES; ++lane) lanes |= static_cast<unsigned long>(of[lane]) << lane;
    return lanes;
}
#define __builtin_amdgcn_ballot_w64 ballot

// --- numbers

// Four bytes of eight, the lowest first: 0 to 3 are those of `low`.
static unsigned chosen_bytes(unsigned high, unsigned low, unsigned which) {
    const unsigned long from = static_cast<unsigned long>(high) << 32 | low;
    unsigned word = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned byte = which >> 8 * i & 0xff;
        if (byte > 7) fail("a byte that is a sign or a constant is not modeled");
        word |= (from >> 8 * byte & 0xff) << 8 * i;
    }
    return word;
}
#define __builtin_amdgcn_perm chosen_bytes

static float middle_of(float x, float low, float high) {
    if (std::isnan(x)) return std::min(low, high);
    return std::max(std::min(x, low), std::min(std::max(x, low), high));
}
#define __builtin_amdgcn_fmed3f middle_of
static float maximum(float x, float y) {  // of IEEE 754-2019: NaN is the largest, 0 larger than -0
    return std::isnan(x) || (!std::isnan(y) && (x > y || (x == y && std::signbit(y)))) ? x : y;
}
#define __builtin_elementwise_maximum maximum
#define __builtin_amdgcn_exp2f(exponent) std::exp2(exponent)

// They may err by one unit in the last place, and take what is subnormal for 0, here in both places.
static float normal_or_zero(float value) {
    return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}
static float next_to(double exact) {
    const float near = static_cast<float>(exact);
    return normal_or_zero(reversed && std::isfinite(near) ? std::nextafter(near, 0.0f) : near);
}
static float approximate_reciprocal(float x) { return next_to(1.0 / normal_or_zero(x)); }
static float approximate_reciprocal_root(float x) { return next_to(1.0 / std::sqrt(normal_or_zero(x))); }
#define __builtin_amdgcn_rcpf approximate_reciprocal
#define __builtin_amdgcn_rsqf approximate_reciprocal_root

template <typename Floats>
static Floats fused(Floats x, Floats y, Floats z) {
    for (unsigned i = 0; i < sizeof x / sizeof x[0]; ++i) x[i] = std::fma(x[i], y[i], z[i]);
    return x;
}
#define __builtin_elementwise_fma fused

// By arithmetic in double, where all steps are exact. What is larger than the format's largest is
// NaN, as it is where MODE.FP16_OVFL is not set, and a zero keeps its sign, though 0x80 is NaN.
constexpr int SMALLEST_EXPONENT = FNUZ ? -7 : -6;

static unsigned encoded(float value) {
    const double size = std::fabs(static_cast<double>(value));
    if (!std::isfinite(size)) return NAN_BYTE;
    const int exponent = size > 0 ? std::max(SMALLEST_EXPONENT, std::ilogb(size)) : SMALLEST_EXPONENT;
    const double steps = std::nearbyint(std::ldexp(size, 3 - exponent));
    if (std::ldexp(steps, exponent - 3) > LARGEST) return NAN_BYTE;
    const int code = (exponent - SMALLEST_EXPONENT) * 8 + static_cast<int>(steps);
    return static_cast<unsigned>(code) | (std::signbit(value) ? 0x80u : 0u);
}
static int encoded_pair(float first, float second, int old, bool high) {
    const unsigned pair = encoded(first) | encoded(second) << 8, kept = static_cast<unsigned>(old);
    return static_cast<int>(high ? pair << 16 | (kept & 0xffff) : pair | (kept & 0xffff0000u));
}
#define __builtin_amdgcn_cvt_pk_fp8_f32 encoded_pair

static float number_of_byte(unsigned byte) {
    const unsigned size = byte & 0x7f;
    if (FNUZ ? byte == 0x80 : size == 0x7f) return std::numeric_limits<float>::quiet_NaN();
    const int power = static_cast<int>(size >> 3);
    const double steps = (size & 7) + (power ? 8 : 0);
    const double value = std::ldexp(steps, std::max(power, 1) - 1 + SMALLEST_EXPONENT - 3);
    return static_cast<float>(byte & 0x80 ? -value : value);
}
static float byte_as_number(int word, int byte) {
    return number_of_byte(static_cast<unsigned>(word) >> 8 * byte & 0xff);
}
#define __builtin_amdgcn_cvt_f32_fp8 byte_as_number

// --- products

typedef int Ints8 __attribute__((vector_size(32)));
typedef float Sums __attribute__((vector_size(16)));

// What a lane gives of a row: BYTES numbers, and the scale of the 32 that are its quarter of 128.
template <int BYTES>
struct Row {
    float of[BYTES];
    double scale;
};
template <int BYTES>
static Row<BYTES> row_of(const void* bytes, double scale) {
    Row<BYTES> row;
    for (int i = 0; i < BYTES; ++i) row.of[i] = number_of_byte(static_cast<const std::uint8_t*>(bytes)[i]);
    row.scale = scale;
    return row;
}
template <int BYTES>
using Both = std::pair<Row<BYTES>, Row<BYTES>>;

// v_mfma_f32_16x16x32_fp8_fp8: 8 bytes a lane, neighbors of k.
static Sums multiplied(long x, long y, Sums sums, int cbsz, int abid, int blgp) {
    if (cbsz || abid || blgp) fail("broadcasts of a matrix instruction are not modeled");
    const Both<8>* of = shown(Both<8>(row_of<8>(&x, 1), row_of<8>(&y, 1)));
    const int lane = current % LANES;
    for (int t = 0; t < 4; ++t) {
        double sum = sums[t];
        for (int k = 0; k < 32; ++k) {
            const int from = 16 * (k / 8);
            sum += static_cast<double>(of[from + 4 * (lane / 16) + t].first.of[k % 8]) *
                   of[from + lane % 16].second.of[k % 8];
        }
        sums[t] = static_cast<float>(sum);
    }
    return sums;
}
#define __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8 multiplied

// v_mfma_scale_f32_16x16x128_f8f6f4: 32 bytes a lane, in quarters of both halves of k; scales are
// those of the quarters of the whole.
static double power_of(int word, int byte) {
    const int exponent = word >> 8 * byte & 0xff;
    return exponent == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, exponent - 127);
}
static Sums multiplied_scaled(
    Ints8 x, Ints8 y, Sums sums, int x_format, int y_format, int x_byte, int x_scale, int y_byte,
    int y_scale) {
    if (x_format || y_format) fail("formats other than E4M3 are not modeled");
    const Both<32>* of = shown(
        Both<32>(row_of<32>(&x, power_of(x_scale, x_byte)), row_of<32>(&y, power_of(y_scale, y_byte))));
    const int lane = current % LANES;
    for (int t = 0; t < 4; ++t) {
        double sum = sums[t];
        for (int k = 0; k < 128; ++k) {
            const int one = 4 * (lane / 16) + t, other = lane % 16;  // rows
            const int from = 16 * (k % 64 / 16), place = 16 * (k / 64) + k % 16, scale = 16 * (k / 32);
            sum += static_cast<double>(of[from + one].first.of[place]) * of[from + other].second.of[place] *
                   of[scale + one].first.scale * of[scale + other].second.scale;
        }
        sums[t] = static_cast<float>(sum);
    }
    return sums;
}
#define __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4 multiplied_scaled

#define asm  // `settle` tells a compiler for GPUs something, in a register that there is none of here
#define volatile(...)

// --- buffers

// Copies to local memory past the registers land as soon or as late as they may. With loads to
// registers behind them, they are counted.
struct Copy {
    const char* from;
    char* to;
    int size;
};
static std::vector<Copy> copies_of[MOST_THREADS];  // under way

static void count_load() {
    static char nothing;
    if (!copies_of[current].empty()) copies_of[current].push_back({&nothing, &nothing, 0});
}

// Raw: no structure, no swizzle. Past the end nothing is read, and NaN comes instead: hardware gives 0,
// but nobody tried it here.
struct Resource {
    const char* data;
    std::uint32_t size;

    // Where so many bytes begin, or -1 where they lie past the end. Two things no kernel may need: a
    // word across the end, and an offset that lanes share, about which descriptions differ.
    std::int64_t start_of(int offset, int shared_offset, int bytes, int shift = 0) const {
        if (shared_offset) fail("an offset that lanes share is not modeled");
        const std::int64_t start = static_cast<std::int64_t>(static_cast<std::uint32_t>(offset)) + shift;
        if (start + bytes <= size) return start;
        if (start < size) fail("a part of a load lies past the end of its buffer");
        return -1;
    }
    template <typename T>
    T load(int offset, int shared_offset) const {
        count_load();
        constexpr int SIZE = std::min<int>(4, sizeof(T));  // words are checked one by one
        char bytes[sizeof(T)];
        std::memset(bytes, NAN_BYTE, sizeof bytes);
        for (unsigned i = 0; i < sizeof bytes; i += SIZE) {
            const std::int64_t start = start_of(offset, shared_offset, SIZE, static_cast<int>(i));
            if (start >= 0) std::memcpy(bytes + i, data + start, SIZE);
        }
        T value;
        std::memcpy(&value, bytes, sizeof value);
        return value;
    }
};
#define __amdgpu_buffer_rsrc_t Resource

static Resource resource_of(void* data, int stride, int size, int flags) {
    if (stride || flags != 0x00027000) fail("only raw buffers are modeled");
    return {static_cast<const char*>(data), static_cast<std::uint32_t>(size)};
}
typedef std::uint32_t Uints2 __attribute__((vector_size(8)));
typedef std::uint32_t Uints4 __attribute__((vector_size(16)));
#define __builtin_amdgcn_make_buffer_rsrc resource_of
#define __builtin_amdgcn_raw_buffer_load_b8(of, offset, shared, cache) of.load<std::uint8_t>(offset, shared)
#define __builtin_amdgcn_raw_buffer_load_b16(of, offset, shared, cache) of.load<std::uint16_t>(offset, shared)
#define __builtin_amdgcn_raw_buffer_load_b32(of, offset, shared, cache) of.load<std::uint32_t>(offset, shared)
#define __builtin_amdgcn_raw_buffer_load_b64(of, offset, shared, cache) of.load<Uints2>(offset, shared)
#define __builtin_amdgcn_raw_buffer_load_b128(of, offset, shared, cache) of.load<Uints4>(offset, shared)

// --- copies to local memory past the registers

static void copy_to_local(
    const Resource& from, void* to, int size, int offset, int shared_offset, int shift, int) {
    static const std::vector<char> nothing(16, static_cast<char>(NAN_BYTE));
    const std::int64_t start = from.start_of(offset, shared_offset, size, shift);
    const char* source = start < 0 ? nothing.data() : from.data + start;
    if (start >= 0 && reinterpret_cast<std::uintptr_t>(source) % static_cast<unsigned>(size))
        fail("a copy is not aligned");
    if (shift < 0 || shift > 4095) fail("a shift does not fit into an instruction");
    const Copy copy{source, static_cast<char*>(to) + shift + current % LANES * size, size};
    if (reversed)
        std::memcpy(copy.to, copy.from, copy.size);
    else
        copies_of[current].push_back(copy);
}
#define __builtin_amdgcn_raw_ptr_buffer_load_lds copy_to_local

// Of what is counted the last so many may be under way: loads in bits 0 to 3 and 14 to 15.
static void wait_until(int counts) {
    const std::size_t most = static_cast<std::size_t>((counts & 15) | (counts >> 14 & 3) << 4);
    std::vector<Copy>& waiting = copies_of[current];
    for (; waiting.size() > most; waiting.erase(waiting.begin()))
        std::memcpy(waiting[0].to, waiting[0].from, waiting[0].size);
}
#define __builtin_amdgcn_s_waitcnt wait_until
