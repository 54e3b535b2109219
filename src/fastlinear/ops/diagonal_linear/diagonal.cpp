// A linear layer whose weight is a diagonal, on the CPU, float32 and bfloat16, one pass over memory.
//
//   fastlinear_diagonal_forward    y = act(x w + b) + r
//   fastlinear_diagonal_backward   dx = dpre w, dw = sum dpre x, db = sum dpre, dpre = dy act'(x w + b)
//
// Rows of few features are read several at a time, as one row of at least kWide numbers, where they
// lie right behind each other. Sums: kRows rows in float32, then into float64, over chunks of rows
// that depend on the sizes alone, so that results do not depend on the number of threads.
//
// New memory (`fresh`) is asked for in large pages, whose faults are 512 times fewer. A dx too large
// for the caches (`past`) is written around them, which leaves them to dy and x.

#include "../common/activations.h"
#include "diagonal_memory.h"

#include <pthread.h>

#include <vector>

namespace {

constexpr int64_t kWide = 512;      // numbers of a row, at least, where rows may be joined
constexpr int64_t kBlock = 1024;     // columns whose sums, and results on their way, stay in L1
constexpr int64_t kSegment = 4096;  // numbers of a row that one thread takes at a time
constexpr int64_t kAhead = 2048;    // bytes from what is read to what is asked for
constexpr int64_t kRows = 8;        // rows summed in float32 before going to float64
constexpr int64_t kLeast = 64;      // rows of a chunk with sums of its own
constexpr int64_t kAlone = 32768;   // numbers below which one thread is faster than waking more

// In a forked process OpenMP still counts on the threads of the parent, and the thread that forked
// would wait for them for ever. It computes alone.
uint64_t forking_thread = 0;
bool forked() { return forking_thread && forking_thread == uint64_t(pthread_self()); }
[[maybe_unused]] const int fork_noticed =
    pthread_atfork(nullptr, nullptr, [] { forking_thread = uint64_t(pthread_self()); });

using Bf16 = uint16_t;

inline float wide(float x) { return x; }
inline float wide(Bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
template <class T>
inline T narrow(float x);
template <>
inline float narrow<float>(float x) { return x; }
template <>
inline Bf16 narrow<Bf16>(float x) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return Bf16(x != x ? 0x7fc0u : rounded);
}

// The rows as they are walked: `fold` rows of k features as one, the last one of `last` numbers.
struct Walk {
  int64_t rows, width, last, fold;

  Walk(int64_t m, int64_t k, bool dense) {
    fold = dense && k < kWide ? (kWide + k - 1) / k : 1;
    if (fold > m) fold = m;
    width = fold * k;
    rows = (m * k + width - 1) / width;
    last = m * k - (rows - 1) * width;
  }
  int64_t numbers(int64_t row) const { return row == rows - 1 ? last : width; }
};

// A parameter (k) as float32, repeated for each row of a fold.
template <class T>
std::vector<float> repeated(const T* parameter, int64_t k, int64_t fold) {
  std::vector<float> found;
  if (!parameter) return found;
  found.resize(k * fold);
  for (int64_t i = 0; i < k; ++i) found[i] = wide(parameter[i]);
  for (int64_t i = k; i < k * fold; ++i) found[i] = found[i - k];
  return found;
}

template <class A, class T, bool kBias, bool kResidual>
inline void forward_row(const T* __restrict x, const float* __restrict w, const float* __restrict b,
                        const T* __restrict r, T* __restrict y, int64_t n) {
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float v = wide(x[i]) * w[i];
      if constexpr (kBias) v += b[i];
      v = A::f(v);
      if constexpr (kResidual) v += wide(r[i]);
      y[i] = narrow<T>(v);
    }
  };
  constexpr int64_t line = kLine / sizeof(T);
  int64_t i = 0;
  for (; i + line <= n; i += line) {
    __builtin_prefetch(x + i + kAhead / sizeof(T));
    if constexpr (kResidual) __builtin_prefetch(r + i + kAhead / sizeof(T));
    some(i, i + line);
  }
  some(i, n);
}

