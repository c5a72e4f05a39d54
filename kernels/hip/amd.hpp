// What kernels here ask of a CDNA GPU, gfx942 or gfx950: all that differs between the two, and all
// that tests replace to run the same kernels on a CPU. Needs no header of ROCm.
#pragma once

#ifndef __HIPCC_RTC__
#ifndef __global__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(threads) \
    __attribute__((amdgpu_flat_work_group_size(1, threads)))
#endif
#endif

typedef unsigned int Words2 __attribute__((ext_vector_type(2)));
typedef unsigned int Words4 __attribute__((ext_vector_type(4)));
typedef int Words8 __attribute__((ext_vector_type(8)));
typedef float Floats4 __attribute__((ext_vector_type(4)));
typedef float Floats2 __attribute__((ext_vector_type(2)));

#if defined(__gfx942__)
#define LARGEST_FP8 240.0f
#define NAN_FP8 0x80u
constexpr bool PAST_REGISTERS = false;  // copies to local memory
#else
#define LARGEST_FP8 448.0f
#define NAN_FP8 0x7fu
constexpr bool PAST_REGISTERS = true;
#endif

// Registers of a kernel such that so many waves fit a SIMD.
#if defined(__AMDGCN__)
#define WAVES_OF_SIMD(count) __attribute__((amdgpu_waves_per_eu(count)))
#else
#define WAVES_OF_SIMD(count)
#endif

constexpr int WAVE = 64;

static __device__ inline int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
static __device__ inline int block_index() { return __builtin_amdgcn_workgroup_id_x(); }
static __device__ inline int lane_index() { return thread_index() % WAVE; }

// A number that is the same in all lanes of a wave, for the compiler to keep once for all of them.
static __device__ inline int uniform(int value) { return __builtin_amdgcn_readfirstlane(value); }

// No instruction crosses this: what is loaded before is under way, what waits after comes last.
static __device__ inline void keep_order() { __builtin_amdgcn_sched_barrier(0); }

// Waits for all threads of a block, and for what they wrote to local memory.
static __device__ inline void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

static __device__ inline unsigned bits_of(float value) { return __builtin_bit_cast(unsigned, value); }
static __device__ inline float float_of(unsigned bits) { return __builtin_bit_cast(float, bits); }

// Of numbers of 24 bits, whose product takes one instruction; that of 32 bits takes 64-bit registers.
static __device__ inline unsigned product_of_24_bits(unsigned x, unsigned y) {
    return (x & 0xffffff) * (y & 0xffffff);
}

static __device__ inline float square_root(float value) { return __builtin_sqrtf(value); }
static __device__ inline float power_of_two(float exponent) {
    return __builtin_amdgcn_exp2f(exponent);
}

// Within one unit in the last place.
static __device__ inline float reciprocal(float value) { return __builtin_amdgcn_rcpf(value); }
// The instruction takes what is subnormal for 0.
static __device__ inline float reciprocal_root(float value) {
    const bool is_small = value < 0x1p-100f;
    const float root = __builtin_amdgcn_rsqf(is_small ? value * 0x1p64f : value);
    return is_small ? root * 0x1p32f : root;
}

static __device__ inline float between_0_and_1(float value) {
    return __builtin_amdgcn_fmed3f(value, 0.0f, 1.0f);
}

// Hides from the compiler where a value comes from: it keeps it in neighboring registers.
template <typename Floats>
static __device__ inline void hide(Floats& value) {
    asm volatile("" : "+v"(value));
}

// A vector of one number.
template <typename Floats>
static __device__ inline Floats all(float value) {
    Floats every;
    for (unsigned i = 0; i < sizeof every / sizeof value; ++i) every[i] = value;
    return every;
}

// 1 / value in two parts: rounded, and what that lacks; of what is far from the ends of the range.
template <typename Floats>
struct Inverse {
    Floats near, rest;
};
static __device__ inline Inverse<float> inverse_of(float value) {
    const float guess = reciprocal(value);
    const float near = __builtin_fmaf(__builtin_fmaf(-guess, value, 1.0f), guess, guess);
    return {near, __builtin_fmaf(-near, value, 1.0f) * near};
}
// Elements of x / value: where all are far from the ends of the range, or x is small enough to count as
// 0. They round to the FP8 of the rounded quotient, except where the fraction of the value has all bits.
template <typename Floats>
static __device__ inline Floats quotient(Floats x, Inverse<Floats> of) {
    return __builtin_elementwise_fma(x, of.near, x * of.rest);
}

