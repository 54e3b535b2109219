// Elementwise pieces of Linear + activation on the CPU, float32, one pass over memory.
//
//   fastlinear_act     y = act(pre)
//   fastlinear_act_bias  the same of pre = x + b, which is kept where that is wanted
//   fastlinear_dact    dpre = dy * act'(saved), and db = column sums of dpre in the same pass
//   fastlinear_d2act, fastlinear_d3act   the derivatives of dpre, and of those, of smooth activations
//
// `saved` is what the activation saves, its output or the pre-activation.
// Column sums: eight rows at a time in float32, then into float64; the row chunks are fixed, so
// the result does not depend on the number of threads. Short rows are taken several at once, as
// longer ones, so that they fill vectors.

#include <algorithm>
#include <cstring>

#include "../../activations/cpp.h"
#include "threads.h"

namespace {

constexpr int64_t kBlock = 1024;  // columns (or elements) held in L1 at a time
constexpr int64_t kRows = 8;      // rows summed in float32 before going to float64
constexpr int64_t kAlone = 16384; // elements below which one thread is faster than waking more

constexpr int64_t kShort = 128;   // rows below that are taken together, up to kTogether numbers
constexpr int64_t kTogether = 256;

int threads_for(int64_t n) { return n > kAlone ? threads_worth(n) : 1; }

template <class A>
void act(const float* __restrict x, float* __restrict y, int64_t n) {
  const int threads = threads_for(n);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t b = 0; b < (n + kBlock * 8 - 1) / (kBlock * 8); ++b) {
    const int64_t from = b * kBlock * 8, to = from + kBlock * 8 < n ? from + kBlock * 8 : n;
    for (int64_t i = from; i < to; ++i) y[i] = A::f(x[i]);
  }
}

template <class A>
void act_bias_rows(const float* x, const float* b, float* y, float* kept, int64_t m, int64_t n) {
  const int64_t columns = (n + kBlock - 1) / kBlock;
  const int threads = threads_for(m * n);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
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

// How many of m rows of n numbers are taken as one.
int64_t together(int64_t m, int64_t n) {
  if (n < 1 || n >= kShort) return 1;
  return std::max<int64_t>(1, std::min(kTogether / n, m / 4));
}

// y = act(x + b), rows of n numbers; kept, x + b, may be null. Any of them may be x's memory.
template <class A>
void act_bias(const float* x, const float* b, float* y, float* kept, int64_t m, int64_t n) {
  const int64_t fold = together(m, n);
  if (fold > 1) {
    float several[kTogether];  // b for each of the rows taken together
    for (int64_t f = 0; f < fold; ++f) std::memcpy(several + f * n, b, n * sizeof(float));
    const int64_t whole = m / fold;
    act_bias_rows<A>(x, several, y, kept, whole, fold * n);
    const int64_t done = whole * fold * n;
    x += done, y += done, m -= whole * fold;
    if (kept) kept += done;
  }
  act_bias_rows<A>(x, b, y, kept, m, n);
}

// dpre, and its column sums on top of `sum` unless null, of `rows` rows.
template <class A>
void dact_rows(const float* dy, const float* saved, float* dpre, double* sum, int64_t rows,
               int64_t n) {
  for (int64_t r = 0; r < rows; r += kRows) {
    const int64_t count = rows - r < kRows ? rows - r : kRows;
    for (int64_t j0 = 0; j0 < n; j0 += kBlock) {
      const int64_t w = n - j0 < kBlock ? n - j0 : kBlock;
      float block[kBlock];
      for (int64_t j = 0; j < w; ++j) block[j] = 0.0f;
      for (int64_t i = 0; i < count; ++i) {
        const float* __restrict g = dy + (r + i) * n + j0;
        const float* __restrict s = saved + (r + i) * n + j0;
        float* __restrict o = dpre + (r + i) * n + j0;
        for (int64_t j = 0; j < w; ++j) {
          const float v = derived<A>(g[j], s[j]);
          o[j] = v;
          block[j] += v;
        }
      }
      if (sum) for (int64_t j = 0; j < w; ++j) sum[j0 + j] += block[j];
    }
  }
}

template <class A>
void dact(const float* dy, const float* saved, float* dpre, double* partials, int64_t m, int64_t n,
          int64_t chunks) {
  const int threads = threads_for(m * n);
  const int64_t fold = together(m / chunks, n);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t r0 = m * c / chunks, r1 = m * (c + 1) / chunks;
    double* sum = partials ? partials + c * n : nullptr;
    if (sum) for (int64_t j = 0; j < n; ++j) sum[j] = 0.0;
    const int64_t whole = fold > 1 ? (r1 - r0) / fold : 0, at = (r0 + whole * fold) * n;
    if (whole) {
      double sums[kTogether] = {};
      dact_rows<A>(dy + r0 * n, saved + r0 * n, dpre + r0 * n, sum ? sums : nullptr, whole, fold * n);
      for (int64_t f = 0; sum && f < fold; ++f)
        for (int64_t j = 0; j < n; ++j) sum[j] += sums[f * n + j];
    }
    dact_rows<A>(dy + at, saved + at, dpre + at, sum, r1 - r0 - whole * fold, n);
  }
}

