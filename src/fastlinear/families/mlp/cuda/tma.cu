// TMA and wgmma, for stream.cu; the host puts this text before it.

struct alignas(64) TensorMap { char bytes[128]; };

__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_finish() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// 128-byte-swizzled K-major operand tile, 1024-byte aligned; 16 of K are 32 bytes.
__device__ __forceinline__ u64 descriptor(u32 addr) {
  return static_cast<u64>((addr & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void tma_load(u32 dst, const TensorMap* map, u32 bar, int k, int row,
                                         bool first_out) {
  if (first_out) {
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4}], [%2], policy;\n}" ::"r"(dst), "l"(map), "r"(bar), "r"(k), "r"(row)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(dst), "l"(map), "r"(bar), "r"(k), "r"(row)
        : "memory");
  }
}
