// Activations and their derivatives on vectors; comparisons are written so that NaN stays NaN.

#pragma once

#include "../common/vectors.h"

namespace {

// exp(x) to about one unit in the last place; exp(-87.3) below that, infinity above 88.4.
inline V exp_(V x) {
  const V hi = all(88.3762626647949f), lo = all(-87.3365478515625f), magic = all(12582912.0f);
  V c = pick(x > hi, hi, x);
  c = pick(c < lo, lo, c);
  const V n = (c * 1.44269504f + magic) - magic;
  V r = c - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const V scale = reinterpret_cast<V>((__builtin_convertvector(n, I) + 127) << 23);
  return pick(x > hi, all(__builtin_inff()), p * scale);
}
inline V sigmoid_(V x) { return 1.0f / (1.0f + exp_(-x)); }
// s = sigmoid(x) and s (1 - s), the latter without the cancellation of 1 - s near 1; it is 0 where
// exp_ stays at its least, which a large x would blow up
inline V sigmoid_(V x, V& slope) {
  const V e = exp_(-x), s = 1.0f / (1.0f + e);
  slope = pick(abs_(x) > all(87.0f), all(0.0f), e * s * s);
  return s;
}
inline V tanh_(V x) {
  const V s = x * x;
  V p = s * 2.0595716778e-3f - 8.0856150016e-3f;
  p = p * s + 2.1663397551e-2f;
  p = p * s - 5.3939942271e-2f;
  p = p * s + 1.3333152235e-1f;
  p = p * s - 3.3333328366e-1f;
  const V small = x + x * (s * p);
  const V big = 1.0f - 2.0f / (exp_(abs_(x) * 2.0f) + 1.0f);
  return pick(abs_(x) < all(0.65f), small, pick(x < all(0.0f), -big, big));
}
inline V cdf_(V x) {  // of the standard normal: (1 + erf(x / sqrt 2)) / 2
  const V z = x * 0.70710678118f, a = abs_(z), s = z * z;
  V p = s * 7.853851275e-5f - 8.010190795e-4f;  // erf(z) / z for |z| < 1
  p = p * s + 5.188327283e-3f;
  p = p * s - 2.685381100e-2f;
  p = p * s + 1.1283585429e-1f;
  p = p * s - 3.7612625957e-1f;
  p = p * s + 1.1283791065f;
  const V small = z * p * 0.5f + 0.5f;
  const V t = 1.0f / (a + 2.0f);  // erfc(a) = exp(-a^2) t q(t) for a >= 1
  V q = t * 23.816343307f - 28.780807495f;
  q = q * t + 5.1616120338f;
  q = q * t + 1.9920147657f;
  q = q * t + 2.8525280953f;
  q = q * t + 1.9766268730f;
  q = q * t + 1.1281020641f;
  q = q * t + 0.56419825554f;
  const V tail = exp_(-s) * t * q * 0.5f;
  return pick(a < all(1.0f), small, pick(z < all(0.0f), tail, 1.0f - tail));
}
constexpr float kAlpha = 1.59576912161f, kBeta = 0.0713548162726f;  // 2 sqrt(2/pi), 0.044715 of it
inline V relu_(V x) { return pick(x < all(0.0f), all(0.0f), x); }

// Numbered as the names in activations.py.
enum { kNone, kRelu, kRelu2, kSilu, kGelu, kGeluTanh, kSigmoid, kTanh, kQuickGelu, kLeakyRelu };

inline V act(int which, V x) {
  switch (which) {
    case kRelu: return relu_(x);
    case kRelu2: return relu_(x) * relu_(x);
    case kSilu: return x * sigmoid_(x);
    case kGelu: return x * cdf_(x);
    case kGeluTanh: return x * sigmoid_(x * (kAlpha + kBeta * x * x));
    case kSigmoid: return sigmoid_(x);
    case kTanh: return tanh_(x);
    case kQuickGelu: return x * sigmoid_(1.702f * x);
    case kLeakyRelu: return pick(x > all(0.0f), x, 0.01f * x);
    default: return x;
  }
}

inline bool saves_pre(int which) {
  return which == kRelu2 || which == kSilu || which == kGelu || which == kGeluTanh ||
         which == kQuickGelu;
}

// dy * act'(.), s being the pre-activation where saves_pre says so, else the output.
inline V dact(int which, V dy, V s) {
  switch (which) {
    // an infinite dy is stopped where torch stops it, and a NaN output lets dy through
    case kRelu: return pick(s <= all(0.0f), all(0.0f), dy);
    case kRelu2: return pick(s <= all(0.0f), all(0.0f), dy * (2.0f * s));
    case kSilu: {
      V slope;
      const V g = sigmoid_(s, slope);
      return dy * (g + s * slope);
    }
    case kGelu: {
      const V density = 0.3989422804f * exp_(-0.5f * s * s);
      return dy * (cdf_(s) + s * pick(abs_(s) > all(13.2f), all(0.0f), density));
    }
    case kGeluTanh: {
      V slope;
      const V g = sigmoid_(s * (kAlpha + kBeta * s * s), slope);
      // far out the slope is 0 and its factor may be infinite
      const V more = slope * s * (kAlpha + 3.0f * kBeta * s * s);
      return dy * (g + pick(abs_(s) > all(100.0f), s - s, more));
    }
    case kSigmoid: return dy * (s * (1.0f - s));
    case kTanh: return dy * (1.0f - s * s);
    case kQuickGelu: {
      V slope;
      const V g = sigmoid_(1.702f * s, slope);
      return dy * (g + s * (1.702f * slope));
    }
    case kLeakyRelu: return pick(s > all(0.0f), dy, 0.01f * dy);
    default: return dy;
  }
}

}  // namespace
