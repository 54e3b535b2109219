// Elementwise pieces of Linear + activation on the CPU, float32, one pass over memory.
//
//   fastlinear_act     y = act(pre)
//   fastlinear_act_bias  the same of pre = x + b, which is kept where that is wanted
//   fastlinear_dact    dpre = dy * act'(saved), and db = column sums of dpre in the same pass
//
// Each takes the number of threads: OpenMP's own is a fact of the calling thread, and one that torch
// has not used yet does not know what torch.set_num_threads said.
//
// `saved` is the output for relu, sigmoid, tanh and leaky_relu, the pre-activation otherwise.
// Column sums: eight rows at a time in float32, then into float64; the row chunks are fixed, so
// the result does not depend on the number of threads.

#include <pthread.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kBlock = 1024;  // columns (or elements) held in L1 at a time
constexpr int64_t kRows = 8;      // rows summed in float32 before going to float64
constexpr int64_t kAlone = 16384; // elements below which one thread is faster than waking more

// In a forked process OpenMP still counts on the threads of the parent, and the thread that forked
// would wait for them for ever. It computes alone.
uint64_t forking_thread = 0;
bool forked() { return forking_thread && forking_thread == uint64_t(pthread_self()); }
[[maybe_unused]] const int fork_noticed =
    pthread_atfork(nullptr, nullptr, [] { forking_thread = uint64_t(pthread_self()); });

// exp(x) to about one unit in the last place on [-87, 88]; below it stays at exp(-87), above it is
// infinite (what 1 / (1 + exp) needs); NaN stays NaN.
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

inline float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }

constexpr float kAlpha = 1.59576912161f;           // 2 * sqrt(2 / pi)
constexpr float kBeta = 0.0713548162726f;          // kAlpha * 0.044715

struct None      { static float f(float x) { return x; }
                   static float d(float) { return 1.0f; } };
struct Relu      { static float f(float x) { return x < 0.0f ? 0.0f : x; }
                   static float d(float y) { return y > 0.0f ? 1.0f : 0.0f; } };
struct Relu2     { static float f(float x) { float r = x < 0.0f ? 0.0f : x; return r * r; }
                   static float d(float x) { return x < 0.0f ? 0.0f : 2.0f * x; } };
struct Silu      { static float f(float x) { return x * sigmoid_(x); }
                   static float d(float x) { float s = sigmoid_(x); return s + x * s * (1.0f - s); } };
struct GeluTanh  { static float z(float x) { return x * (kAlpha + kBeta * x * x); }
                   static float f(float x) { return x * sigmoid_(z(x)); }
                   static float d(float x) {
                     float s = sigmoid_(z(x));
                     float t = s * (1.0f - s);
                     return s + t * x * (kAlpha + 3.0f * kBeta * x * x); } };
