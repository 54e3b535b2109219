// What the kernels of few rows share: y (M, N) = act(x (M, K) W (N, K)^T + b), W read once.
//
// Macros from the host: CL (blocks of a cluster, which share a strip of outputs and split K),
// HAS_BIAS, ACT, and a number ACT_<NAME> for every activation.

// ---------------------------------------------------------------- PTX wrappers

// The next launch may set up from here on; nothing is read or written before the last one is done.
__device__ __forceinline__ void wait_for_last_launch() {
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank = 0;
  if constexpr (CL > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Says that this block runs: its shared memory may be written to by the others from then on.
__device__ __forceinline__ void cluster_here() {
  if constexpr (CL > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  if constexpr (CL > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Of warps that may have diverged.
__device__ __forceinline__ void cluster_meet() {
  __syncwarp();
  cluster_sync();
}

// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ u32 in_block(u32 addr, u32 block) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(addr), "r"(block));
  return there;
}

// 16 bytes of global memory, of which none is read and all are zero where not `real`.
__device__ __forceinline__ void copy16(u32 dst, const void* src, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(real ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kLeft>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Has the address worked out here, before what comes next.
template <typename T>
__device__ __forceinline__ void settle(T*& p) {
  asm volatile("" : "+l"(p));
}

// 16 bytes of W, which no other thread reads; zeros where not `real`.
__device__ __forceinline__ uint4 load_weight(const void* src, bool real) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n@p ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(src), "r"(static_cast<u32>(real))
      : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_shared(u32 addr) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(addr)
               : "memory");
  return v;
}