template <class A, class T, bool kBias, bool kResidual>
void forward_all(const T* x, const T* w, const T* b, const T* r, T* y, int64_t m, int64_t k,
                 int64_t x_stride, int64_t r_stride, int threads) {
  const Walk walk(m, k, x_stride == k && (!kResidual || r_stride == k));
  const std::vector<float> ws = repeated(w, k, walk.fold), bs = repeated(b, k, walk.fold);
  if (walk.fold > 1) x_stride = r_stride = walk.width;
  const int64_t segments = (walk.width + kSegment - 1) / kSegment;
#pragma omp parallel for schedule(static) num_threads(threads) if (m * k > kAlone && !forked())
  for (int64_t t = 0; t < walk.rows * segments; ++t) {
    const int64_t row = t / segments, j = t % segments * kSegment, left = walk.numbers(row) - j;
    const int64_t n = left < kSegment ? left : kSegment;
    forward_row<A, T, kBias, kResidual>(x + row * x_stride + j, ws.data() + j,
                                        kBias ? bs.data() + j : nullptr,
                                        kResidual ? r + row * r_stride + j : nullptr,
                                        y + row * walk.width + j, n);
  }
}

template <class A, class T>
inline void backward_row(const T* __restrict dy, const T* __restrict x, const float* __restrict w,
                         const float* __restrict b, T* __restrict dx, float* __restrict dw,
                         float* __restrict db, int64_t n) {
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float v = wide(x[i]), g = A::d(wide(dy[i]), v * w[i] + b[i]);
      dx[i] = narrow<T>(g * w[i]);
      dw[i] += g * v;
      db[i] += g;
    }
  };
  constexpr int64_t line = kLine / sizeof(T);
  int64_t i = 0;
  for (; i + line <= n; i += line) {
    __builtin_prefetch(dy + i + kAhead / sizeof(T));
    __builtin_prefetch(x + i + kAhead / sizeof(T));
    some(i, i + line);
  }
  some(i, n);
}

template <class A, class T>
void backward_all(const T* dy, const T* x, const T* w, const T* b, T* dx, T* dw, T* db,
                  int64_t m, int64_t k, int64_t x_stride, int64_t most_chunks, bool past,
                  int threads) {
  const Walk walk(m, k, x_stride == k);
  const std::vector<float> ws = repeated(w, k, walk.fold);
  std::vector<float> bs = repeated(b, k, walk.fold);
  if (!b) bs.assign(walk.width, 0.0f);
  if (walk.fold > 1) x_stride = walk.width;
  int64_t chunks = 1 + m * k / kAlone;
  if (chunks > most_chunks) chunks = most_chunks;
  // a chunk costs a pass over its sums: few rows share the columns out instead
  const int64_t enough = walk.rows / kLeast;
  if (chunks > enough) chunks = enough ? enough : 1;
  const int64_t part = chunks < most_chunks ? kBlock : walk.width;
  const int64_t parts = (walk.width + part - 1) / part, all = walk.width;
  std::vector<double> sums(2 * chunks * all);
#pragma omp parallel for schedule(static) num_threads(threads) if (m * k > kAlone && !forked())
  for (int64_t t = 0; t < chunks * parts; ++t) {
    const int64_t chunk = t / parts, begin = t % parts * part;
    const int64_t end = begin + part < all ? begin + part : all;
    const int64_t r0 = walk.rows * chunk / chunks, r1 = walk.rows * (chunk + 1) / chunks;
    double* sum_w = sums.data() + 2 * chunk * all;
    double* sum_b = sum_w + all;
    float in_w[kBlock], in_b[kBlock];
    T on_its_way[kBlock];
    for (int64_t r = r0; r < r1; r += kRows) {
      const int64_t stop = r + kRows < r1 ? r + kRows : r1;
      for (int64_t j = begin; j < end; j += kBlock) {
        const int64_t n = end - j < kBlock ? end - j : kBlock;
        for (int64_t i = 0; i < n; ++i) in_w[i] = in_b[i] = 0.0f;
        for (int64_t row = r; row < stop; ++row) {
          const int64_t left = walk.numbers(row) - j, here = left < n ? left : n;
          backward_row<A, T>(dy + row * all + j, x + row * x_stride + j, ws.data() + j,
                             bs.data() + j, dx && !past ? dx + row * all + j : on_its_way, in_w,
                             in_b, here);
          if (dx && past) write_through(dx + row * all + j, on_its_way, here * sizeof(T));
        }
        for (int64_t i = 0; i < n; ++i) sum_w[j + i] += in_w[i], sum_b[j + i] += in_b[i];
      }
    }
    if (past) written_through();
  }
  for (int64_t j = 0; j < k; ++j) {
    double total_w = 0.0, total_b = 0.0;
    for (int64_t c = 0; c < chunks; ++c)
      for (int64_t f = j; f < all; f += k) {
        total_w += sums[2 * c * all + f];
        total_b += sums[2 * c * all + all + f];
      }
    if (dw) dw[j] = narrow<T>(static_cast<float>(total_w));
    if (db) db[j] = narrow<T>(static_cast<float>(total_b));
  }
}

