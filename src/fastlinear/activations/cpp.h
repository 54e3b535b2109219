// Activations on the CPU, in float32: the only place of each. T is float, in loops that become
// vector code, or a vector V.
//
// A struct has f(x), the activation, and d(dy, x), dy times its derivative at the pre-activation x.
// Where the derivative is formed from the output y, of(dy, y) does so. The list of structs is a
// macro that cpp_build.py makes of reference.py. Comparisons are written so that NaN stays NaN.
#pragma once

#include "../kernels/cpu/vectors.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if !defined(FASTLINEAR_ACTIVATIONS)
#error "cpp_build.py defines the list of activations"
#endif

namespace {

template <class T>
inline T num(float x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
  else return all(x);
}
inline float pick(bool which, float a, float b) { return which ? a : b; }
inline float abs_(float x) { return x < 0.0f ? -x : x; }

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
inline V exp_(V x) {  // the same, but for the order of the last sum
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

template <class T>
inline T relu_(T x) { return pick(x < num<T>(0.0f), num<T>(0.0f), x); }
template <class T>
inline T sigmoid_(T x) { return 1.0f / (1.0f + exp_(-x)); }

// s (1 - s) for s = sigmoid(x) without the cancellation near 1; 0 where exp_ stays at its least.
template <class T>
inline T slope_(T x) {
  const T e = exp_(-x), s = 1.0f / (1.0f + e);
  return pick(abs_(x) > num<T>(87.0f), num<T>(0.0f), e * s * s);
}

template <class T>
inline T tanh_(T x) {
  const T s = x * x;
  T p = s * 2.0595716778e-3f - 8.0856150016e-3f;
  p = p * s + 2.1663397551e-2f;
  p = p * s - 5.3939942271e-2f;
  p = p * s + 1.3333152235e-1f;
  p = p * s - 3.3333328366e-1f;
  const T small = x + x * (s * p), a = abs_(x);
  const T big = 1.0f - 2.0f / (exp_(a * 2.0f) + 1.0f);
  return pick(a < num<T>(0.65f), small, pick(x < num<T>(0.0f), -big, big));
}

// The standard normal's distribution function, (1 + erf(x / sqrt 2)) / 2.
template <class T>
inline T cdf_(T x) {
  const T z = x * 0.70710678118f, a = abs_(z), s = z * z;
  T p = s * 7.853851275e-5f - 8.010190795e-4f;  // erf(z) / z for |z| < 1
  p = p * s + 5.188327283e-3f;
  p = p * s - 2.685381100e-2f;
  p = p * s + 1.1283585429e-1f;
  p = p * s - 3.7612625957e-1f;
  p = p * s + 1.1283791065f;
  const T small = z * p * 0.5f + 0.5f;
  const T t = 1.0f / (a + 2.0f);  // erfc(a) = exp(-a^2) t q(t) for a >= 1
  T q = t * 23.816343307f - 28.780807495f;
  q = q * t + 5.1616120338f;
  q = q * t + 1.9920147657f;
  q = q * t + 2.8525280953f;
  q = q * t + 1.9766268730f;
  q = q * t + 1.1281020641f;
  q = q * t + 0.56419825554f;
  const T tail = exp_(-s) * t * q * 0.5f;
  return pick(a < num<T>(1.0f), small, pick(z < num<T>(0.0f), tail, 1.0f - tail));
}

// log(1 + u) of 0 <= u <= 1
template <class T>
inline T log1p_(T u) {
  const T s = u / (u + 2.0f), z = s * s;  // 2 atanh(s)
  T p = z * 1.3333333333e-1f + 1.5384615385e-1f;
  p = p * z + 1.8181818182e-1f;
  p = p * z + 2.2222222222e-1f;
  p = p * z + 2.8571428571e-1f;
  p = p * z + 4.0e-1f;
  p = p * z + 6.6666666667e-1f;
  return s * 2.0f + s * (z * p);
}

// exp(-|x|), and 0 where exp_ stays at its least.
template <class T>
inline T decay_(T x) {
  return pick(abs_(x) > num<T>(87.0f), num<T>(0.0f), exp_(-abs_(x)));
}

// sin(x + quarters pi / 2) of any finite x, to about one unit in the last place of 1. The nearest
// quarter turn comes from 2 / pi in two doubles, for large x less what makes whole turns of it: the
// products with the first are exact, since it has at most 28 bits.
inline float sine_(float x, int quarters) {
  const double d = x, a = d < 0.0 ? -d : d;
  double high = 0x1.45f306ep-1, low = -0x1.b1bbead603d8bp-32;
  high = a < 0x1p47 ? high : -0x1.236377cp-25, low = a < 0x1p47 ? low : -0x1.5ac07b1505c16p-53;
  high = a < 0x1p71 ? high : 0x1.529fc2p-52, low = a < 0x1p71 ? low : 0x1.d5f47d4d37703p-78;
  high = a < 0x1p95 ? high : 0x1.3abe90p-75, low = a < 0x1p95 ? low : -0x1.596447e493ad5p-101;
  high = a < 0x1p119 ? high : 0x1.f534ddcp-96, low = a < 0x1p119 ? low : 0x1.b6c52b3278872p-129;
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to the nearest integer
  const double turns = d * high, shifted = turns + d * low + magic;
  uint64_t bits;
  std::memcpy(&bits, &shifted, 8);
  const uint32_t quarter = static_cast<uint32_t>(bits) + quarters;
  const double rest = turns - (shifted - magic) + d * low;
  const float r = static_cast<float>(rest * 1.5707963267948966), s = r * r;
  float sine = -1.9515295891e-4f * s + 8.3321608736e-3f;
  sine = (sine * s - 1.6666654611e-1f) * s * r + r;
  float cosine = 2.443315711809948e-5f * s - 1.388731625493765e-3f;
  cosine = (cosine * s + 4.166664568298827e-2f) * s * s - 0.5f * s + 1.0f;
  const float y = quarter & 1 ? cosine : sine;
  return quarter & 2 ? -y : y;
}
inline V sine_(V x, int quarters) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) lanes[i] = sine_(lanes[i], quarters);
  return load(lanes);
}

