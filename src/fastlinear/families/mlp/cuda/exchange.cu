// What grid.cu and stream.cu hand numbers on with, between blocks that run at once: a
// word that is not written yet is EMPTY, a NaN that arithmetic never yields, and readers ask until
// none is left. The host puts this text behind device.cu. Macros read here: SAVE.

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
