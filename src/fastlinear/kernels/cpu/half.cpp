// Rows of x against a weight of bfloat16 or float16 numbers on the CPU: the weight comes from memory
// once, as it lies, and what follows a product happens before its result is written.
//
//   fastlinear_half         y = act(x W^T + b)
//   fastlinear_half_gated   h = act(x Wg^T + bg) (x Wu^T + bu)
//
// Sums are float32, lane by lane over stretches of a row, in an order that depends on the sizes alone:
// the number of threads changes no bit. Bfloat16 numbers meet in pairs where the processor has such
// products, else as float32; float16 always as float32.

#include "../../activations/cpp.h"
#include "threads.h"
#include "vectors.h"

#include <algorithm>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__)
#error "written for processors with AVX-512"
#endif

namespace {

constexpr int kMost = 16;          // rows of x at a time
constexpr int kTogether = 6;       // of them that meet some of W at a time
constexpr int kFeatures = 4;       // rows of W that do
constexpr int64_t kDepth = 2048;   // numbers of a row before its sums join the total: kFeatures rows lie in L1
constexpr double kBytesAThread = 1.5e5;  // of weight, below which a second thread does not pay

using Half = uint16_t;

inline __mmask16 first16(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

// Numbers of a format, how they meet, and how float32 becomes one.
struct Bfloat {
#if defined(__AVX512BF16__)
  static constexpr int64_t kStep = 32;
  using Numbers = __m512i;
  static Numbers some(const Half* p, int64_t n) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p);
  }
  static Numbers whole(const Half* p) { return _mm512_loadu_si512(p); }
  static V add(V sum, Numbers a, Numbers b) {
    return reinterpret_cast<V>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                reinterpret_cast<__m512bh>(a),
                                                reinterpret_cast<__m512bh>(b)));
  }
#else
  static constexpr int64_t kStep = 16;
  using Numbers = V;
  static Numbers some(const Half* p, int64_t n) { return wide(p, n); }
  static Numbers whole(const Half* p) { return wide(p, kLanes); }
  static V add(V sum, Numbers a, Numbers b) { return sum + a * b; }
#endif
  static V wide(const Half* p, int64_t n) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first16(n), p));
    return reinterpret_cast<V>(_mm512_slli_epi32(bits, 16));
  }
  static __m256i narrow(V v) {  // to the nearest, ties to even; NaN stays NaN
    const __m512i bits = reinterpret_cast<__m512i>(v), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512 f = reinterpret_cast<__m512>(v);
    const __mmask16 nan = _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
    const __m512i all = _mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(all, 16));
  }
};

struct Float16 {
  static constexpr int64_t kStep = 16;
  using Numbers = V;
  static Numbers some(const Half* p, int64_t n) { return wide(p, n); }
  static Numbers whole(const Half* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return reinterpret_cast<V>(_mm512_cvtph_ps(bits));
  }
  static V add(V sum, Numbers a, Numbers b) { return sum + a * b; }
  static V wide(const Half* p, int64_t n) {
    return reinterpret_cast<V>(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first16(n), p)));
  }
  static __m256i narrow(V v) {
    return _mm512_cvtps_ph(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT);
  }
};

template <class T>
inline void put_half(Half* p, V v, int64_t n) {
  _mm256_mask_storeu_epi16(p, first16(n), T::narrow(v));
}

// Rows of x or of a weight: numbers of a row side by side.
struct Rows {
  const Half* at;
  int64_t row;
  const Half* operator[](int64_t i) const { return at + i * row; }
};

// out[r][i] += W[i] x[r] over so many numbers, lane by lane, or = where they are a row's first.
// ahead: null, or F rows of W to come, which are brought near meanwhile.
template <class T, int R, int F>
void dots(Rows w, Rows x, int64_t depth, bool first, V* out, const Half* ahead) {
  V acc[R][F];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < F; ++i) acc[r][i] = V{};
  auto add = [&](auto&& numbers) {
    typename T::Numbers a[F];
#pragma GCC unroll 16
    for (int i = 0; i < F; ++i) a[i] = numbers(w[i]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename T::Numbers b = numbers(x[r]);
#pragma GCC unroll 16
      for (int i = 0; i < F; ++i) acc[r][i] = T::add(acc[r][i], a[i], b);
    }
  };
  int64_t p = 0;
  for (; p + T::kStep <= depth; p += T::kStep) {
    if (ahead)
#pragma GCC unroll 4
      for (int i = 0; i < F; ++i) __builtin_prefetch(ahead + i * w.row + p);
    add([p](const Half* row) { return T::whole(row + p); });
  }
  if (p < depth) add([p, depth](const Half* row) { return T::some(row + p, depth - p); });
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < F; ++i) {
      V& o = out[r * kLanes + i];
      o = first ? acc[r][i] : o + acc[r][i];
    }
}

template <class T, int R>
void dots_of(Rows w, Rows x, int64_t depth, bool first, V* out, const Half* ahead, int64_t count) {
  if (count == kFeatures) return dots<T, R, kFeatures>(w, x, depth, first, out, ahead);
  for (int64_t i = 0; i < count; ++i)
    dots<T, R, 1>({w[i], w.row}, x, depth, first, out + i, nullptr);
}

