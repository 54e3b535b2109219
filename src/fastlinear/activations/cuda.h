// Activations and their derivatives in float32, for every CUDA kernel: the only place of each.
//
// Macros from the host: a number ACT_<NAME> for every activation, a list of all but none, ACT_EACH(DO), the
// kernel's own activation as ACT, and how functions are evaluated as ACT_FORM. The forms of a
// function differ in last bits:
//
//   FORM_FAST      approximate instructions, for 16-bit results
//   FORM_LIBRARY   CUDA's math library
//   FORM_PRODUCT   the same, x * sigmoid(x) as a product
//   FORM_QUOTIENT  the same, x * sigmoid(x) as a quotient; gelu by erfc
//   FORM_TAIL      expf and an approximate reciprocal; gelu by the tail of the distribution
//
// A new activation needs one form, or two: FAST and the math library.
// Comparisons are written so that NaN stays NaN.

#define FORM_FAST 0
#define FORM_LIBRARY 1
#define FORM_PRODUCT 2
#define FORM_QUOTIENT 3
#define FORM_TAIL 4

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (1 + exp(-scale * x)); FAST: relative error about 1e-6 in either tail.
__device__ __forceinline__ float sigmoid(float x, float scale = 1.0f) {
  if constexpr (ACT_FORM == FORM_FAST)
    return rcp_approx(1.0f + exp2_approx(x * (-1.4426950408889634f * scale)));
  if constexpr (ACT_FORM == FORM_TAIL) return rcp_approx(1.0f + expf(-scale * x));
  return 1.0f / (1.0f + expf(-scale * x));
}

// x / (1 + exp(-z))
__device__ __forceinline__ float times_sigmoid(float x, float z) {
  return x / (1.0f + expf(-z));
}

// Normal cumulative distribution 0.5 (1 + erf(x / sqrt 2)), absolute error below 1e-7
// (Abramowitz and Stegun 7.1.26), and bell = exp(-x^2 / 2).
__device__ __forceinline__ float normal_cdf(float x, float& bell) {
  bell = exp2_approx(-0.72134752044448170f * x * x);
  const float t = rcp_approx(fmaf(0.23164190f, fabsf(x), 1.0f));
  float poly = fmaf(1.061405429f, t, -1.453152027f);
  poly = fmaf(poly, t, 1.421413741f);
  poly = fmaf(poly, t, -0.284496736f);
  poly = fmaf(poly, t, 0.254829592f);
  const float tail = 0.5f * poly * t * bell;  // the mass beyond |x|
  return x < 0.0f ? tail : 1.0f - tail;
}

// The mass of the standard normal distribution beyond a >= 0, as 2 to a polynomial: relative error
// 2e-8 up to 6.5, as in activations/triton.py.
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

// A template, so that only kernels with a sine have it.
template <int>
__constant__ unsigned kTwoOverPi[8] = {0x00000000u, 0x28be60dbu, 0x9391054au, 0x7f09d5f4u,
                                       0x7d4d3770u, 0x36d8a566u, 0x4f10e410u, 0x7f9458eau};

// x less the nearest multiple of pi / 2, as bits of a float, and above them which multiple: beyond
// 71476, where x is multiplied by the 96 bits of 2 / pi that matter to it. Code that is hardly ever
// run, once in a kernel; what it returns lies in registers.
template <int A>
__device__ __noinline__ unsigned long long far_turned(float x) {
  const unsigned bits = __float_as_uint(x), m = bits << 8 | 0x80000000u;
  const unsigned power = (bits >> 23 & 255u) - 126u;
  const unsigned* word = kTwoOverPi<A> + (power >> 5);
  const int shift = power & 31u;
  unsigned first = word[0], second = word[1], third = word[2];
  if (shift) {
    first = first << shift | second >> (32 - shift);
    second = second << shift | third >> (32 - shift);
    third = third << shift | word[3] >> (32 - shift);
  }
  const unsigned low = m * second, sum = low + __umulhi(m, third);
  const unsigned turns = m * first + __umulhi(m, second) + (sum < low);  // in quarters of 2^30
  int quarter = static_cast<int>((turns + (1u << 29)) >> 30);
  float r = static_cast<float>(static_cast<int>(turns << 2 | sum >> 30));
  r = fmaf(static_cast<float>(sum << 2), 2.3283064365386963e-10f, r) * 3.6572951981250744e-10f;
  if (x < 0.0f) r = -r, quarter = -quarter;
  if (!(fabsf(x) <= 3.402823466e38f)) r = x - x;  // NaN of infinities
  return static_cast<unsigned long long>(static_cast<unsigned>(quarter)) << 32 | __float_as_uint(r);
}

