// One kernel for each thing that lokakern.driver can ask of the driver; see test_nvrtc.py.

struct alignas(64) TensorMap {
    char bytes[128];
};

__device__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// out: [ROWS, COLUMNS] float32 bits, the box of the map's tensor that begins at (row, column). The
// box lies above the first 48 KiB of shared memory, which a block has only if it is asked for.
extern "C" __global__ void copy_box(
    unsigned* out, int row, int column, const __grid_constant__ TensorMap map) {
    extern __shared__ unsigned char memory[];
    __shared__ __align__(8) unsigned long long barrier;
    const unsigned char* above = memory + 48 * 1024;
    above += -shared_address(above) & 127;  // where a bulk copy may write
    const unsigned* box = reinterpret_cast<const unsigned*>(above);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)));
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                         shared_address(&barrier)),
                     "r"(ROWS * COLUMNS * 4)
                     : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(box)),
            "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier))
            : "memory");
    }
    __syncthreads();
    unsigned complete = 0;
    while (!complete) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; "
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(complete)
            : "r"(shared_address(&barrier))
            : "memory");
    }
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) out[i] = box[i];
}

// out[b] = what the other block of b's cluster keeps in its shared memory: 100 + its number.
extern "C" __global__ void swap_in_cluster(unsigned* out) {
    __shared__ unsigned mine;
    unsigned rank, remote, value;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    mine = 100 + blockIdx.x;
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" :::
                     "memory");
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(remote)
                 : "r"(shared_address(&mine)), "r"(rank ^ 1));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote) : "memory");
    out[blockIdx.x] = value;
    // The other block may still read: none ends before both have read.
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" :::
                     "memory");
}

// total[i] += step, late: launched programmatically, the next of its kind has begun by then and
// adds too early unless it waits.
extern "C" __global__ void add_late(unsigned* total, unsigned step) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned before = *static_cast<volatile unsigned*>(total + index);
    __nanosleep(20000);
    total[index] = before + step;
}