// work(from, to) of stretches of n numbers, shared out among threads.
template <class Work>
void stretches(int64_t n, const Work& work) {
  constexpr int64_t kStretch = kBlock * 8;
  for_each((n + kStretch - 1) / kStretch, threads_for(n), [&](int64_t b) {
    work(b * kStretch, std::min(n, (b + 1) * kStretch));
  });
}

// Of dpre = e act'(s): g times its derivatives by e and by s.
template <class A>
void second(const float* g, const float* e, const float* s, float* by_e, float* by_s, int64_t n) {
  stretches(n, [=](int64_t from, int64_t to) {
#pragma GCC ivdep
    for (int64_t i = from; i < to; ++i) {
      const Slopes of = A::at(s[i]);
      by_e[i] = g[i] * of.first;
      by_s[i] = g[i] * e[i] * of.second;
    }
  });
}

// Of those: a and b, their gradients, times their derivatives by g, e and s.
template <class A>
void third(const float* a, const float* b, const float* g, const float* e, const float* s, float* by_g,
           float* by_e, float* by_s, int64_t n) {
  stretches(n, [=](int64_t from, int64_t to) {
#pragma GCC ivdep
    for (int64_t i = from; i < to; ++i) {
      const Slopes of = A::at(s[i]);
      const float x = a[i], y = b[i], u = g[i], v = e[i];
      by_g[i] = x * of.first + y * v * of.second;
      by_e[i] = y * u * of.second;
      by_s[i] = u * (x * of.second + y * v * of.third);
    }
  });
}

// run(Smooth<A>{}) of a smooth activation; 1 where it is none.
template <class Run>
int smooth(int which, const Run& run) {
  bool known = false;
  with(which, [&](auto a) {
    using A = Smooth<decltype(a)>;
    if constexpr (A::kKnown) known = true, run(A{});
  });
  return !known;
}

}  // namespace

extern "C" int fastlinear_act(int which, const float* x, float* y, int64_t n) {
  return !with(which, [&](auto a) { act<Pass<decltype(a)>>(x, y, n); });
}

extern "C" int fastlinear_act_bias(int which, const float* x, const float* b, float* y, float* kept,
                                   int64_t m, int64_t n) {
  return !with(which, [&](auto a) { act_bias<Pass<decltype(a)>>(x, b, y, kept, m, n); });
}

// partials: chunks * n doubles of scratch, or null where db is not wanted; db: n floats or null.
extern "C" int fastlinear_dact(int which, const float* dy, const float* saved, float* dpre,
                               float* db, double* partials, int64_t m, int64_t n, int64_t chunks) {
  const bool known = with(which, [&](auto a) {
    dact<Pass<decltype(a)>>(dy, saved, dpre, db ? partials : nullptr, m, n, chunks);
  });
  if (!known) return 1;
  if (!db) return 0;
  for (int64_t c = 1; c < chunks; ++c)
    for (int64_t j = 0; j < n; ++j) partials[j] += partials[c * n + j];
  for (int64_t j = 0; j < n; ++j) db[j] = static_cast<float>(partials[j]);
  return 0;
}

extern "C" int fastlinear_d2act(int which, const float* g, const float* e, const float* s, float* by_e,
                                float* by_s, int64_t n) {
  return smooth(which, [=](auto a) { second<decltype(a)>(g, e, s, by_e, by_s, n); });
}

extern "C" int fastlinear_d3act(int which, const float* a, const float* b, const float* g,
                                const float* e, const float* s, float* by_g, float* by_e, float* by_s,
                                int64_t n) {
  return smooth(which, [=](auto of) { third<decltype(of)>(a, b, g, e, s, by_g, by_e, by_s, n); });
}
