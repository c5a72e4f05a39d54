// Quantizes a step of bfloat16 rows in registers, as tensor cores take their left operand.
//
//     s = max(rn(amax / 448), 2^-126),  1 where amax is 0;  q = cast(rn(x / s)),  by row
//
// amax is over the finite values of 128 of a row. The same bytes as quantize.cu makes.
#pragma once

struct Quantized {
    unsigned word[4][4];  // of each 32 columns: see `multiply`

    // `rows`: of all of the step, 64 columns in a box of TILE_ROWS rows, each of 128 bytes whose
    // 16-byte pieces are permuted among 8 rows. This thread's two rows take turns: 16 registers hold
    // its share of one.
    __device__ __forceinline__ void quantize(unsigned rows, int first_row, float (&scale)[2]) {
        const int lane = threadIdx.x % 32, quad = lane % 4;
        const int row = first_row + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned start = rows + (row + half * 8) * 128;
            unsigned raw[16];
#pragma unroll
            for (int i = 0; i < 8; ++i) {  // columns 16 i + 4 quad to 16 i + 4 quad + 3
                const unsigned piece = (i % 4 * 2 + quad / 2) ^ (row & 7);
                const unsigned from = start + i / 4 * (TILE_ROWS * 128) + piece * 16 + quad % 2 * 8;
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                             : "=r"(raw[i * 2]), "=r"(raw[i * 2 + 1]) : "r"(from));
            }
            unsigned amax = 0;
#pragma unroll
            for (int i = 0; i < 16; ++i) amax = larger_halves(amax, raw[i] & 0x7fff7fffu);
            amax = of_quad(max(amax & 0xffffu, amax >> 16));
            if (any_of_warp(amax >= 0x7f80u)) amax = of_quad(finite(raw));  // seldom
            const float quotient = __fdiv_rn(__uint_as_float(amax << 16), 448.0f);
            scale[half] = amax == 0 ? 1.0f : fmaxf(quotient, 1.17549435e-38f);  // 2^-126
            if (any_of_warp(scale[half] < LIFT_BELOW)) {
                encode<true>(raw, scale[half], half);
            } else {
                encode<false>(raw, scale[half], half);
            }
        }
    }

private:
    static constexpr float LIFT_BELOW = 8.673617379884035e-19f;  // 2^-60: remainders underflow

    // The largest of the 4 threads that share a row.
    static __device__ __forceinline__ unsigned of_quad(unsigned value) {
        value = max(value, value_across(value, 1));
        return max(value, value_across(value, 2));
    }

    // Largest finite magnitude, as bits of bfloat16.
    static __device__ __forceinline__ unsigned finite(const unsigned (&raw)[16]) {
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const unsigned low = raw[i] & 0x7fffu, high = raw[i] >> 16 & 0x7fffu;
            largest = max(largest, low < 0x7f80u ? low : 0);
            largest = max(largest, high < 0x7f80u ? high : 0);
        }
        return largest;
    }

    // Markstein's division, see quantize.cuh. One step of correction is enough where the quotient is
    // then rounded to 4 bits: it is exact where the true quotient is a float32, as ties are.
    // Infinities turn into NaN by themselves (inf - inf).
    template <bool LIFTED>
    __device__ __forceinline__ void encode(const unsigned (&raw)[16], float scale, int half) {
        const float lift = LIFTED && scale < LIFT_BELOW ? 18446744073709551616.0f : 1.0f;  // 2^64
        const float divisor = LIFTED ? scale * lift : scale;
        const float reciprocal = __frcp_rn(divisor);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float quotient[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const unsigned pair = raw[i * 2 + j / 2];
                float x = __uint_as_float(j % 2 ? pair & 0xffff0000u : pair << 16);
                if constexpr (LIFTED) x *= lift;
                const float near = x * reciprocal;
                quotient[j] = fmaf(fmaf(near, divisor, -x), -reciprocal, near);
            }
            word[i / 2][i % 2 * 2 + half] = encode_pair<false>(quotient[0], quotient[1]) |
                                            encode_pair<false>(quotient[2], quotient[3]) << 16;
        }
    }
};
