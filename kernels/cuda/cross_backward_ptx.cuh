// Instructions that cross_backward.cu needs beside those of hopper.cuh.
#pragma once

// All threads of a team, of which there are at most 15; barrier 0 is __syncthreads.
template <int THREADS>
static __device__ __forceinline__ void synchronize_team(int team) {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(THREADS) : "memory");
}

static __device__ __forceinline__ void load_shared_16_bytes(unsigned from, unsigned (&word)[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(from) : "memory");
}