// Of the normal distribution: the logistic function of an odd polynomial, fitted on [-6, 6] to an
// error of x cdf(x) of 2e-8; further out its logit grows as x^2 / 2 does.
inline float cdf_(float x) {
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
// x cdf(x) is x less a small part where x is positive: a cdf near 1 would round the product twice.
struct Gelu      { static float f(float x) {
                     const float tail = cdf_(x > 0.0f ? -x : x);
                     return x > 0.0f ? x - (x < 30.0f ? x : 30.0f) * tail : x * tail; }
                   static float d(float x) {
                     const float h = -0.5f * x * x;
                     return cdf_(x) + x * (h < -87.0f ? 0.0f : 0.398942280f * exp_(h)); } };
struct QuickGelu { static float f(float x) { return x * sigmoid_(1.702f * x); }
                   static float d(float x) { float s = sigmoid_(1.702f * x);
                     return s + 1.702f * x * s * (1.0f - s); } };
struct Sigmoid   { static float f(float x) { return sigmoid_(x); }
                   static float d(float y) { return y * (1.0f - y); } };
struct Tanh      { static float f(float x) { return x; }  // forward left to torch
                   static float d(float y) { return 1.0f - y * y; } };
struct LeakyRelu { static float f(float x) { return x > 0.0f ? x : 0.01f * x; }
                   static float d(float y) { return y > 0.0f ? 1.0f : 0.01f; } };

template <class A>
void act(const float* __restrict x, float* __restrict y, int64_t n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (n > kAlone && !forked())
  for (int64_t b = 0; b < (n + kBlock * 8 - 1) / (kBlock * 8); ++b) {
    const int64_t from = b * kBlock * 8, to = from + kBlock * 8 < n ? from + kBlock * 8 : n;
    for (int64_t i = from; i < to; ++i) y[i] = A::f(x[i]);
  }
}

// y = act(x + b), rows of n numbers; kept, x + b, may be null. Any of them may be x's memory.
template <class A>
void act_bias(const float* x, const float* b, float* y, float* kept, int64_t m, int64_t n,
              int threads) {
  const int64_t columns = (n + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(static) num_threads(threads) if (m * n > kAlone && !forked())
  for (int64_t i = 0; i < m * columns; ++i) {
    const int64_t j0 = i % columns * kBlock, at = i / columns * n + j0;
    const int64_t w = n - j0 < kBlock ? n - j0 : kBlock;
    const float *from = x + at, *add = b + j0;
    float *to = y + at, *pre = kept ? kept + at : nullptr;
    if (pre) {
#pragma GCC ivdep
      for (int64_t j = 0; j < w; ++j) pre[j] = from[j] + add[j];
      from = pre;
#pragma GCC ivdep
      for (int64_t j = 0; j < w; ++j) to[j] = A::f(from[j]);
    } else {
#pragma GCC ivdep
      for (int64_t j = 0; j < w; ++j) to[j] = A::f(from[j] + add[j]);
    }
  }
}

template <class A>
inline float grad(float dy, float s) { return dy * A::d(s); }
// as torch: an infinite dy is stopped, not turned into NaN, and a NaN output lets dy through
template <>
inline float grad<Relu>(float dy, float y) { return y <= 0.0f ? 0.0f : dy; }
template <>
inline float grad<Relu2>(float dy, float x) { return x <= 0.0f ? 0.0f : dy * (2.0f * x); }

template <class A>
void dact(const float* dy, const float* saved, float* dpre, double* partials, int64_t m, int64_t n,
          int64_t chunks, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (m * n > kAlone && !forked())
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t r0 = m * c / chunks, r1 = m * (c + 1) / chunks;
    double* sum = partials ? partials + c * n : nullptr;
    if (sum) for (int64_t j = 0; j < n; ++j) sum[j] = 0.0;
    for (int64_t r = r0; r < r1; r += kRows) {
      const int64_t rows = r1 - r < kRows ? r1 - r : kRows;
      for (int64_t j0 = 0; j0 < n; j0 += kBlock) {
        const int64_t w = n - j0 < kBlock ? n - j0 : kBlock;
        float block[kBlock];
        for (int64_t j = 0; j < w; ++j) block[j] = 0.0f;
        for (int64_t i = 0; i < rows; ++i) {
          const float* __restrict g = dy + (r + i) * n + j0;
          const float* __restrict s = saved + (r + i) * n + j0;
          float* __restrict o = dpre + (r + i) * n + j0;
          for (int64_t j = 0; j < w; ++j) {
            const float v = grad<A>(g[j], s[j]);
            o[j] = v;
            block[j] += v;
          }
        }
        if (sum) for (int64_t j = 0; j < w; ++j) sum[j0 + j] += block[j];
      }
    }
  }
}

}  // namespace

// For a library loaded after the fork: the thread that the process began with.
extern "C" void fastlinear_forked(uint64_t thread) { forking_thread = thread; }

// Numbered as the names in activations.py.
#define FASTLINEAR_SWITCH(CALL)          \
  switch (which) {                       \
    case 0: CALL(None); return 0;        \
    case 1: CALL(Relu); return 0;        \
    case 2: CALL(Relu2); return 0;       \
    case 3: CALL(Silu); return 0;        \
    case 4: CALL(Gelu); return 0;        \
    case 5: CALL(GeluTanh); return 0;    \
    case 6: CALL(Sigmoid); return 0;     \
    case 7: CALL(Tanh); return 0;        \
    case 8: CALL(QuickGelu); return 0;   \
    case 9: CALL(LeakyRelu); return 0;   \
    default: return 1;                   \
  }

extern "C" int fastlinear_act(int which, const float* x, float* y, int64_t n, int threads) {
#define CALL(A) act<A>(x, y, n, threads)
  FASTLINEAR_SWITCH(CALL)
#undef CALL
}

extern "C" int fastlinear_act_bias(int which, const float* x, const float* b, float* y, float* kept,
                                   int64_t m, int64_t n, int threads) {
#define CALL(A) act_bias<A>(x, b, y, kept, m, n, threads)
  FASTLINEAR_SWITCH(CALL)
#undef CALL
}

// partials: chunks * n doubles of scratch, or null where db is not wanted; db: n floats or null.
extern "C" int fastlinear_dact(int which, const float* dy, const float* saved, float* dpre,
                               float* db, double* partials, int64_t m, int64_t n, int64_t chunks,
                               int threads) {
  auto finish = [&] {
    if (!db) return;
    for (int64_t c = 1; c < chunks; ++c)
      for (int64_t j = 0; j < n; ++j) partials[j] += partials[c * n + j];
    for (int64_t j = 0; j < n; ++j) db[j] = static_cast<float>(partials[j]);
  };
#define CALL(A) (dact<A>(dy, saved, dpre, db ? partials : nullptr, m, n, chunks, threads), finish())
  FASTLINEAR_SWITCH(CALL)
#undef CALL
}
