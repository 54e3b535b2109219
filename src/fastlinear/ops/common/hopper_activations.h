// Activations in float32 for epilogues on Hopper. Macros: ACT, and ACT_<NAME> for every activation.

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

// 1 / (1 + exp(-scale * x)), relative error about 1e-6 in either tail.
__device__ __forceinline__ float sigmoid_scaled(float x, float scale) {
  return rcp_approx(1.0f + exp2_approx(x * (-1.4426950408889634f * scale)));
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

__device__ __forceinline__ float act(float x) {
  if constexpr (ACT == ACT_RELU) return x < 0.0f ? 0.0f : x;  // keeps NaN
  if constexpr (ACT == ACT_RELU2) return x < 0.0f ? 0.0f : x * x;
  if constexpr (ACT == ACT_LEAKY_RELU) return x < 0.0f ? 0.01f * x : x;
  if constexpr (ACT == ACT_SILU) return x * sigmoid_scaled(x, 1.0f);
  if constexpr (ACT == ACT_SIGMOID) return sigmoid_scaled(x, 1.0f);
  if constexpr (ACT == ACT_TANH) {
    // Near 0 the difference would cancel: there a Taylor polynomial, relative error below 1e-5.
    const float s = x * x;
    const float poly = fmaf(fmaf(fmaf(-0.053968254f, s, 0.13333333f), s, -0.33333333f), s, 1.0f);
    const float far = fmaf(2.0f, sigmoid_scaled(x, 2.0f), -1.0f);
    return s < 0.125f ? x * poly : far;
  }
  if constexpr (ACT == ACT_QUICK_GELU) return x * sigmoid_scaled(x, 1.702f);
  if constexpr (ACT == ACT_GELU) {
    float bell;
    return x * normal_cdf(x, bell);
  }
  if constexpr (ACT == ACT_GELU_TANH) {
    // 0.5 x (1 + tanh u) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3); the constants
    // carry -2 log2(e). Not tanh.approx: its error of 5e-4 swallows the small negative values.
    const float power = x * fmaf(-0.10294324f, x * x, -2.3022082f);
    return x * rcp_approx(1.0f + exp2_approx(power));
  }
  return x;
}

// act(x), and its derivative there; NaN and what is at 0 as PyTorch has them.
__device__ __forceinline__ float act_and_slope(float x, float& slope) {
  if constexpr (ACT == ACT_RELU) {
    slope = x <= 0.0f ? 0.0f : 1.0f;
    return act(x);
  }
  if constexpr (ACT == ACT_RELU2) {
    slope = x <= 0.0f ? 0.0f : 2.0f * x;
    return act(x);
  }
  if constexpr (ACT == ACT_LEAKY_RELU) {
    slope = x > 0.0f ? 1.0f : 0.01f;
    return act(x);
  }
  if constexpr (ACT == ACT_SILU || ACT == ACT_QUICK_GELU) {
    constexpr float kScale = ACT == ACT_SILU ? 1.0f : 1.702f;
    const float s = sigmoid_scaled(x, kScale), y = x * s;
    slope = fmaf(kScale * y, 1.0f - s, s);
    return y;
  }
  if constexpr (ACT == ACT_SIGMOID) {
    const float s = sigmoid_scaled(x, 1.0f);
    slope = s * (1.0f - s);
    return s;
  }
  if constexpr (ACT == ACT_TANH) {
    const float y = act(x);
    slope = fmaf(-y, y, 1.0f);
    return y;
  }
  if constexpr (ACT == ACT_GELU) {
    float bell;
    const float cdf = normal_cdf(x, bell);
    slope = fmaf(0.39894228f * x, bell, cdf);
    return x * cdf;
  }
  if constexpr (ACT == ACT_GELU_TANH) {
    const float square = x * x;
    const float p = rcp_approx(1.0f + exp2_approx(x * fmaf(-0.10294324f, square, -2.3022082f)));
    const float y = x * p;
    slope = fmaf(y * (1.0f - p), fmaf(0.21406980f, square, 1.5957691f), p);
    return y;
  }
  slope = 1.0f;
  return x;
}

// act(x), and dy times its derivative there. relu and relu2 stop an infinite dy, as PyTorch's do.
__device__ __forceinline__ float act_and_grad(float x, float dy, float& grad) {
  float slope;
  const float y = act_and_slope(x, slope);
  grad = dy * slope;
  if constexpr (ACT == ACT_RELU || ACT == ACT_RELU2) grad = x <= 0.0f ? 0.0f : grad;
  return y;
}
