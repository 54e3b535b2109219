// Products and activations in float32 that the kernels of strips of float32 numbers share. Macros: DEPTH,
// ACT, and ACT_<NAME> for every activation.

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

// The mass of the standard normal distribution beyond a >= 0, as 2 to a polynomial: relative error 2e-8
// up to 6.5, as in activations_triton.py.
__device__ __forceinline__ float normal_tail(float a) {
  float p = fmaf(-1.9120668e-10f, a, 8.90491476e-09f);
  p = fmaf(p, a, -1.86933133e-07f);
  p = fmaf(p, a, 2.33099693e-06f);
  p = fmaf(p, a, -1.90285861e-05f);
  p = fmaf(p, a, 0.000103522231f);
  p = fmaf(p, a, -0.000335358761f);
  p = fmaf(p, a, 6.75572968e-05f);
  p = fmaf(p, a, 0.00690312235f);
  p = fmaf(p, a, -0.0524297883f);
  p = fmaf(p, a, -0.459220435f);
  p = fmaf(p, a, -1.15110455f);
  return exp2_approx(fmaf(p, a, -1.0f));
}

// To two units in the last place.
__device__ __forceinline__ float sigmoid(float x) { return rcp_approx(1.0f + expf(-x)); }

__device__ __forceinline__ float activated(float x) {
  if constexpr (ACT == ACT_SILU) return x * sigmoid(x);
  if constexpr (ACT == ACT_SIGMOID) return sigmoid(x);
  if constexpr (ACT == ACT_TANH) return tanhf(x);
  if constexpr (ACT == ACT_QUICK_GELU) return x * sigmoid(1.702f * x);
  if constexpr (ACT == ACT_GELU) {
    const float a = fminf(fabsf(x), 64.0f), tail = normal_tail(a);
    return x < 0.0f ? x * tail : x - a * tail;
  }
  if constexpr (ACT == ACT_GELU_TANH)
    return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  return act(x);  // exact
}

// dy * act'(pre) from what was saved: y for relu, leaky_relu, sigmoid and tanh, else pre.
__device__ __forceinline__ float graded(float dy, float saved) {
  if constexpr (ACT == ACT_RELU) return saved <= 0.0f ? 0.0f : dy;
  if constexpr (ACT == ACT_LEAKY_RELU) return saved > 0.0f ? dy : 0.01f * dy;
  if constexpr (ACT == ACT_RELU2) return saved <= 0.0f ? 0.0f : dy * (2.0f * saved);
  if constexpr (ACT == ACT_SIGMOID) return dy * (saved * (1.0f - saved));
  if constexpr (ACT == ACT_TANH) return dy * (1.0f - saved * saved);
  if constexpr (ACT == ACT_SILU || ACT == ACT_QUICK_GELU) {
    const float z = ACT == ACT_SILU ? saved : 1.702f * saved, s = sigmoid(z);
    return dy * (s * (1.0f + z * (1.0f - s)));
  }
  if constexpr (ACT == ACT_GELU_TANH) {
    const float square = saved * saved;
    const float t = tanhf(saved * (0.79788456080286536f + 0.035677408136300125f * square));
    const float slope = 0.79788456080286536f + 0.10703222440890037f * square;
    return dy * (0.5f * (1.0f + t) + 0.5f * saved * (1.0f - t * t) * slope);
  }
  if constexpr (ACT == ACT_GELU) {
    const float tail = normal_tail(fminf(fabsf(saved), 64.0f));
    const float bell = exp2_approx(-0.72134752044448170f * (saved * saved));
    return dy * ((saved < 0.0f ? tail : 1.0f - tail) + saved * (0.3989422804014327f * bell));
  }
  return dy;
}
