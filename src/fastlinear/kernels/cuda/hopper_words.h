// Small instructions that kernels for Hopper share; the host puts this text before theirs. Macro from
// the host: IS_BF16, else words hold float16.

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 smem_addr(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Two numbers rounded to 16 bits in a word, the first in its low half.
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 out;
#if IS_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
#endif
  return out;
}

__device__ __forceinline__ void unpack(u32 in, float& lo, float& hi) {
#if IS_BF16
  lo = __uint_as_float(in << 16);
  hi = __uint_as_float(in & 0xffff0000u);
#else
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
      : "=f"(lo), "=f"(hi)
      : "r"(in));
#endif
}

// Sums and the like that are worked out where they are needed, not kept in a register throughout.
__device__ __forceinline__ u32 add_here(u32 a, u32 b) {
  u32 out;
  asm volatile("add.u32 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

__device__ __forceinline__ u32 xor_here(u32 a, u32 b) {
  u32 out;
  asm volatile("xor.b32 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// The kernel launched behind this one may set up; it waits for this one's end before it reads.
__device__ __forceinline__ void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Accumulators are not read ahead of the wait that stands before.
template <int kCount>
__device__ __forceinline__ void settle(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}
