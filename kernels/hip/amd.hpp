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

typedef unsigned int Words4 __attribute__((ext_vector_type(4)));
typedef int Words8 __attribute__((ext_vector_type(8)));
typedef float Floats4 __attribute__((ext_vector_type(4)));

#if defined(__gfx942__)
#define LARGEST_FP8 240.0f
#define NAN_FP8 0x80u
#else
#define LARGEST_FP8 448.0f
#define NAN_FP8 0x7fu
#endif

constexpr int WAVE = 64;

static __device__ inline int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
static __device__ inline int block_index() { return __builtin_amdgcn_workgroup_id_x(); }
static __device__ inline int lane_index() { return thread_index() % WAVE; }

// Waits for all threads of a block, and for what they wrote to local memory.
static __device__ inline void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

static __device__ inline unsigned bits_of(float value) { return __builtin_bit_cast(unsigned, value); }
static __device__ inline float float_of(unsigned bits) { return __builtin_bit_cast(float, bits); }

static __device__ inline float square_root(float value) { return __builtin_sqrtf(value); }
static __device__ inline float power_of_two(float exponent) {
    return __builtin_amdgcn_exp2f(exponent);
}

static __device__ inline Words4 load_16_bytes(const void* from) {
    return *static_cast<const Words4*>(from);
}

// The value of the lane whose number differs in these bits.
static __device__ inline float value_across(float value, int distance) {
    const int from = (lane_index() ^ distance) << 2;
    return float_of(__builtin_amdgcn_ds_bpermute(from, static_cast<int>(bits_of(value))));
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

// A byte of a word as a number.
template <int BYTE>
static __device__ inline float decoded(unsigned word) {
    return __builtin_amdgcn_cvt_f32_fp8(static_cast<int>(word), BYTE);
}

// --- products

// Adds to 16 x 16 sums the product of 16 rows of x and 16 rows of y, 128 bytes of each. A lane
// holds 32 bytes of row lane % 16 of both: 16 from 16 * (lane / 16) on, and 16 from 64 further; of the
// sums rows 4 * (lane / 16) to + 3 of x, and row lane % 16 of y.
#if defined(__gfx942__)
static __device__ inline Floats4 multiply(Words8 x, Words8 y, Floats4 sums) {
    for (int part = 0; part < 4; ++part) {
        const auto eight = [part](Words8 from) {
            return static_cast<long>(
                static_cast<unsigned long>(static_cast<unsigned>(from[2 * part + 1])) << 32 |
                static_cast<unsigned>(from[2 * part]));
        };
        sums = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(eight(x), eight(y), sums, 0, 0, 0);
    }
    return sums;
}
#else
constexpr int ONE_E8M0 = 127;

// With a power of two for each 32 bytes of a row: a lane gives that of 32 * (lane / 16) on of row
// lane % 16, though it holds others, in the low byte of a word: 2^(byte - 127).
static __device__ inline Floats4 multiply_scaled(
    Words8 x, Words8 y, Floats4 sums, int x_scale, int y_scale) {
    return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(
        x, y, sums, 0, 0, 0, x_scale, 0, y_scale);
}
static __device__ inline Floats4 multiply(Words8 x, Words8 y, Floats4 sums) {
    return multiply_scaled(x, y, sums, ONE_E8M0, ONE_E8M0);
}
#endif

// Sums as they are here, made by all lanes. Of the scaled instruction clang 22 does not know that the
// lanes work together: it would move the last one into a branch that some lanes do not take.
static __device__ inline void settle(Floats4& sums) {
#if !defined(__gfx942__)  // which has no scaled one; there it costs registers
    asm volatile("" : "+v"(sums));
#endif
}

// --- copies to local memory

// COUNT times 16 bytes a thread, from anywhere to where consecutive lanes lie side by side. They
// are on their way from `begin` to `end`; gfx950 brings them past the registers.
template <int COUNT>
class Copies {
public:
    __device__ inline void begin(int number, const void* from, Words4* to) {
#if defined(__gfx942__)
        held_[number] = load_16_bytes(from);
#else
        typedef __attribute__((address_space(1))) void Global;
        typedef __attribute__((address_space(3))) void Local;
        __builtin_amdgcn_global_load_lds(
            (Global*)from, (Local*)(to - lane_index()), 16, 0, 0);
#endif
    }
    __device__ inline void end(int number, Words4* to) {
#if defined(__gfx942__)
        *to = held_[number];
#else
        if (number == COUNT - 1) __builtin_amdgcn_s_waitcnt(0x0f70);  // vmcnt(0)
#endif
    }

private:
#if defined(__gfx942__)
    Words4 held_[COUNT];
#endif
};