template <int A>
__device__ __forceinline__ float far_turned(float x, int& quarter) {
  const unsigned long long both = far_turned<A>(x);
  quarter = static_cast<int>(both >> 32);
  return __uint_as_float(static_cast<unsigned>(both));
}

// sin(x + quarters pi / 2). Up to 71476 the nearest quarter turn is taken away in three parts, to two
// units in the last place; FAST: the nearest half turn, to 2e-7.
template <int A>
__device__ __forceinline__ float sine(float x, int quarters) {
  if constexpr (ACT_FORM == FORM_FAST) {
    const float shifted = fmaf(x, 0.318309886f, 0.5f * quarters) + 12582912.0f;
    unsigned half = __float_as_uint(shifted);
    const float n = (shifted - 12582912.0f) - 0.5f * quarters;
    float r = fmaf(n, -0x1.921fb0p+1f, x);
    r = fmaf(n, -0x1.5110b4p-21f, r);
    r = fmaf(n, -0x1.846988p-47f, r);
    if (fabsf(x) > 71476.0f) {
      int quarter;
      r = far_turned<A>(x, quarter);
      quarter += quarters;
      half = quarter >> 1;
      if (quarter & 1) r = 1.57079637f - fabsf(r);
    }
    const float s = r * r;
    float y = fmaf(fmaf(2.6057803e-6f, s, -1.9809603e-4f), s, 8.3330662e-3f);
    y = fmaf(fmaf(y, s, -1.6666660e-1f), r * s, r);
    return __uint_as_float(__float_as_uint(y) ^ half << 31);
  }
  const float shifted = fmaf(x, 0.636619772f, 12582912.0f);  // 1.5 * 2^23: rounds to an integer
  int quarter = static_cast<int>(__float_as_uint(shifted));
  const float n = shifted - 12582912.0f;
  float r = fmaf(n, -0x1.921fb0p+0f, x);
  r = fmaf(n, -0x1.5110b4p-22f, r);
  r = fmaf(n, -0x1.846988p-48f, r);
  if (fabsf(x) > 71476.0f) r = far_turned<A>(x, quarter);
  quarter += quarters;
  const float s = r * r;
  float y;
  if (quarter & 1) {
    y = fmaf(fmaf(2.44677067e-5f, s, -1.38877297e-3f), s, 4.16666567e-2f);
    y = fmaf(fmaf(y, s, -0.5f), s, 1.0f);
  } else {
    y = fmaf(fmaf(2.86567956e-6f, s, -1.98559923e-4f), s, 8.33338592e-3f);
    y = fmaf(fmaf(y, s, -1.66666672e-1f), r * s, r);
  }
  return quarter & 2 ? -y : y;
}

// exp(-|x|)
__device__ __forceinline__ float decay(float x) {
  if constexpr (ACT_FORM == FORM_FAST) return exp2_approx(-1.4426950408889634f * fabsf(x));
  return expf(-fabsf(x));
}

// log(1 + exp(x)); FAST: relative error below 2e-6.
__device__ __forceinline__ float softplus(float x) {
  const float u = decay(x), positive = x < 0.0f ? 0.0f : x;
  if constexpr (ACT_FORM != FORM_FAST) return positive + log1pf(u);
  const float s = u * rcp_approx(2.0f + u), z = s * s;  // 2 atanh(s)
  const float poly = fmaf(fmaf(fmaf(0.22222222f, z, 0.28571429f), z, 0.4f), z, 0.66666667f);
  return positive + fmaf(s * z, poly, 2.0f * s);
}

// tanh(softplus(x)) and its difference from 1: rational in u = exp(-|x|), without cancellation.
__device__ __forceinline__ float tanh_softplus(float x, float u, float& rest) {
  const float top = 2.0f * u + (x < 0.0f ? u * u : 1.0f), low = x < 0.0f ? 2.0f : 2.0f * u * u;
  if constexpr (ACT_FORM == FORM_FAST) {
    const float scale = rcp_approx(top + low);
    rest = low * scale;
    return top * scale;
  }
  rest = low / (top + low);
  return top / (top + low);
}

