// What blocks that share rows tell each other of them: two float32 values of each row.
//
// Macros, from norm_tiles.py:
//
//     CLUSTER         blocks that share rows
//     THROUGH_MEMORY  1: they are no cluster, but any of a cooperative launch
#pragma once
#include "norm_mainloop.cuh"

constexpr int SLOT_BYTES = 64 * CLUSTER * (THROUGH_MEMORY ? 16 : 8);
// Two slots; in shared memory the barrier of each follows.
constexpr int ROUND_BYTES = 2 * SLOT_BYTES + (THROUGH_MEMORY ? 0 : 16);
// In memory, for all blocks: the last turn, how many blocks have ended; then what is told.
constexpr int TOLD_AT = 128;

// Of 64 rows at a time, in turn by two slots. Who tells of the tile after the next has had word of
// the next from all others, who had read this one's by then. A thread has two rows of its quad,
// `row` and 8 more; back come pairs of values of all blocks, in their order.
#if THROUGH_MEMORY
// 16 bytes each, with the number of the turn, which never comes twice: who reads them knows by it
// that they are there. All blocks are on SMs at once (a cooperative launch), so that waiting ends.
// What a warp tells lies in one piece, [4 warps, CLUSTER, 16 rows], so that each line of memory has
// one writer, and whoever asks, asks for whole lines: with a line for each row, of all blocks, an
// answer took 2000 to 8000 cycles instead of 700 to 3000.
struct Exchange {
    char* base;
    unsigned long long turn;

    __device__ __forceinline__ void collect(
        int row, const float (&first)[2], const float (&second)[2], float2 (&all)[2][CLUSTER]) {
        constexpr int OF_WARP = 16 * 16;  // bytes that a warp tells: those of 16 rows
        const int thread = threadIdx.x % 32;
        char* at = base + (turn & 1) * SLOT_BYTES + row / 16 * (CLUSTER * OF_WARP);
        if (thread % 4 < 2) {
            const int half = thread % 4, mine = blockIdx.x % CLUSTER;
            const unsigned long long values =
                static_cast<unsigned long long>(__float_as_uint(half ? second[1] : second[0]))
                    << 32 |
                __float_as_uint(half ? first[1] : first[0]);
            asm volatile(
                "{.reg .b128 all;\n mov.b128 all, {%1, %2};\n st.relaxed.gpu.global.b128 [%0], "
                "all;}" ::"l"(at + mine * OF_WARP + (thread / 4 + half * 8) * 16),
                "l"(values), "l"(turn)
                : "memory");
        }
        __nanosleep(100);  // the first answer would come too early, and cost others time
        constexpr int EACH = (CLUSTER + 1) / 2;  // blocks that a thread hears: two have its row
        unsigned long long heard[EACH];
        bool there;
        do {
            there = true;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int rank = min(i * 2 + thread / 16, CLUSTER - 1);
                unsigned long long when;
                asm volatile(
                    "{.reg .b128 all;\n ld.relaxed.gpu.global.b128 all, [%2];\n"
                    " mov.b128 {%0, %1}, all;}"
                    : "=l"(heard[i]), "=l"(when)
                    : "l"(at + rank * OF_WARP + thread % 16 * 16)
                    : "memory");
                there = there && when == turn;
            }
        } while (!__all_sync(0xffffffffu, there));
        ++turn;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) {
                const unsigned long long values = __shfl_sync(
                    0xffffffffu, heard[rank / 2], rank % 2 * 16 + thread / 4 + half * 8);
                all[half][rank] = make_float2(
                    __uint_as_float(static_cast<unsigned>(values)),
                    __uint_as_float(static_cast<unsigned>(values >> 32)));
            }
        }
    }
};
#else
// By asynchronous stores into shared memory, which count at a barrier there. What a warp tells one
// block lies in one piece: scattered, 2048 x 512 x 512 took 6.2 us instead of 5.7.
struct Exchange {
    unsigned base;
    unsigned slot = 0, parity = 0;

    __device__ __forceinline__ void collect(
        int row, const float (&first)[2], const float (&second)[2], float2 (&all)[2][CLUSTER]) {
        const unsigned values = base + slot * SLOT_BYTES,
                       barrier = base + 2 * SLOT_BYTES + slot * 8;
        if (threadIdx.x % 128 == 0) expect_bytes(barrier, SLOT_BYTES);
        const unsigned mine = rank_in_cluster();
#pragma unroll
        for (int at = 0; at < CLUSTER; at += 4) {
            const unsigned rank = at + threadIdx.x % 4;
            if (CLUSTER % 4 != 0 && rank >= CLUSTER) continue;
            const unsigned there = address_in(barrier, rank);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned to = address_in(values + (mine * 64 + row + half * 8) * 8, rank);
                asm volatile(
                    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
                    "[%3];" ::"r"(to),
                    "f"(first[half]), "f"(second[half]), "r"(there)
                    : "memory");
            }
        }
        wait(barrier, parity);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) {
                all[half][rank] = load_shared_pair(values + (rank * 64 + row + half * 8) * 8);
            }
        }
        await_loaded(all[0][CLUSTER - 1].x, all[1][CLUSTER - 1].x);
        if (slot) parity ^= 1;
        slot ^= 1;
    }
};
#endif