// Numbered as the names in activations.py.
#define FASTLINEAR_SWITCH(CALL)        \
  switch (which) {                     \
    case 0: CALL(None); return 0;      \
    case 1: CALL(Relu); return 0;      \
    case 2: CALL(Relu2); return 0;     \
    case 3: CALL(Silu); return 0;      \
    case 4: CALL(Gelu); return 0;      \
    case 5: CALL(GeluTanh); return 0;  \
    case 6: CALL(Sigmoid); return 0;   \
    case 7: CALL(Tanh); return 0;      \
    case 8: CALL(QuickGelu); return 0; \
    case 9: CALL(LeakyRelu); return 0; \
    default: return 1;                 \
  }

template <class T>
int forward(int which, const T* x, const T* w, const T* b, const T* r, T* y, int64_t m, int64_t k,
            int64_t x_stride, int64_t r_stride, int threads) {
#define REST x, w, b, r, y, m, k, x_stride, r_stride, threads
#define CALL(A)                                     \
  b ? (r ? forward_all<A, T, true, true>(REST)      \
         : forward_all<A, T, true, false>(REST))    \
    : (r ? forward_all<A, T, false, true>(REST)     \
         : forward_all<A, T, false, false>(REST))
  FASTLINEAR_SWITCH(CALL)
#undef CALL
#undef REST
}

template <class T>
int backward(int which, const T* dy, const T* x, const T* w, const T* b, T* dx, T* dw, T* db,
             int64_t m, int64_t k, int64_t x_stride, int64_t chunks, bool past, int threads) {
#define CALL(A) \
  backward_all<A, T>(dy, x, w, b, dx, dw, db, m, k, x_stride, chunks, past, threads)
  FASTLINEAR_SWITCH(CALL)
#undef CALL
}

}  // namespace

// For a library loaded after the fork: the thread that the process began with.
extern "C" void fastlinear_forked(uint64_t thread) { forking_thread = thread; }

// x and r: m rows of k numbers, x_stride and r_stride apart; y dense; b and r may be null. `half`:
// the numbers are bfloat16, else float32.
extern "C" int fastlinear_diagonal_forward(int which, int half, const void* x, const void* w,
                                           const void* b, const void* r, void* y, int64_t m,
                                           int64_t k, int64_t x_stride, int64_t r_stride,
                                           int threads, int fresh) {
  if (fresh) large_pages(y, size_t(m) * k * (half ? 2 : 4));
#define CALL(T)                                                                            \
  forward<T>(which, static_cast<const T*>(x), static_cast<const T*>(w),                    \
             static_cast<const T*>(b), static_cast<const T*>(r), static_cast<T*>(y), m, k, \
             x_stride, r_stride, threads)
  return half ? CALL(Bf16) : CALL(float);
#undef CALL
}

// dy and dx dense; b, dx, dw and db may be null.
extern "C" int fastlinear_diagonal_backward(int which, int half, const void* dy, const void* x,
                                            const void* w, const void* b, void* dx, void* dw,
                                            void* db, int64_t m, int64_t k, int64_t x_stride,
                                            int64_t chunks, int threads, int fresh, int past) {
  if (fresh && dx) large_pages(dx, size_t(m) * k * (half ? 2 : 4));
#define CALL(T)                                                                               \
  backward<T>(which, static_cast<const T*>(dy), static_cast<const T*>(x),                     \
              static_cast<const T*>(w), static_cast<const T*>(b), static_cast<T*>(dx),        \
              static_cast<T*>(dw), static_cast<T*>(db), m, k, x_stride, chunks, past, threads)
  return half ? CALL(Bf16) : CALL(float);
#undef CALL
}
