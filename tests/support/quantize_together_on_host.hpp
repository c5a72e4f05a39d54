// Stands in for kernels/cuda/quantize_together_ptx.cuh, beside cuda_on_host.hpp.
#ifndef QUANTIZE_TOGETHER_ON_HOST
#define QUANTIZE_TOGETHER_ON_HOST

template <class Word>
static Word* memory_of_block() {
    alignas(16) static char memory[227 << 10];
    return reinterpret_cast<Word*>(memory);
}

static void copy_later(void* to, const void* from, int bytes) {
    const auto places = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
    if (places % 16 && bytes) __builtin_trap();
    std::memset(to, 0, 16);
    std::memcpy(to, from, bytes);
}
static void await_copies() {}
#endif
