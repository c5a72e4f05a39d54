// Stands in for kernels/cuda/norm.cuh and norm_backward_ptx.cuh, beside cuda_on_host.hpp.
#ifndef NORM_BACKWARD_ON_HOST
#define NORM_BACKWARD_ON_HOST
#define INFINITE __uint_as_float(0x7f800000u)
#define NOT_A_NUMBER __uint_as_float(0x7fffffffu)

static float from_bfloat16(unsigned bits) { return __uint_as_float(bits << 16); }

static unsigned to_bfloat16(float value) {
    const unsigned bits = __float_as_uint(value);
    if (std::isnan(value)) return 0x7fff;
    return bits + 0x7fff + (bits >> 16 & 1) >> 16;
}

static unsigned bfloat16_pair(float first, float second) {
    return to_bfloat16(first) | to_bfloat16(second) << 16;
}

static float sigmoid(float v) { return 1.0f / (1.0f + std::exp(-v)); }

static unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    }
    return result;
}

static float value_of_lane(float value, int lane) {
    return __uint_as_float(exchange(__float_as_uint(value), [=](const unsigned* of, unsigned) {
        return of[lane];
    }));
}

template <int>
static unsigned hidden_zero() {
    return 0;
}

struct alignas(8) Pair {
    float first, second;
};
struct alignas(16) Four {
    float value[4];
};

static Four load_now(const Four* from) { return *from; }
static Pair load_now(const Pair* from) { return *from; }

// What blocks told a block: by its number and the place in its memory. Blocks run one after the
// other, and the whole grid once more for each round of telling: by then all words of it are known.
static void await_begun_cluster() {}
static void store_in_cluster(Pair* place, int rank, Pair pair) {
    tell(blockIdx.x / CLUSTER * CLUSTER + rank, place, &pair);
}
static void meet_in_cluster() {
    __syncthreads();
    if (threadIdx.x == 0) take_told(blockIdx.x);
    __syncthreads();
}

template <int WORDS>
static void store_if(bool wanted, void* to, const unsigned (&word)[WORDS]) {
    if (!wanted) return;
    if (reinterpret_cast<std::uintptr_t>(to) % (4 * WORDS)) __builtin_trap();
    std::memcpy(to, word, 4 * WORDS);
}
static void store_16_bytes_if(bool wanted, void* to, const unsigned (&word)[4]) {
    store_if(wanted, to, word);
}
static void store_8_bytes_if(bool wanted, void* to, const unsigned (&word)[2]) {
    store_if(wanted, to, word);
}
#endif
