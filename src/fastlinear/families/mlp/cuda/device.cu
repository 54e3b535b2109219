// Instructions that all kernels of the family are written in; the host puts this text before them.
// Macros read here: DTYPE and KS, as whole.cu explains them.

typedef unsigned int u32;
typedef unsigned long long u64;

// ---------------------------------------------------------------- PTX wrappers

__device__ __forceinline__ u32 smem_addr(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // after a fence
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 peer_addr(u32 addr, int rank) {
  u32 out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(addr), "r"(rank));
  return out;
}

__device__ __forceinline__ void mbar_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void mbar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbar_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void mbar_arrive(u32 bar, u32 count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void mbar_arrive_at_peer(u32 bar) {  // an address of the cluster
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar)
               : "memory");
}

__device__ __forceinline__ void mbar_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar), "r"(parity)
      : "memory");
}

// The same for what this block's own threads and copies did: beyond the block, acquiring would empty
// the L1 cache and wait for loads under way.
__device__ __forceinline__ void mbar_wait_own(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void store_async(u32 addr, u32 bar, uint4 v) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
      ::"r"(addr), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bar)
      : "memory");
}

__device__ __forceinline__ void group_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(KS * 32) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kLeft>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

__device__ __forceinline__ uint4 load16(u32 addr) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(addr)
               : "memory");
  return v;
}

__device__ __forceinline__ void store16(u32 addr, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// 16 bytes from global memory, of which the first `bytes` are read and the others are zero.
template <int kVec>
__device__ __forceinline__ void copy16(u32 dst, const char* src, int bytes) {
  if constexpr (kVec == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                 "r"(bytes)
                 : "memory");
  } else if constexpr (kVec >= 4) {
#pragma unroll
    for (int i = 0; i < 16; i += kVec) {
      const int part = min(max(bytes - i, 0), kVec);
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst + i),
                   "l"(part > 0 ? src + i : src), "n"(kVec), "r"(part)
                   : "memory");
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      unsigned short v = 0;
      if (i < bytes) v = *reinterpret_cast<const unsigned short*>(src + i);
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(dst + i), "h"(v) : "memory");
    }
  }
}

// The same for 4 bytes.
__device__ __forceinline__ void copy_word(u32 dst, const char* src, int bytes, bool aligned) {
  if (aligned) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(bytes)
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      unsigned short v = 0;
      if (i < bytes) v = *reinterpret_cast<const unsigned short*>(src + i);
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(dst + i), "h"(v) : "memory");
    }
  }
}

// A weight piece straight into registers; nothing is written to weights while the kernel runs.
__device__ __forceinline__ uint4 load_weight(const char* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

__device__ __forceinline__ void stmatrix_trans(u32 addr, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(addr),
               "r"(a), "r"(b)
               : "memory");
}

__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 out;
  if constexpr (DTYPE == 0) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
  }
  return out;
}

__device__ __forceinline__ float load_element(const void* base, int index) {
  if constexpr (DTYPE == 2) return static_cast<const float*>(base)[index];
  const u32 bits = static_cast<const unsigned short*>(base)[index];
  if constexpr (DTYPE == 0) return __uint_as_float(bits << 16);
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(static_cast<unsigned short>(bits)));
  return out;
}

__device__ __forceinline__ float load_shared_element(u32 addr) {
  if constexpr (DTYPE == 2) {
    float out;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(out) : "r"(addr) : "memory");
    return out;
  }
  unsigned short bits;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(bits) : "r"(addr) : "memory");
  return load_element(&bits, 0);
}

// d (16 columns, 8 rows) += A B over 32 bytes of K; the operands are 32-bit registers.
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if DTYPE == 0
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#elif DTYPE == 1
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
#endif
  asm volatile(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// x = hi + lo, both tf32; what is lost is below 2^-24 of x.
__device__ __forceinline__ void split(u32 x, u32& hi, u32& lo) {
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(hi) : "f"(__uint_as_float(x)));
  const float rest = __uint_as_float(x) - __uint_as_float(hi);
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(lo) : "f"(rest));
}

__device__ __forceinline__ void split4(uint4 x, uint4& hi, uint4& lo) {
  split(x.x, hi.x, lo.x);
  split(x.y, hi.y, lo.y);
  split(x.z, hi.z, lo.z);
  split(x.w, hi.w, lo.w);
}