// NaN is larger than all on gfx950, and counts as nothing on gfx942, which has no such instruction.
#if defined(__gfx942__)
constexpr bool NAN_IS_LARGEST = false;
static __device__ inline float larger(float x, float y) { return __builtin_fmaxf(x, y); }
static __device__ inline float at_least_0(float x) { return x > 0.0f || x != x ? x : 0.0f; }
#else
constexpr bool NAN_IS_LARGEST = true;
static __device__ inline float larger(float x, float y) { return __builtin_elementwise_maximum(x, y); }
static __device__ inline float at_least_0(float x) { return larger(x, 0.0f); }
#endif
// The largest of a size and of four numbers' sizes.
static __device__ inline float largest_size(float size, Floats4 some) {
    for (int i = 0; i < 4; ++i) size = larger(size, __builtin_fabsf(some[i]));
    return size;
}

// Whether it is so in some lane of the wave.
static __device__ inline bool any_lane(bool is_so) { return __builtin_amdgcn_ballot_w64(is_so) != 0; }

static __device__ inline Words4 load_16_bytes(const void* from) {
    return *static_cast<const Words4*>(from);
}

// The value of the lane whose number differs in these bits.
static __device__ inline float value_across(float value, int distance) {
    const int from = (lane_index() ^ distance) << 2;
    return float_of(__builtin_amdgcn_ds_bpermute(from, static_cast<int>(bits_of(value))));
}

// --- bfloat16

// Two numbers in a word, the first in its low half: to nearest even, NaN to a quiet one.
static __device__ inline unsigned bfloat16_pair(float first, float second) {
#if defined(__gfx950__) && defined(__AMDGCN__)
    typedef __bf16 Pair __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(unsigned, __builtin_convertvector((Floats2{first, second}), Pair));
#else
    unsigned halves[2] = {bits_of(first), bits_of(second)};
    for (unsigned& half : halves) half += 0x7fff + (half >> 16 & 1);
    halves[0] = first == first ? halves[0] : 0x7fc00000u;
    halves[1] = second == second ? halves[1] : 0x7fc00000u;
    return __builtin_amdgcn_perm(halves[1], halves[0], 0x07060302);  // the high half of each
#endif
}

// --- FP8

// Two numbers to FP8 in the low half of a word: to nearest even, saturating, NaN to the one NaN.
static __device__ inline unsigned encode_pair(float first, float second) {
    const float low = __builtin_amdgcn_fmed3f(first, -LARGEST_FP8, LARGEST_FP8);
    const float high = __builtin_amdgcn_fmed3f(second, -LARGEST_FP8, LARGEST_FP8);
    const unsigned pair = __builtin_amdgcn_cvt_pk_fp8_f32(low, high, 0, false);
    unsigned bytes[2] = {pair & 0xff, pair >> 8 & 0xff};
#if defined(__gfx942__)
    for (unsigned& byte : bytes) byte = byte == 0x80 ? 0 : byte;  // there is no -0
#endif
    bytes[0] = first == first ? bytes[0] : NAN_FP8;
    bytes[1] = second == second ? bytes[1] : NAN_FP8;
    return bytes[0] | bytes[1] << 8;
}

// Four finite numbers that are not larger than the largest of FP8, nor round to more.
static __device__ inline unsigned encode_four(Floats4 from) {
    const int any = static_cast<int>(bits_of(from[0]));  // in the other half; 0 would be an instruction
    const int low = __builtin_amdgcn_cvt_pk_fp8_f32(from[0], from[1], any, false);
    unsigned word = __builtin_amdgcn_cvt_pk_fp8_f32(from[2], from[3], low, true);
#if defined(__gfx942__)  // there is no -0: the sign stays where any other bit is set
    const unsigned sizes = word & 0x7f7f7f7fu;
    word = (word & (sizes + 0x7f7f7f7fu)) | sizes;
#endif
    return word;
}

// A byte of a word as a number.
template <int BYTE>
static __device__ inline float decoded(unsigned word) {
    return __builtin_amdgcn_cvt_f32_fp8(static_cast<int>(word), BYTE);
}

