// Stands in for kernels/cuda/quantize_short_ptx.cuh, beside cuda_on_host.hpp.
#ifndef QUANTIZE_SHORT_ON_HOST
#define QUANTIZE_SHORT_ON_HOST

// Places in shared memory count from that of the warp which copies, as all of one warp do.
static char* shared_base;
static unsigned shared_place(const void* pointer) {
    shared_base = static_cast<char*>(const_cast<void*>(pointer));
    return 0;
}

static void copy_part(unsigned to, const char* from, int bytes) {
    if ((to | reinterpret_cast<std::uintptr_t>(from)) % 16) __builtin_trap();
    std::memset(shared_base + to, 0, 16);
    std::memcpy(shared_base + to, from, bytes);
}
template <int OFFSET>
static void copy_piece(unsigned to, const char* from) {
    copy_part(to + OFFSET, from + OFFSET, 16);
}
static void await_pieces() {}
static void synchronize_warp() { __syncthreads(); }
#endif
