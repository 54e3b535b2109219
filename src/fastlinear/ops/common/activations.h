// Activations of a pre-activation x, and dy times their derivative there, one number at a time: the
// loops around them become vector code. Comparisons are written so that NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

// exp(x) to about one unit in the last place; exp(-87.3) below that, infinity above 88.4.
inline float exp_(float x) {
  const float hi = 88.3762626647949f, lo = -87.3365478515625f;
  const float c = x > hi ? hi : (x < lo ? lo : x);
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  const float shifted = c * 1.44269504f + magic, n = shifted - magic;
  float r = c - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits;  // 2^n: the last bits of the sum are n + a constant, whatever NaN makes of them
  std::memcpy(&bits, &shifted, 4);
  bits = (bits - 0x4B400000u + 127u) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return x > hi ? __builtin_inff() : p * scale;
}

inline float abs_(float x) { return x < 0.0f ? -x : x; }
inline float relu_(float x) { return x < 0.0f ? 0.0f : x; }
inline float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }

// s (1 - s) for s = sigmoid(x) without the cancellation near 1; 0 where exp_ stays at its least.
inline float slope_(float x) {
  const float e = exp_(-x), s = 1.0f / (1.0f + e);
  return abs_(x) > 87.0f ? 0.0f : e * s * s;
}

inline float tanh_(float x) {
  const float s = x * x;
  float p = s * 2.0595716778e-3f - 8.0856150016e-3f;
  p = p * s + 2.1663397551e-2f;
  p = p * s - 5.3939942271e-2f;
  p = p * s + 1.3333152235e-1f;
  p = p * s - 3.3333328366e-1f;
  const float small = x + x * (s * p), a = abs_(x);
  const float big = 1.0f - 2.0f / (exp_(a * 2.0f) + 1.0f);
  return a < 0.65f ? small : (x < 0.0f ? -big : big);
}

// The standard normal's distribution function, (1 + erf(x / sqrt 2)) / 2.
inline float cdf_(float x) {
  const float z = x * 0.70710678118f, a = abs_(z), s = z * z;
  float p = s * 7.853851275e-5f - 8.010190795e-4f;  // erf(z) / z for |z| < 1
  p = p * s + 5.188327283e-3f;
  p = p * s - 2.685381100e-2f;
  p = p * s + 1.1283585429e-1f;
  p = p * s - 3.7612625957e-1f;
  p = p * s + 1.1283791065f;
  const float small = z * p * 0.5f + 0.5f;
  const float t = 1.0f / (a + 2.0f);  // erfc(a) = exp(-a^2) t q(t) for a >= 1
  float q = t * 23.816343307f - 28.780807495f;
  q = q * t + 5.1616120338f;
  q = q * t + 1.9920147657f;
  q = q * t + 2.8525280953f;
  q = q * t + 1.9766268730f;
  q = q * t + 1.1281020641f;
  q = q * t + 0.56419825554f;
  const float tail = exp_(-s) * t * q * 0.5f;
  return a < 1.0f ? small : (z < 0.0f ? tail : 1.0f - tail);
}

constexpr float kAlpha = 1.59576912161f;   // 2 sqrt(2 / pi)
constexpr float kBeta = 0.0713548162726f;  // 0.044715 of it

struct None {
  static float f(float x) { return x; }
  static float d(float dy, float) { return dy; }
};
struct Relu {  // an infinite dy is stopped, not turned into NaN, and NaN lets dy through, as in torch
  static float f(float x) { return relu_(x); }
  static float d(float dy, float x) { return x <= 0.0f ? 0.0f : dy; }
};
struct Relu2 {
  static float f(float x) { return relu_(x) * relu_(x); }
  static float d(float dy, float x) { return x <= 0.0f ? 0.0f : dy * (2.0f * x); }
};
struct Silu {
  static float f(float x) { return x * sigmoid_(x); }
  static float d(float dy, float x) { return dy * (sigmoid_(x) + x * slope_(x)); }
};
struct Gelu {
  static float f(float x) { return x * cdf_(x); }
  static float d(float dy, float x) {
    const float density = abs_(x) > 13.2f ? 0.0f : 0.3989422804f * exp_(-0.5f * x * x);
    return dy * (cdf_(x) + x * density);
  }
};
struct GeluTanh {
  static float f(float x) { return x * sigmoid_(x * (kAlpha + kBeta * x * x)); }
  static float d(float dy, float x) {
    const float z = x * (kAlpha + kBeta * x * x);
    const float more = slope_(z) * x * (kAlpha + 3.0f * kBeta * x * x);
    // x - x: 0, and NaN of an infinity, as torch's
    return dy * (sigmoid_(z) + (abs_(x) > 100.0f ? x - x : more));
  }
};
struct Sigmoid {
  static float f(float x) { return sigmoid_(x); }
  static float d(float dy, float x) {
    const float s = sigmoid_(x);
    return dy * (s * (1.0f - s));
  }
};
struct Tanh {
  static float f(float x) { return tanh_(x); }
  static float d(float dy, float x) {
    const float t = tanh_(x);
    return dy * (1.0f - t * t);
  }
};
struct QuickGelu {
  static float f(float x) { return x * sigmoid_(1.702f * x); }
  static float d(float dy, float x) {
    return dy * (sigmoid_(1.702f * x) + x * (1.702f * slope_(1.702f * x)));
  }
};
struct LeakyRelu {
  static float f(float x) { return x > 0.0f ? x : 0.01f * x; }
  static float d(float dy, float x) { return x > 0.0f ? dy : 0.01f * dy; }
};

}  // namespace
