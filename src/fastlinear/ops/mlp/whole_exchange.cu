// What whole_grid.cu and whole_stream.cu hand numbers on with, between blocks that run at once: a
// word that is not written yet is EMPTY, a NaN that arithmetic never yields, and readers ask until
// none is left. The host puts this text behind whole_device.cu. Macros read here: CLUSTER, SAVE.

constexpr u32 EMPTY = 0xffffffffu;

__device__ __forceinline__ bool is_empty(uint4 v) {
  return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY;
}

__device__ __forceinline__ u32 never_empty(u32 v) { return v == EMPTY ? 0x7fffffffu : v; }

__device__ __forceinline__ uint4 as_words(float a, float b, float c, float d) {
  return make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
}

// Partial sums, to another block of the cluster …
__device__ __forceinline__ void store_peer4(u32 addr, uint4 v) {
  asm volatile("st.relaxed.cluster.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// … to this one …
__device__ __forceinline__ void store_own4(u32 addr, uint4 v) {
  asm volatile("st.relaxed.cluster.shared::cta.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// … and as they arrive in this one.
__device__ __forceinline__ uint4 load_sums(u32 addr) {
  uint4 v;
  asm volatile("ld.relaxed.cluster.shared::cta.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(addr)
               : "memory");
  return v;
}

__device__ __forceinline__ float4 add4(float4 a, uint4 b) {
  a.x += __uint_as_float(b.x);
  a.y += __uint_as_float(b.y);
  a.z += __uint_as_float(b.z);
  a.w += __uint_as_float(b.w);
  return a;
}

// What makes cutting off the lowest 8 bits nearly a rounding: adds 0.35 to 0.7 of the last bit that
// is kept. Not done on the bits, where a NaN (0x7fffffff) would overflow into a zero.
__device__ __forceinline__ float before_cut(float v) { return fmaf(v, 0x1.6ap-17f, v); }

// Four partial sums without their lowest 8 bits, in three words. None is EMPTY: that would take a
// NaN of all ones among them.
__device__ __forceinline__ void send_short(u32 to, int lane, float4 v) {
  const uint4 w = as_words(before_cut(v.x), before_cut(v.y), before_cut(v.z), before_cut(v.w));
  asm volatile("st.relaxed.cluster.shared::cluster.v2.b32 [%0], {%1, %2};" ::"r"(to + lane * 8),
               "r"(__byte_perm(w.x, w.y, 0x5321)), "r"(__byte_perm(w.y, w.z, 0x6532))
               : "memory");
  asm volatile("st.relaxed.cluster.shared::cluster.b32 [%0], %1;" ::"r"(to + 256 + lane * 4),
               "r"(__byte_perm(w.z, w.w, 0x7653))
               : "memory");
}

// start + such sums of all blocks of the cluster, kSourceBytes apart, in their order; empties them.
template <int kSourceBytes>
__device__ __forceinline__ float4 take_short(float4 start, u32 from, int lane) {
  const u32 pairs = from + lane * 8, singles = from + 256 + lane * 4;
  u32 a[CLUSTER], b[CLUSTER], c[CLUSTER];
  u32 most;
  do {
    most = 0;
#pragma unroll
    for (int s = 0; s < CLUSTER; ++s) {
      asm volatile("ld.relaxed.cluster.shared::cta.v2.b32 {%0, %1}, [%2];"
                   : "=r"(a[s]), "=r"(b[s])
                   : "r"(pairs + s * kSourceBytes)
                   : "memory");
      asm volatile("ld.relaxed.cluster.shared::cta.b32 %0, [%1];"
                   : "=r"(c[s])
                   : "r"(singles + s * kSourceBytes)
                   : "memory");
    }
#pragma unroll
    for (int s = 0; s < CLUSTER; ++s) most = max(most, max(a[s], max(b[s], c[s])));
  } while (__any_sync(EMPTY, most == EMPTY));
#pragma unroll
  for (int s = 0; s < CLUSTER; ++s) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %1};" ::"r"(pairs + s * kSourceBytes), "r"(EMPTY)
                 : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(singles + s * kSourceBytes), "r"(EMPTY)
                 : "memory");
    start = add4(start, make_uint4(a[s] << 8, __byte_perm(a[s], b[s], 0x5430) & 0xffffff00u,
                                   __byte_perm(b[s], c[s], 0x4320) & 0xffffff00u,
                                   c[s] & 0xffffff00u));
  }
  return start;
}

// Activations, in global memory for all blocks.
__device__ __forceinline__ uint4 load_published(const char* at) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ void publish(char* at, u32 v) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

__device__ __forceinline__ void publish2(char* at, u32 a, u32 b) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void publish4(char* at, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Whether a layer keeps its pre-activation.
__device__ __forceinline__ bool saves_pre(bool last) {
  return last ? SAVE == 1 || SAVE == 3 : SAVE == 1 || SAVE == 4;
}
