// Instructions that quantize_short.cu needs beside those of ptx.cuh.
#pragma once

static __device__ __forceinline__ unsigned shared_place(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// 16 bytes into shared memory; there after `await_pieces` of the same thread. OFFSET is a part of the
// instruction: sums for it took a tenth of all at 39 columns.
template <int OFFSET>
static __device__ __forceinline__ void copy_piece(unsigned to, const char* from) {
    asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %2], 16;" ::"r"(to), "l"(from),
                 "n"(OFFSET)
                 : "memory");
}

// The same where only the first `bytes` are there: the others are 0 and not read.
static __device__ __forceinline__ void copy_part(unsigned to, const char* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ void await_pieces() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// All threads of a warp get here, and see what the others wrote, before any goes on.
static __device__ __forceinline__ void synchronize_warp() { __syncwarp(); }
