// What only Hopper has: bulk copies (TMA), barriers that count bytes, products of warpgroups (WGMMA),
// clusters, registers moved between warpgroups, and launches that overlap.
//
// Addresses of shared memory are 32 bits. "Elected" functions are called by one thread.
#pragma once
#include "ptx.cuh"

struct alignas(64) TensorMap {
    char bytes[128];
};

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// --- registers and barriers of warpgroups

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// All threads of a warpgroup; barrier 0 is __syncthreads.
__device__ __forceinline__ void synchronize_warpgroup(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// --- barriers that count arrivals and bytes

__device__ __forceinline__ void initialize_barrier(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialized barriers visible to bulk copies and to other blocks of the cluster.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}

// Elected. One arrival, and so many bytes of bulk copies to come.
__device__ __forceinline__ void expect_bytes(unsigned barrier, unsigned bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
        : "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// --- clusters

__device__ __forceinline__ unsigned rank_in_cluster() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void synchronize_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of a place in the shared memory of a block of the cluster.
__device__ __forceinline__ unsigned address_in(unsigned address, unsigned rank) {
    unsigned remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

__device__ __forceinline__ float4 load_from_cluster(unsigned address) {
    float4 value;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address) : "memory");
    return value;
}

// --- bulk copies of boxes of a tensor; coordinates from the innermost axis outward. All elected.

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void load_box(
    unsigned to, const TensorMap& map, unsigned barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

__device__ __forceinline__ void load_box(
    unsigned to, const TensorMap& map, unsigned barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap& map, unsigned from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(&map), "r"(from), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap& map, unsigned from, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
        ::"l"(&map), "r"(from), "r"(x), "r"(y), "r"(z) : "memory");
}

// Adds float32 elements to what is there.
__device__ __forceinline__ void add_box(const TensorMap& map, unsigned from, int x, int y) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
                 " [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(from), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void add_box(const TensorMap& map, unsigned from, int x, int y, int z) {
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group"
                 " [%0, {%2, %3, %4}], [%1];" ::"l"(&map), "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void commit_stores() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until all stores committed have read shared memory.
__device__ __forceinline__ void wait_until_stores_have_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// What this thread wrote to shared memory becomes visible to bulk copies and tensor cores.
__device__ __forceinline__ void publish_shared_memory() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- fragments to shared memory: 8x8 blocks of 16-bit elements, a row of 16 bytes by each address

__device__ __forceinline__ void store_blocks(unsigned address, const unsigned (&block)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(block[0]), "r"(block[1]), "r"(block[2]), "r"(block[3])
                 : "memory");
}

__device__ __forceinline__ void store_blocks(unsigned address, const unsigned (&block)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
                 ::"r"(address), "r"(block[0]), "r"(block[1]) : "memory");
}

// --- products of warpgroups

// A matrix of rows of 128 or 64 bytes in shared memory, its 16-byte pieces permuted among 8 rows
// (the copy's swizzle of as many bytes): address and stride of 8 rows in units of 16 bytes.
template <int ROW_BYTES>
struct Matrix {
    unsigned low;

    __device__ __forceinline__ explicit Matrix(unsigned address) : low(address >> 4 | 1u << 16) {}

    // That of another place, so many bytes on.
    __device__ __forceinline__ unsigned long long at(unsigned bytes) const {
        return (ROW_BYTES == 128 ? 0x4000004000000000ull : 0x8000002000000000ull) |
               (low + bytes / 16);
    }
};

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The compiler must not move uses of accumulators across what it does not understand.
template <int COUNT>
__device__ __forceinline__ void pin(float (&value)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(value[i])::"memory");
}

#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R8(i) R4(i), R4(i + 4)
#define R16(i) R8(i), R8(i + 8)
#define R32(i) R16(i), R16(i + 16)
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
// d[64, COLUMNS] = a[64, 32] b[COLUMNS, 32]^T, plus d if `add`; FP8, 32 bytes of each row.
#define DEFINE_PRODUCT(COLUMNS, LIST, FIRST, SECOND, THIRD, ...)                                  \
    __device__ __forceinline__ void multiply(                                                     \
        float (&d)[COLUMNS / 2], unsigned long long a, unsigned long long b, int add) {           \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #THIRD ", 0;\n"                         \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32." TEXT(A_TYPE) "."     \
                     TEXT(B_TYPE) " {" LIST "}, %" #FIRST ", %" #SECOND ", p, 1, 1;\n}"           \
                     : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));                                   \
    }
#define L4_0 "%0, %1, %2, %3"
#define L8_0 L4_0 ", %4, %5, %6, %7"
#define L16_0 L8_0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define L16_1 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define L16_2 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define L16_3 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
DEFINE_PRODUCT(8, L4_0, 4, 5, 6, R4(0))
DEFINE_PRODUCT(16, L8_0, 8, 9, 10, R8(0))
DEFINE_PRODUCT(24, L8_0 ", %8, %9, %10, %11", 12, 13, 14, R8(0), R4(8))
DEFINE_PRODUCT(32, L16_0, 16, 17, 18, R16(0))
DEFINE_PRODUCT(64, L16_0 L16_1, 32, 33, 34, R32(0))
DEFINE_PRODUCT(96, L16_0 L16_1 L16_2, 48, 49, 50, R32(0), R16(32))
DEFINE_PRODUCT(128, L16_0 L16_1 L16_2 L16_3, 64, 65, 66, R32(0), R32(32))
#undef R4
#undef R8
#undef R16
#undef R32
#undef DEFINE_PRODUCT
