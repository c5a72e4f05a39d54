// Instructions that quantize_together.cu needs beside those of ptx.cuh.
#pragma once

// The shared memory that the launch asked for.
template <class Word>
static __device__ __forceinline__ Word* memory_of_block() {
    extern __shared__ Word memory[];
    return memory;
}

// 16 bytes into shared memory, of which the first `bytes` are read and the others are 0; there
// after `await_copies` of the same thread.
static __device__ __forceinline__ void copy_later(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(bytes)
                 : "memory");
}
static __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}