// to[r], lane i: W[i] x[r], of count <= kLanes rows of W and m <= kMost of x.
template <class T>
void products(Rows w, Rows x, int64_t m, int64_t k, int64_t count, V* to) {
  using Dots = void (*)(Rows, Rows, int64_t, bool, V*, const Half*, int64_t);
  constexpr Dots of[] = {nullptr,       dots_of<T, 1>, dots_of<T, 2>, dots_of<T, 3>,
                         dots_of<T, 4>, dots_of<T, 5>, dots_of<T, 6>};
  V out[kMost * kLanes];
  for (int64_t r = 0; count < kLanes && r < m; ++r)
    for (int64_t i = count; i < kLanes; ++i) out[r * kLanes + i] = V{};
  const int64_t parts = (m + kTogether - 1) / kTogether;
  for (int64_t from = 0; from < std::max<int64_t>(k, 1); from += kDepth) {
    const int64_t depth = std::min(kDepth, k - from);
    if (m == 1 && count == kLanes) {
      dots<T, 1, kLanes>({w.at + from, w.row}, {x.at + from, x.row}, depth, from == 0, out, nullptr);
      continue;
    }
    for (int64_t i = 0; i < count; i += kFeatures)
      for (int64_t s = 0; s < parts; ++s) {
        const int64_t r0 = m * s / parts, r1 = m * (s + 1) / parts;
        const Half* here = w[i] + from;
        of[r1 - r0]({here, w.row}, {x[r0] + from, x.row}, depth, from == 0,
                    out + r0 * kLanes + i, s ? nullptr : here + kFeatures * w.row,
                    std::min<int64_t>(kFeatures, count - i));
      }
  }
  for (int64_t r = 0; r < m; ++r) to[r] = sums(out + r * kLanes);
}

template <class A>
void activate_lanes(V& v) {
  float t[kLanes];
  store(t, v);
  for (int i = 0; i < kLanes; ++i) t[i] = A::f(t[i]);
  v = load(t);
}

void activate(int which, V& v) {
  if (which != kNone) with(which, [&](auto a) { activate_lanes<decltype(a)>(v); });
}

inline int threads_for(int64_t k, int64_t features, int64_t blocks) {
  const double wanted = 2.0 * k * features / kBytesAThread;
  return threads_worth(std::min<double>(wanted, blocks));
}

template <class T>
void layer(int which, Rows x, Rows w, const Half* bias, Half* y, Half* pre, int64_t m, int64_t k,
           int64_t n) {
  const int64_t blocks = (n + kLanes - 1) / kLanes;
  for_each(blocks, threads_for(k, n, blocks), [=](int64_t block) {
    const int64_t j = block * kLanes, count = std::min<int64_t>(kLanes, n - j);
    const V b = bias ? T::wide(bias + j, count) : V{};
    for (int64_t r0 = 0; r0 < m; r0 += kMost) {
      const int64_t rows = std::min<int64_t>(kMost, m - r0);
      V sum[kMost];
      products<T>({w[j], w.row}, {x[r0], x.row}, rows, k, count, sum);
      for (int64_t r = 0; r < rows; ++r) {
        V v = sum[r] + b;
        if (pre) put_half<T>(pre + (r0 + r) * n + j, v, count);
        activate(which, v);
        put_half<T>(y + (r0 + r) * n + j, v, count);
      }
    }
  });
}

template <class T>
void gated(int which, Rows x, Rows gate, Rows up, const Half* gate_bias, const Half* up_bias,
           int64_t step, Half* h, int64_t m, int64_t k, int64_t n) {
  const int64_t blocks = (n + kLanes - 1) / kLanes;
  for_each(blocks, threads_for(k, 2 * n, blocks), [=](int64_t block) {
    const int64_t j = block * kLanes, count = std::min<int64_t>(kLanes, n - j);
    V sum[2][kMost], b[2] = {};
    const Half* biases[] = {gate_bias, up_bias};
    for (int half = 0; half < 2; ++half)
      for (int64_t i = 0; biases[half] && i < count; ++i)
        b[half][i] = T::wide(biases[half] + (j + i) * step, 1)[0];
    for (int64_t r0 = 0; r0 < m; r0 += kMost) {
      const int64_t rows = std::min<int64_t>(kMost, m - r0);
      products<T>({gate[j], gate.row}, {x[r0], x.row}, rows, k, count, sum[0]);
      products<T>({up[j], up.row}, {x[r0], x.row}, rows, k, count, sum[1]);
      for (int64_t r = 0; r < rows; ++r) {
        V v = sum[0][r] + b[0];
        activate(which, v);
        put_half<T>(h + (r0 + r) * n + j, v * (sum[1][r] + b[1]), count);
      }
    }
  });
}

inline const Half* halves(const void* p) { return static_cast<const Half*>(p); }

}  // namespace

// `half`: the numbers are bfloat16, else float16. bias and pre may be null; y and pre are
// dense.
extern "C" void fastlinear_half(int which, int half, const void* x, int64_t x_row, const void* w,
                                    int64_t w_row, const void* bias, void* y, void* pre, int64_t m,
                                    int64_t k, int64_t n) {
  auto* run = half ? layer<Bfloat> : layer<Float16>;
  run(which, {halves(x), x_row}, {halves(w), w_row}, halves(bias), static_cast<Half*>(y),
      static_cast<Half*>(pre), m, k, n);
}

// The same of two weights whose rows lie equally far apart; numbers of the biases lie `step` apart.
extern "C" void fastlinear_half_gated(int which, int half, const void* x, int64_t x_row,
                                          const void* gate, const void* up, int64_t w_row,
                                          const void* gate_bias, const void* up_bias, int64_t step,
                                          void* h, int64_t m, int64_t k, int64_t n) {
  auto* run = half ? gated<Bfloat> : gated<Float16>;
  run(which, {halves(x), x_row}, {halves(gate), w_row}, {halves(up), w_row}, halves(gate_bias),
      halves(up_bias), step, static_cast<Half*>(h), m, k, n);
}