// act(x)
template <int A = ACT>
__device__ __forceinline__ float act(float x) {
  constexpr bool kFast = ACT_FORM == FORM_FAST, kQuotient = ACT_FORM == FORM_QUOTIENT;
  if constexpr (A == ACT_RELU) return x < 0.0f ? 0.0f : x;
  if constexpr (A == ACT_RELU2) return x < 0.0f ? 0.0f : x * x;
  if constexpr (A == ACT_LEAKY_RELU) return x < 0.0f ? 0.01f * x : x;
  if constexpr (A == ACT_SIGMOID) return sigmoid(x);
  if constexpr (A == ACT_SILU)
    return kQuotient || ACT_FORM == FORM_LIBRARY ? times_sigmoid(x, x) : x * sigmoid(x);
  if constexpr (A == ACT_QUICK_GELU)
    return kQuotient ? times_sigmoid(x, 1.702f * x) : x * sigmoid(x, 1.702f);
  if constexpr (A == ACT_TANH) {
    if constexpr (!kFast) return tanhf(x);
    // Near 0 the difference would cancel: there a Taylor polynomial, relative error below 1e-5.
    const float s = x * x;
    const float poly = fmaf(fmaf(fmaf(-0.053968254f, s, 0.13333333f), s, -0.33333333f), s, 1.0f);
    const float far = fmaf(2.0f, sigmoid(x, 2.0f), -1.0f);
    return s < 0.125f ? x * poly : far;
  }
  if constexpr (A == ACT_GELU) {
    if constexpr (kQuotient) return 0.5f * x * erfcf(-0.7071067811865476f * x);
    if constexpr (ACT_FORM == FORM_TAIL) {
      const float a = fminf(fabsf(x), 64.0f), tail = normal_tail(a);
      return x < 0.0f ? x * tail : x - a * tail;
    }
    if constexpr (!kFast) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    float bell;
    return x * normal_cdf(x, bell);
  }
  if constexpr (A == ACT_GELU_TANH) {
    if constexpr (kQuotient)
      return times_sigmoid(x, x * (1.5957691216057308f + 0.07135481627260025f * x * x));
    if constexpr (!kFast)
      return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    // 0.5 x (1 + tanh u) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3); the constants
    // carry -2 log2(e). Not tanh.approx: its error of 5e-4 swallows the small negative values.
    const float power = x * fmaf(-0.10294324f, x * x, -2.3022082f);
    return x * rcp_approx(1.0f + exp2_approx(power));
  }
  if constexpr (A == ACT_SINE) return sine<A>(x, 0);
  if constexpr (A == ACT_SOFTPLUS) return softplus(x);
  if constexpr (A == ACT_MISH) {
    float rest;
    return x * tanh_softplus(x, decay(x), rest);
  }
  return x;
}

// act(x), and its derivative there; NaN and what is at 0 as PyTorch has them. gelu and gelu_tanh
// are FAST whatever the form.
template <int A = ACT>
__device__ __forceinline__ float act_and_slope(float x, float& slope) {
  if constexpr (A == ACT_RELU) {
    slope = x <= 0.0f ? 0.0f : 1.0f;
    return act<A>(x);
  }
  if constexpr (A == ACT_RELU2) {
    slope = x <= 0.0f ? 0.0f : 2.0f * x;
    return act<A>(x);
  }
  if constexpr (A == ACT_LEAKY_RELU) {
    slope = x > 0.0f ? 1.0f : 0.01f;
    return act<A>(x);
  }
  if constexpr (A == ACT_SILU || A == ACT_QUICK_GELU) {
    constexpr float kScale = A == ACT_SILU ? 1.0f : 1.702f;
    const float s = sigmoid(x, kScale), y = x * s;
    slope = fmaf(kScale * y, 1.0f - s, s);
    return y;
  }
  if constexpr (A == ACT_SIGMOID) {
    const float s = sigmoid(x);
    slope = s * (1.0f - s);
    return s;
  }
  if constexpr (A == ACT_TANH) {
    const float y = act<A>(x);
    slope = fmaf(-y, y, 1.0f);
    return y;
  }
  if constexpr (A == ACT_GELU) {
    float bell;
    const float cdf = normal_cdf(x, bell);
    slope = fmaf(0.39894228f * x, bell, cdf);
    return x * cdf;
  }
  if constexpr (A == ACT_GELU_TANH) {
    const float square = x * x;
    const float p = rcp_approx(1.0f + exp2_approx(x * fmaf(-0.10294324f, square, -2.3022082f)));
    const float y = x * p;
    slope = fmaf(y * (1.0f - p), fmaf(0.21406980f, square, 1.5957691f), p);
    return y;
  }
  if constexpr (A == ACT_SINE) {
    slope = sine<A>(x, 1);
    return sine<A>(x, 0);
  }
  if constexpr (A == ACT_SOFTPLUS) {
    slope = sigmoid(x);
    return softplus(x);
  }
  if constexpr (A == ACT_MISH) {
    const float u = decay(x), part = x < 0.0f ? u : 1.0f;
    float rest;
    const float w = tanh_softplus(x, u, rest);
    const float s = ACT_FORM == FORM_FAST ? part * rcp_approx(1.0f + u) : part / (1.0f + u);
    slope = fmaf(x, rest * (2.0f - rest) * s, w);
    return x * w;
  }
  slope = 1.0f;
  return x;
}

