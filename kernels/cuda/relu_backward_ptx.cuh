// Instructions that relu_backward.cu needs beside those of hopper.cuh.
#pragma once

// Ones in the halves where a bfloat16 is greater than 0, or NaN.
static __device__ __forceinline__ unsigned positive_halves(unsigned word) {
    unsigned mask;
    asm("set.gtu.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(word), "r"(0u));
    return mask;
}

// Magnitudes of two bfloat16, 0 for what is not finite.
static __device__ __forceinline__ unsigned finite_magnitudes(unsigned word) {
    const unsigned size = word & 0x7fff7fffu;
    unsigned finite;
    asm("set.lt.u32.bf16x2 %0, %1, %2;" : "=r"(finite) : "r"(size), "r"(0x7f807f80u));
    return size & finite;
}

// The sign bit of each half in all bits of the half.
static __device__ __forceinline__ unsigned signs_spread(unsigned word) {
    unsigned mask;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(mask) : "r"(word));
    return mask;
}

static __device__ __forceinline__ void store_shared(unsigned to, unsigned value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

static __device__ __forceinline__ void store_shared_half(unsigned to, unsigned value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(static_cast<unsigned short>(value))
                 : "memory");
}

static __device__ __forceinline__ void load_shared_16_bytes(unsigned from, unsigned (&word)[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(from) : "memory");
}

// All threads of a team, of which there are at most 15; barrier 0 is __syncthreads.
template <int THREADS>
static __device__ __forceinline__ void synchronize_team(int team) {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(THREADS) : "memory");
}

static __device__ __forceinline__ uint2 load_from_cluster_8(unsigned from) {
    uint2 value;
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
                 : "=r"(value.x), "=r"(value.y) : "r"(from) : "memory");
    return value;
}

// At a barrier of a block of the cluster, which then sees what the threads that met before wrote.
static __device__ __forceinline__ void arrive_in_cluster(unsigned barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
                 : "memory");
}

// Until blocks of the cluster have arrived, and what they wrote is seen.
static __device__ __forceinline__ void wait_for_cluster(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}
