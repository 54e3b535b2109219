// Products in float32 that the kernels of strips of float32 numbers share. Macro: DEPTH.

// The high and the low half of a number's bits. The multiplier takes 11 bits of each, so the low half
// is rounded here; of what is not finite it is nothing.
__device__ __forceinline__ void cut(u32 word, u32& high, u32& low) {
  high = word & 0xffffe000u;
  low = __float_as_uint(__uint_as_float(word) - __uint_as_float(high)) + 0x1000u;
}

// c = a b, the first of a sum.
template <bool SHORT>
__device__ __forceinline__ void begin_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#define RESULT "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
  if (SHORT)
    asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
        : RESULT
        : "r"(a[0]), "r"(a[1]), "r"(b0), "f"(0.0f));
  else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%10,%10,%10};"
        : RESULT
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// sum += a b of MANY steps of 8 numbers (the last of 4 where SHORT), each in two numbers: high * high by
// themselves, the small ones into the rest.
template <int MANY, bool SHORT>
__device__ __forceinline__ void multiply_split(float (&sum)[4], float (&rest)[4], const u32 (&high)[MANY][4],
                                               const u32 (&low)[MANY][4], const u32 (&w)[MANY][4]) {
  static_assert(MANY <= 2, "one or two steps");
  float whole[4];
  begin_tf32<SHORT && MANY == 1>(whole, high[0], w[0][0], w[0][1]);
  if constexpr (MANY == 2) multiply_tf32<SHORT>(whole, high[1], w[1][0], w[1][1]);
#pragma unroll
  for (int d = 0; d < MANY; ++d) {
    if (SHORT && d == MANY - 1) {
      multiply_tf32<true>(rest, high[d], w[d][2], w[d][3]);
      multiply_tf32<true>(rest, low[d], w[d][0], w[d][1]);
    } else {
      multiply_tf32<false>(rest, high[d], w[d][2], w[d][3]);
      multiply_tf32<false>(rest, low[d], w[d][0], w[d][1]);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) sum[e] += whole[e];
}

// The steps of a row of T that DEPTH at a time leave over, and where they begin.
template <class T>
struct Rest {
  static constexpr int WHOLE = T::STEPS - T::HALF, MANY = WHOLE % DEPTH + T::HALF;
  static constexpr int BEGIN = WHOLE - WHOLE % DEPTH;
};

// 16 tokens of 8 columns of a Tile T, or of 4 if SHORT and the last of some.
template <class T, bool SHORT>
__device__ __forceinline__ void load_split(u32 (&high)[4], u32 (&low)[4], u32 tile, int first, int s,
                                           bool last, int lane) {
  u32 a[4] = {0u, 0u, 0u, 0u};
  const int row = first + lane % 16;
  if (SHORT && last)
    load_two<false>(a[0], a[1], tile + T::at(row, 32 * s));
  else
    load_four<false>(a, tile + T::at(row, 32 * s + lane / 16 * 16));
#pragma unroll
  for (int i = 0; i < 4; ++i) cut(a[i], high[i], low[i]);
}

// Of infinities the rest is no number.
__device__ __forceinline__ float together(float sum, float rest) {
  return sum + (rest == rest ? rest : 0.0f);
}