constexpr float kAlpha = 1.59576912161f;   // 2 sqrt(2 / pi)
constexpr float kBeta = 0.0713548162726f;  // 0.044715 of it

struct None {
  template <class T> static T f(T x) { return x; }
  template <class T> static T d(T dy, T) { return dy; }
};
struct Relu {  // an infinite dy is stopped, not turned into NaN, and NaN lets dy through, as in torch
  template <class T> static T f(T x) { return relu_(x); }
  template <class T> static T d(T dy, T x) { return pick(x <= num<T>(0.0f), num<T>(0.0f), dy); }
};
struct Relu2 {
  template <class T> static T f(T x) { return relu_(x) * relu_(x); }
  template <class T> static T d(T dy, T x) {
    return pick(x <= num<T>(0.0f), num<T>(0.0f), dy * (2.0f * x));
  }
};
struct Silu {
  template <class T> static T f(T x) { return x * sigmoid_(x); }
  template <class T> static T d(T dy, T x) { return dy * (sigmoid_(x) + x * slope_(x)); }
};
struct Gelu {
  template <class T> static T f(T x) { return x * cdf_(x); }
  template <class T> static T d(T dy, T x) {
    const T density = 0.3989422804f * exp_(-0.5f * x * x);
    return dy * (cdf_(x) + x * pick(abs_(x) > num<T>(13.2f), num<T>(0.0f), density));
  }
};
struct GeluTanh {
  template <class T> static T f(T x) { return x * sigmoid_(x * (kAlpha + kBeta * x * x)); }
  template <class T> static T d(T dy, T x) {
    const T z = x * (kAlpha + kBeta * x * x);
    const T more = slope_(z) * x * (kAlpha + 3.0f * kBeta * x * x);
    // x - x: 0, and NaN of an infinity, as torch's
    return dy * (sigmoid_(z) + pick(abs_(x) > num<T>(100.0f), x - x, more));
  }
};
struct Sigmoid {
  template <class T> static T f(T x) { return sigmoid_(x); }
  template <class T> static T of(T dy, T y) { return dy * (y * (1.0f - y)); }
  template <class T> static T d(T dy, T x) { return of(dy, f(x)); }
};
struct Tanh {
  template <class T> static T f(T x) { return tanh_(x); }
  template <class T> static T of(T dy, T y) { return dy * (1.0f - y * y); }
  template <class T> static T d(T dy, T x) { return of(dy, f(x)); }
};
struct QuickGelu {
  template <class T> static T f(T x) { return x * sigmoid_(1.702f * x); }
  template <class T> static T d(T dy, T x) {
    return dy * (sigmoid_(1.702f * x) + x * (1.702f * slope_(1.702f * x)));
  }
};
struct LeakyRelu {
  template <class T> static T f(T x) { return pick(x > num<T>(0.0f), x, 0.01f * x); }
  template <class T> static T d(T dy, T x) { return pick(x > num<T>(0.0f), dy, 0.01f * dy); }
};
struct Sine {
  template <class T> static T f(T x) { return sine_(x, 0); }
  template <class T> static T d(T dy, T x) { return dy * sine_(x, 1); }
};
struct Softplus {
  template <class T> static T f(T x) { return relu_(x) + log1p_(decay_(x)); }
  template <class T> static T of(T dy, T y) {  // 1 - exp(-y) without its cancellation
    const T t = tanh_(y * 0.5f);
    return dy * (2.0f * t / (1.0f + t));
  }
  template <class T> static T d(T dy, T x) { return dy * sigmoid_(x); }
};
struct Mish {  // x w, w = tanh(softplus(x)): rational in u = exp(-|x|), without cancellation
  template <class T> static T f(T x) {
    const T u = decay_(x), top = upper(x, u);
    return x * (top / (top + lower(x, u)));
  }
  template <class T> static T d(T dy, T x) {
    const T u = decay_(x), top = upper(x, u), rest = lower(x, u), all_ = top + rest;
    const T w = top / all_, v = rest / all_;  // v = 1 - w
    const T sigmoid = pick(x < num<T>(0.0f), u, num<T>(1.0f)) / (1.0f + u);
    return dy * (w + x * (v * (2.0f - v) * sigmoid));
  }

