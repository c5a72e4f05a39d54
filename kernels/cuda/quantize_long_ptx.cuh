// Instructions that quantize_long.cu needs beside those of hopper.cuh.
#pragma once

// Elected. So many bytes of global memory into this block's shared memory, which count at a barrier
// when they are there; addresses and number are multiples of 16.
static __device__ __forceinline__ void copy_in_bulk(
    unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to), "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// A word into the shared memory of a block of the cluster, which counts 4 bytes at a barrier there.
static __device__ __forceinline__ void tell(unsigned to, unsigned value, unsigned barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
        "r"(value), "r"(barrier)
        : "memory");
}

// Until all threads of the cluster have passed `begin_in_cluster`.
static __device__ __forceinline__ void await_cluster() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

static __device__ __forceinline__ unsigned load_shared(unsigned from) {
    unsigned value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return value;
}

static __device__ __forceinline__ void store_shared(unsigned to, unsigned value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

static __device__ __forceinline__ void load_shared_16_bytes(unsigned from, unsigned (&word)[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(from) : "memory");
}

static __device__ __forceinline__ void store_16_bytes(void* to, const unsigned (&word)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
}
