// Instructions that norm_backward.cu needs beside those of ptx.cuh.
#pragma once

// The value of a thread of the same warp.
static __device__ __forceinline__ float value_of_lane(float value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}

// 0, which no compiler knows, because a grid has one row and one layer: one of three. What is made of
// it is not known to be what was made of another, so that neither is kept for the other where
// registers are short.
template <int WHICH>
static __device__ __forceinline__ unsigned hidden_zero() {
    return WHICH == 0 ? blockIdx.y : WHICH == 1 ? blockIdx.z : gridDim.y - 1;
}

struct alignas(8) Pair {
    float first, second;
};
struct alignas(16) Four {
    float value[4];
};

// Of shared memory, at this place of the program and not before, where registers are short.
static __device__ __forceinline__ Four load_now(const Four* from) {
    Four four;
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four.value[0]), "=f"(four.value[1]), "=f"(four.value[2]),
                   "=f"(four.value[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from)))
                 : "memory");
    return four;
}

// After `begin_in_cluster`: all blocks have begun, so that their memory may be written.
static __device__ __forceinline__ void await_begun_cluster() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// Into the same place of the shared memory of a block of the cluster.
static __device__ __forceinline__ void store_in_cluster(Pair* place, int rank, Pair pair) {
    const unsigned slot = static_cast<unsigned>(__cvta_generic_to_shared(place));
    asm volatile(
        "{\n\t.reg .u32 there;\n\t"
        "mapa.shared::cluster.u32 there, %0, %1;\n\t"
        "st.shared::cluster.v2.f32 [there], {%2, %3};\n\t}" ::"r"(slot),
        "r"(rank), "f"(pair.first), "f"(pair.second)
        : "memory");
}

// All threads of the cluster get here before any goes on, and see what the others stored.
static __device__ __forceinline__ void meet_in_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

static __device__ __forceinline__ Pair load_now(const Pair* from) {
    Pair pair;
    asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(pair.first), "=f"(pair.second)
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from)))
                 : "memory");
    return pair;
}

// 16 bytes, or 8, if a condition holds; without a branch, into which the compiler would move what is
// stored, and keep in registers all that it is made of.
static __device__ __forceinline__ void store_16_bytes_if(bool wanted, void* to,
                                                         const unsigned (&word)[4]) {
    asm volatile(
        "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %0, 0;\n\t"
        "@wanted st.global.v4.u32 [%1], {%2, %3, %4, %5};\n\t}" ::"r"(
            static_cast<unsigned>(wanted)),
        "l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
        : "memory");
}
static __device__ __forceinline__ void store_8_bytes_if(bool wanted, void* to,
                                                        const unsigned (&word)[2]) {
    asm volatile(
        "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %0, 0;\n\t"
        "@wanted st.global.v2.u32 [%1], {%2, %3};\n\t}" ::"r"(static_cast<unsigned>(wanted)),
        "l"(to), "r"(word[0]), "r"(word[1])
        : "memory");
}