// act(x), and dy times its derivative there. relu and relu2 stop an infinite dy, as PyTorch's do.
template <int A = ACT>
__device__ __forceinline__ float act_and_grad(float x, float dy, float& grad) {
  float slope;
  const float y = act_and_slope<A>(x, slope);
  grad = dy * slope;
  if constexpr (A == ACT_RELU || A == ACT_RELU2) grad = x <= 0.0f ? 0.0f : grad;
  return y;
}

// dy * act'(pre) from what the activation saves, its output or the pre-activation.
template <int A = ACT>
__device__ __forceinline__ float graded(float dy, float saved) {
  if constexpr (A == ACT_RELU) return saved <= 0.0f ? 0.0f : dy;
  if constexpr (A == ACT_LEAKY_RELU) return saved > 0.0f ? dy : 0.01f * dy;
  if constexpr (A == ACT_RELU2 && ACT_FORM != FORM_FAST)
    return saved <= 0.0f ? 0.0f : dy * (2.0f * saved);
  if constexpr (A == ACT_SIGMOID) return dy * (saved * (1.0f - saved));
  if constexpr (A == ACT_TANH) return dy * (1.0f - saved * saved);
  if constexpr (A == ACT_SOFTPLUS) {  // 1 - exp(-y)
    if constexpr (ACT_FORM != FORM_FAST) return dy * -expm1f(-saved);
    const float near = fmaf(fmaf(fmaf(-0.041666667f, saved, 0.16666667f), saved, -0.5f), saved, 1.0f);
    return dy * (saved < 0.0625f ? saved * near : 1.0f - decay(saved));
  }
  constexpr bool kFast = ACT_FORM == FORM_FAST;
  if constexpr (!kFast && (A == ACT_SILU || A == ACT_QUICK_GELU)) {
    const float z = A == ACT_SILU ? saved : 1.702f * saved, s = sigmoid(z);
    return dy * (s * (1.0f + z * (1.0f - s)));
  }
  if constexpr (!kFast && A == ACT_GELU_TANH) {
    constexpr float kLinear = 0.79788456080286536f, kCubic = 0.035677408136300125f;
    constexpr float kSlope = 0.10703222440890037f;
    if constexpr (ACT_FORM == FORM_QUOTIENT) {
      const float u = saved * (kLinear + kCubic * saved * saved);
      const float slope = kLinear + kSlope * saved * saved, t = tanhf(u);
      return dy * (0.5f * (1.0f + t) + 0.5f * saved * (1.0f - t * t) * slope);
    }
    const float square = saved * saved;
    const float t = tanhf(saved * (kLinear + kCubic * square));
    const float slope = kLinear + kSlope * square;
    return dy * (0.5f * (1.0f + t) + 0.5f * saved * (1.0f - t * t) * slope);
  }
  if constexpr (!kFast && A == ACT_GELU) {
    if constexpr (ACT_FORM == FORM_QUOTIENT) {
      const float density = 0.3989422804014327f * expf(-0.5f * saved * saved);
      return dy * (0.5f * erfcf(-0.7071067811865476f * saved) + saved * density);
    }
    const float tail = normal_tail(fminf(fabsf(saved), 64.0f));
    const float bell = exp2_approx(-0.72134752044448170f * (saved * saved));
    return dy * ((saved < 0.0f ? tail : 1.0f - tail) + saved * (0.3989422804014327f * bell));
  }
  float grad;
  act_and_grad<A>(saved, dy, grad);
  return grad;
}

// dy * act'(pre) from the pre-activation, whatever the activation saves.
template <int A = ACT>
__device__ __forceinline__ float graded_before(float dy, float pre) {
  constexpr bool kOutput = A == ACT_SIGMOID || A == ACT_TANH || A == ACT_SOFTPLUS;
  return graded<A>(dy, kOutput ? act<A>(pre) : pre);
}