 private:
  template <class T> static T upper(T x, T u) {
    return 2.0f * u + pick(x < num<T>(0.0f), u * u, num<T>(1.0f));
  }
  template <class T> static T lower(T x, T u) {
    return 2.0f * pick(x < num<T>(0.0f), num<T>(1.0f), u * u);
  }
};

// --------------------------------------------------------------------------------------------
// Forms for passes over memory that do nothing else (elementwise.cpp): fewer operations, other last
// bits.

template <class A>
struct Pass : A {};

// Of the normal distribution: the logistic function of an odd polynomial, fitted on [-6, 6] to an
// error of x cdf(x) of 2e-8; further out its logit grows as x^2 / 2 does.
inline float logistic_cdf_(float x) {
  const float z = x > 6.0f ? 6.0f : (x < -6.0f ? -6.0f : x), s = z * z;
  float p = -3.115607e-15f;
  p = p * s + 4.9017788e-13f;
  p = p * s - 3.12005547e-11f;
  p = p * s + 9.8697648e-10f;
  p = p * s - 1.31711133e-08f;
  p = p * s - 1.10456726e-07f;
  p = p * s + 7.16846004e-06f;
  p = p * s - 0.000108761447f;
  p = p * s - 6.69305746e-05f;
  p = p * s + 0.0726661709f;
  p = p * s + 1.59577026f;
  const float more = 0.5f * (x * x - s);
  return sigmoid_(z * p + (x < 0.0f ? -more : more));
}
template <>
struct Pass<Gelu> {
  // x cdf(x) is x less a small part where x is positive: a cdf near 1 would round the product twice.
  static float f(float x) {
    const float tail = logistic_cdf_(x > 0.0f ? -x : x);
    return x > 0.0f ? x - (x < 30.0f ? x : 30.0f) * tail : x * tail;
  }
  static float d(float dy, float x) {
    const float h = -0.5f * x * x;
    return dy * (logistic_cdf_(x) + x * (h < -87.0f ? 0.0f : 0.398942280f * exp_(h)));
  }
};
template <>
struct Pass<Silu> : Silu {
  static float d(float dy, float x) {
    const float s = sigmoid_(x);
    return dy * (s + x * s * (1.0f - s));
  }
};
template <>
struct Pass<GeluTanh> : GeluTanh {
  static float d(float dy, float x) {
    const float s = sigmoid_(x * (kAlpha + kBeta * x * x)), t = s * (1.0f - s);
    return dy * (s + t * x * (kAlpha + 3.0f * kBeta * x * x));
  }
};
template <>
struct Pass<QuickGelu> : QuickGelu {
  static float d(float dy, float x) {
    const float s = sigmoid_(1.702f * x);
    return dy * (s + 1.702f * x * s * (1.0f - s));
  }
};