// --- products

// Adds to 16 x 16 sums the product of 16 rows of x and 16 rows of y, 128 bytes of each. A lane
// holds 32 bytes of row lane % 16 of both: 16 from 16 * (lane / 16) on, and 16 from 64 further; of the
// sums rows 4 * (lane / 16) to + 3 of x, and row lane % 16 of y.
//
// Two scales of such a product may underflow where it, of up to 2^25, does not: they are multiplied
// with each other and with RAISED, and the products come `multiply_lowered`, or their sums `lowered`.
// From 2^102 on, the second scale and the product of both are infinite, and so are sums of gfx942.
constexpr float RAISED = 0x1p26f;
#if defined(__gfx942__)
constexpr int INSTRUCTIONS = 4;  // of a product: each adds 32 of the 128 bytes
static __device__ inline Floats4 multiply_part(Words8 x, Words8 y, Floats4 sums, int part) {
    const auto eight = [part](Words8 from) {
        return static_cast<long>(
            static_cast<unsigned long>(static_cast<unsigned>(from[2 * part + 1])) << 32 |
            static_cast<unsigned>(from[2 * part]));
    };
    return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(eight(x), eight(y), sums, 0, 0, 0);
}
static __device__ inline Floats4 multiply(Words8 x, Words8 y, Floats4 sums) {
    for (int part = 0; part < INSTRUCTIONS; ++part) sums = multiply_part(x, y, sums, part);
    return sums;
}
static __device__ inline Floats4 multiply_lowered(Words8 x, Words8 y) {
    return multiply(x, y, Floats4{});
}
static __device__ inline Floats4 lowered(Floats4 sums) { return sums * (1.0f / RAISED); }
#else
constexpr int ONE_E8M0 = 127;

// With a power of two for each 32 bytes of a row: a lane gives that of 32 * (lane / 16) on of row
// lane % 16, though it holds others, in the low byte of a word: 2^(byte - 127).
static __device__ inline Floats4 multiply_scaled(
    Words8 x, Words8 y, Floats4 sums, int x_scale, int y_scale) {
    return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(
        x, y, sums, 0, 0, 0, x_scale, 0, y_scale);
}
constexpr int INSTRUCTIONS = 1;
static __device__ inline Floats4 multiply(Words8 x, Words8 y, Floats4 sums) {
    return multiply_scaled(x, y, sums, ONE_E8M0, ONE_E8M0);
}
static __device__ inline Floats4 multiply_part(Words8 x, Words8 y, Floats4 sums, int) {
    return multiply(x, y, sums);
}
static __device__ inline Floats4 multiply_lowered(Words8 x, Words8 y) {
    return multiply_scaled(x, y, Floats4{}, ONE_E8M0 - 13, ONE_E8M0 - 13);
}
static __device__ inline Floats4 lowered(Floats4 sums) { return sums; }
#endif

// Sums as they are here, made by all lanes. Of the scaled instruction clang 22 does not know that the
// lanes work together: it would move the last one into a branch that some lanes do not take.
static __device__ inline void settle(Floats4& sums) {
#if !defined(__gfx942__)  // which has no scaled one; there it costs registers
    hide(sums);
#endif
}
// The same for sums that stay in registers which vector instructions do not reach.
static __device__ inline void stay(Floats4& sums) {
    asm volatile("" : "+a"(sums));
}

// --- copies to local memory

// So many bytes of memory from an address on, 2^31 at most; what lies past them is not read, and
// anything comes instead.
constexpr unsigned NOWHERE = 1u << 31;  // from any offset in a buffer
class Buffer {
public:
    __device__ inline Buffer(const void* data, unsigned bytes)
        : resource_(__builtin_amdgcn_make_buffer_rsrc(
              const_cast<void*>(data), 0, static_cast<int>(bytes), RAW)) {}

