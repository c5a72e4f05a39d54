// Instructions that C++ has no word for, and no header of CUDA's is needed for.
#pragma once

// 16 bytes of global memory, past the L1: every byte is used once and at once. Volatile, so that
// loads stay together and all of them are in flight before the first is used.
static __device__ __forceinline__ void load_16_bytes(const void* from, unsigned* word) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(from));
}

// The same where neighbors read it again soon.
static __device__ __forceinline__ void load_16_cached_bytes(const void* from, unsigned* word) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(from));
}

// Of a programmatic launch: wait until the kernel before in the stream has ended and all it wrote is
// seen, then let the next one begin. Not sooner: where launches wait for launches that wait, a call
// on 2048 x 256 took 3.2 us instead of 1.7. Does nothing in other launches.
static __device__ __forceinline__ void begin_in_turn() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// The larger of each half of two words, as unsigned integers.
static __device__ __forceinline__ unsigned larger_halves(unsigned a, unsigned b) {
    unsigned larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// Largest value of the 32 threads of a warp, in one instruction.
static __device__ __forceinline__ unsigned largest_of_warp(unsigned value) {
    unsigned largest;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
    return largest;
}

// The value of the thread of the same warp whose number differs by exclusive or.
static __device__ __forceinline__ unsigned value_across(unsigned value, int distance) {
    return __shfl_xor_sync(0xffffffffu, value, distance);
}

// Bytes of two words from a bit of the lower on.
static __device__ __forceinline__ unsigned shifted_words(unsigned low, unsigned high, int bits) {
    return __funnelshift_r(low, high, bits);
}

// Of a cluster of blocks, in two steps: tell the others that this block has begun, so that they may
// write into its memory; then the largest value of all blocks, from one that all threads of a block
// share. `slots` are one word of shared memory for each block.
static __device__ __forceinline__ void begin_in_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
template <int BLOCKS>
static __device__ __forceinline__ unsigned largest_of_cluster(unsigned value, unsigned* slots) {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    if (threadIdx.x < BLOCKS) {
        const unsigned slot = static_cast<unsigned>(__cvta_generic_to_shared(slots + rank));
        asm volatile(
            "{\n\t.reg .u32 there;\n\t"
            "mapa.shared::cluster.u32 there, %0, %1;\n\t"
            "st.shared::cluster.u32 [there], %2;\n\t}" ::"r"(slot), "r"(threadIdx.x), "r"(value)
            : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    unsigned largest = 0;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) largest = max(largest, slots[block]);
    return largest;
}

// Every thread of a cooperative launch gets here before any goes on, and sees what the others wrote.
// The driver gives such a launch a word of memory for it, in environment registers, as it does for
// cooperative groups: its lowest bits count blocks and are 0 in between, its highest bit flips.
static __device__ __forceinline__ void barrier_of_grid() {
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned high, low, before, now;
        asm("mov.u32 %0, %%envreg1;" : "=r"(high));
        asm("mov.u32 %0, %%envreg2;" : "=r"(low));
        const unsigned long long word = (static_cast<unsigned long long>(high) << 32 | low) + 4;
        const unsigned mine = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
        asm volatile("atom.add.release.gpu.u32 %0, [%1], %2;"
                     : "=r"(before) : "l"(word), "r"(mine) : "memory");
        do {
            asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
        } while (((before ^ now) & 0x80000000u) == 0);
    }
    __syncthreads();
}

// Past the L1, where what other blocks of this launch wrote does not arrive.
static __device__ __forceinline__ unsigned load_from_l2(const unsigned* from) {
    unsigned value;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Of numbers that are not negative, the bits of the largest: their order does not matter.
static __device__ __forceinline__ void raise_to(unsigned* place, unsigned value) {
    asm volatile("red.global.max.u32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}

static __device__ __forceinline__ bool any_of_warp(bool condition) {
    return __any_sync(0xffffffffu, condition);
}

// Two values as FP8 bytes, the first in the low byte: nearest even, saturating, NaN to 0x7f.
template <bool E5M2>
static __device__ __forceinline__ unsigned encode_pair(float first, float second) {
    unsigned short pair;
    if constexpr (E5M2) {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    } else {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    }
    return pair;
}
