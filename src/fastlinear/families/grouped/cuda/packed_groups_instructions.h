// Instructions of Hopper that the kernels of strips use. Macros: IS_BF16; SHARED, whether maps have a
// dimension of strips besides rows and columns.

typedef unsigned short u16;

struct alignas(64) TensorMap { char bytes[128]; };

__device__ __forceinline__ void bar_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bar_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar), "r"(parity)
      : "memory");
}

// Has L2 fetch what lies there, in whole 16 bytes.
__device__ __forceinline__ void fetch_to_l2(const void* from, u32 bytes) {
  const u64 begin = reinterpret_cast<u64>(from) & ~15ull;
  const u32 size = static_cast<u32>((reinterpret_cast<u64>(from) + bytes + 15 & ~15ull) - begin);
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(size) : "memory");
}

// The tile of tokens from `row` and a strip's columns, into or out of shared memory. T says in how
// many boxes of how many columns and bytes.
template <class T>
__device__ __forceinline__ void load_tile(u32 to, const TensorMap* map, u32 bar, int strip, int row) {
#pragma unroll
  for (int b = 0; b < T::BOXES; ++b)
    if (SHARED)
      asm volatile(
          "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
          " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to + b * T::BOX_BYTES),
          "l"(map), "r"(bar), "r"(b * T::BOX_COLUMNS), "r"(row), "r"(strip)
          : "memory");
    else
      asm volatile(
          "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
          " [%0], [%1, {%3, %4}], [%2];" ::"r"(to + b * T::BOX_BYTES),
          "l"(map), "r"(bar), "r"((strip * T::BOXES + b) * T::BOX_COLUMNS), "r"(row)
          : "memory");
}

template <class T>
__device__ __forceinline__ void store_tile(const TensorMap* map, u32 from, int strip, int row) {
#pragma unroll
  for (int b = 0; b < T::BOXES; ++b)
    if (SHARED)
      asm volatile(
          "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
          "r"(from + b * T::BOX_BYTES), "r"(b * T::BOX_COLUMNS), "r"(row), "r"(strip)
          : "memory");
    else
      asm volatile(
          "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
          "r"(from + b * T::BOX_BYTES), "r"((strip * T::BOXES + b) * T::BOX_COLUMNS), "r"(row)
          : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// So many bytes that lie one behind the other.
__device__ __forceinline__ void load_bytes(u32 to, const char* from, u32 bar, u32 bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(bar)
      : "memory");
}

__device__ __forceinline__ void store_bytes(char* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until all but the last KEPT groups of stores have been read from shared memory.
template <int KEPT>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(KEPT) : "memory");
}

// Matrices of 8 rows of 16 bytes; lanes 8i to 8i + 7 have the addresses of matrix i's rows.
template <bool TURNED>
__device__ __forceinline__ void load_four(u32 (&r)[4], u32 at) {
  if (TURNED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

template <bool TURNED>
__device__ __forceinline__ void load_two(u32& first, u32& second, u32 at) {
  if (TURNED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(first), "=r"(second)
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(first), "=r"(second)
                 : "r"(at)
                 : "memory");
}

template <int V>
__device__ __forceinline__ void load_words(u32 (&v)[V], u32 at) {
  if constexpr (V == 4)
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(at)
                 : "memory");
  else if constexpr (V == 2)
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(at) : "memory");
  else
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v[0]) : "r"(at) : "memory");
}

template <int V>
__device__ __forceinline__ void store_words(u32 at, const u32 (&v)[V]) {
  if constexpr (V == 4)
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]),
                 "r"(v[3])
                 : "memory");
  else if constexpr (V == 2)
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(at), "r"(v[0]), "r"(v[1]) : "memory");
  else
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v[0]) : "memory");
}

// c += a b, a of 16 rows and 8 words (4 where SHORT), b of 8 columns.
template <bool SHORT>
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#define FOUR "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#define LONG_PRODUCT(type)                                                                 \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                               \
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                         \
      : FOUR                                                                               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#define SHORT_PRODUCT(type)                                                                \
  asm("mma.sync.aligned.m16n8k8.row.col.f32." type "." type                                \
      ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"                                  \
      : FOUR                                                                               \
      : "r"(a[0]), "r"(a[1]), "r"(b0))
#if IS_BF16
  if (SHORT) SHORT_PRODUCT("bf16"); else LONG_PRODUCT("bf16");
#else
  if (SHORT) SHORT_PRODUCT("f16"); else LONG_PRODUCT("f16");
#endif
}

// The same of float32 numbers, of which the multiplier takes the first 19 bits: a of 16 rows and 8
// words (4 where SHORT).
template <bool SHORT>
__device__ __forceinline__ void multiply_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (SHORT)
    asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : FOUR
        : "r"(a[0]), "r"(a[1]), "r"(b0));
  else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : FOUR
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float half_of(u32 word, int which) {
  if (IS_BF16) return __uint_as_float(which ? word & 0xffff0000u : word << 16);
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(static_cast<u16>(which ? word >> 16 : word)));
  return out;
}

// Of two numbers, NaN kept.
__device__ __forceinline__ u32 relu_of(u32 word) {
  u32 out;
  if (IS_BF16)
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(word), "r"(0u));
  else
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(out) : "r"(word), "r"(0u));
  return out;
}