    __device__ inline unsigned load_byte(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b8(resource_, offset, 0, 0);
    }
    __device__ inline unsigned load_2_bytes(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b16(resource_, offset, 0, 0);
    }
    __device__ inline unsigned load_4_bytes(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b32(resource_, offset, 0, 0);
    }
    // Words, each within the end or past it.
    __device__ inline Words2 load_8_bytes(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b64(resource_, offset, 0, 0);
    }
    __device__ inline Words4 load_16_bytes(unsigned offset) const {
        return __builtin_amdgcn_raw_buffer_load_b128(resource_, offset, 0, 0);
    }
    // One, two or four numbers.
    template <typename Floats>
    __device__ inline Floats load_floats(unsigned offset) const {
        if constexpr (sizeof(Floats) == 4) return __builtin_bit_cast(Floats, load_4_bytes(offset));
        else if constexpr (sizeof(Floats) == 8) return __builtin_bit_cast(Floats, load_8_bytes(offset));
        else return __builtin_bit_cast(Floats, load_16_bytes(offset));
    }
#if !defined(__gfx942__)
    // 16 bytes from SHIFT further on, past the registers, to where lanes lie side by side from SHIFT
    // behind `to` on. SHIFT is less than 4096.
    template <int SHIFT>
    __device__ inline void copy_16_bytes(unsigned offset, Words4* to) const {
        typedef __attribute__((address_space(3))) void Local;
        __builtin_amdgcn_raw_ptr_buffer_load_lds(resource_, (Local*)to, 16, offset, 0, SHIFT, 0);
    }
#endif

private:
    static constexpr int RAW = 0x00027000;  // 32 bits an element, no structure, no swizzle
    __amdgpu_buffer_rsrc_t resource_;
};

// COUNT times 16 bytes a lane from memory to COUNT times WAVE places side by side. They are on their
// way from `begin` on. gfx942 holds them in registers until `put`; on gfx950 they pass the registers,
// and `wait` waits for them.
template <int COUNT>
class Copies {
public:
    // `place`: the first offset of a lane for each copy.
    template <typename Place>
    __device__ inline Copies(const unsigned char* data, unsigned bytes, Place place)
        : from_(data - BEFORE, bytes + BEFORE) {
        for (int i = 0; i < COUNT; ++i) offsets_[i] = place(i) + BEFORE - shift(i);
    }
    __device__ inline void begin(Words4* to) {
        for (int i = 0; i < COUNT; ++i) begin(to, i);
    }
    // One of them.
    __device__ inline void begin(Words4* to, int number) {
#if defined(__gfx942__)
        held_[number] = from_.load_16_bytes(offsets_[number]);
#else
        Words4* const base = to + number / 4 * 4 * WAVE;
        switch (number % 4) {
            case 0: return from_.template copy_16_bytes<shift(0)>(offsets_[number], base);
            case 1: return from_.template copy_16_bytes<shift(1)>(offsets_[number], base);
            case 2: return from_.template copy_16_bytes<shift(2)>(offsets_[number], base);
            default: return from_.template copy_16_bytes<shift(3)>(offsets_[number], base);
        }
#endif
    }
    // The next time it begins so many bytes further; by `NOWHERE`, it reads nothing. Each lane has its
    // whole offset: whether one that all lanes share counts against the end, the manual and the
    // compiler's documentation disagree.
    __device__ inline void advance(unsigned further) {
        for (unsigned& offset : offsets_) offset += further;
    }
    __device__ inline void advance(unsigned further, int number) { offsets_[number] += further; }
    __device__ inline void put(Words4* to) {
        for (int i = 0; i < COUNT; ++i) put(to, i);
    }
    __device__ inline void put(Words4* to, int number) {
#if defined(__gfx942__)
        to[number * WAVE + lane_index()] = held_[number];
#endif
    }
    // For all but the LATER loads that a lane began last, at most 15.
    template <int LATER = 0>
    __device__ inline void wait() {
#if !defined(__gfx942__)
        __builtin_amdgcn_s_waitcnt(0x0f70 | LATER);  // vmcnt
#endif
    }

private:
#if defined(__gfx942__)
    static constexpr int BEFORE = 0;
    static constexpr int shift(int) { return 0; }
    Words4 held_[COUNT];
#else
    // One instruction adds the same shift to both addresses: so four copies share one base in local
    // memory, and what is added to the offset in memory is taken away before.
    static constexpr int shift(int number) { return number % 4 * WAVE * 16; }
    static constexpr int BEFORE = COUNT > 1 ? 3 * WAVE * 16 : 0;
#endif
    Buffer from_;
    unsigned offsets_[COUNT];
};