// --------------------------------------------------------------------------------------------
// Smooth activations: act' as a function of what is saved, and its derivatives by that.

struct Slopes {
  float first, second, third;
};

template <class A>
struct Smooth {  // Slopes at(float saved), where there is such a form
  static constexpr bool kKnown = false;
};
struct Known {
  static constexpr bool kKnown = true;
};
template <>
struct Smooth<Tanh> : Known {
  static Slopes at(float y) { return {(1.0f - y) * (1.0f + y), -2.0f * y, -2.0f}; }
};
template <>
struct Smooth<Sigmoid> : Known {
  static Slopes at(float y) { return {y * (1.0f - y), 1.0f - 2.0f * y, -2.0f}; }
};
template <>
struct Smooth<Softplus> : Known {
  static Slopes at(float y) {
    const float rest = decay_(y);
    return {Softplus::of(1.0f, y), rest, -rest};
  }
};
template <>
struct Smooth<Sine> : Known {
  static Slopes at(float x) {
    const float cosine = sine_(x, 1);
    return {cosine, -sine_(x, 0), -cosine};
  }
};
template <>
struct Smooth<Silu> : Known {
  static Slopes at(float x) {  // t = s (1 - s), t' = t u, u' = -2 t
    const float s = sigmoid_(x), t = slope_(x), u = 1.0f - 2.0f * s;
    return {s + x * t, t * (2.0f + x * u), t * (3.0f * u + x * (u * u - 2.0f * t))};
  }
};
template <>
struct Smooth<QuickGelu> : Known {
  static Slopes at(float x) {  // silu(c x) / c
    constexpr float c = 1.702f;
    const Slopes of = Smooth<Silu>::at(c * x);
    return {of.first, c * of.second, c * c * of.third};
  }
};
template <>
struct Smooth<Gelu> : Known {
  static Slopes at(float x) {
    const float h = -0.5f * x * x, density = h < -87.0f ? 0.0f : 0.398942280f * exp_(h);
    return {cdf_(x) + x * density, density * (2.0f - x * x), density * (x * x - 4.0f) * x};
  }
};

// --------------------------------------------------------------------------------------------
// Activations by number

#define FASTLINEAR_CODE(A, PRE) k##A,
enum Code : int { FASTLINEAR_ACTIVATIONS(FASTLINEAR_CODE) kActivations };
#undef FASTLINEAR_CODE
static_assert(kNone == 0 && kRelu == 1, "kernels compare numbers with kRelu");

// f(A{}) for the struct of that number; false where there is none.
template <class F>
inline bool with(int64_t which, F f) {
  switch (which) {
#define FASTLINEAR_CASE(A, PRE) case k##A: f(A{}); return true;
    FASTLINEAR_ACTIVATIONS(FASTLINEAR_CASE)
#undef FASTLINEAR_CASE
    default: return false;
  }
}

// dy * act'(.) from what the activation saves: its output where the struct says so, else x.
template <class A, class T>
inline auto derived(T dy, T saved, int) -> decltype(A::of(dy, saved)) { return A::of(dy, saved); }
template <class A, class T>
inline T derived(T dy, T saved, long) { return A::d(dy, saved); }
template <class A, class T>
inline T derived(T dy, T saved) { return derived<A>(dy, saved, 0); }

template <class T>
inline T act(int64_t which, T x) {
  with(which, [&x](auto a) { x = decltype(a)::f(x); });
  return x;
}
template <class T>
inline T dact(int64_t which, T dy, T saved) {
  with(which, [&](auto a) { dy = derived<decltype(a)>(dy, saved); });
  return dy;
}

// Whether it saves the pre-activation.
inline bool saves_pre(int64_t which) {
#define FASTLINEAR_SAVED(A, PRE) PRE,
  constexpr bool kPre[] = {FASTLINEAR_ACTIVATIONS(FASTLINEAR_SAVED)};
#undef FASTLINEAR_SAVED
  return kPre[which];
}

}  // namespace
