// A linear layer whose weight is a diagonal, on the CPU, one pass over memory, in float32,
// bfloat16 or float16.
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

#include "../../../activations/cpp.h"
#include "../../../kernels/cpu/numbers.h"
#include "../../../kernels/cpu/threads.h"
#include "diagonal_memory.h"

#include <memory>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t kWide = 512;      // numbers of a row, at least, where rows may be joined
constexpr int64_t kBlock = 1024;     // columns whose sums, and results on their way, stay in L1
constexpr int64_t kSegment = 4096;  // numbers of a row that one thread takes at a time
constexpr int64_t kAhead = 2048;    // bytes from what is read to what is asked for
constexpr int64_t kRows = 8;        // rows summed in float32 before going to float64
constexpr int64_t kLeast = 64;      // rows of a chunk with sums of its own,
constexpr int64_t kNarrow = 2048;   // half as many of at most so many numbers
constexpr int64_t kAlone = 32768;   // numbers a thread, below which waking it does not pay

// What one call is made of, as cpp.py writes it.
struct Call {
  int64_t act, dtype;        // which activation; 0 for float32, 1 bfloat16, 2 float16
  int64_t m, k;
  int64_t x_stride, r_stride;  // numbers between rows of x and of the residual; the rest is dense
  int64_t chunks;            // of rows, with sums of their own, at most
  int64_t fresh, past;       // whether the large result is new memory; is written around the caches
};

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

// Where there is no bias every line reads this one: adding -0 changes no number, not even -0.
struct NoBias {
  alignas(kLine) float line[kLine / 2];
  constexpr NoBias() : line() {
    for (float& b : line) b = -0.0f;
  }
};
constexpr NoBias kNoBias;

// What follows of AMD's processors was measured on an EPYC alone; elsewhere it is left out.
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || \
    defined(__znver5__)
constexpr bool kAmd = true;
#else
constexpr bool kAmd = false;
#endif

// AMD's: into L2. On the way to L1 reads so far ahead would hold up what is written (a fifth of a
// forward in memory).
template <class T>
inline void ask_for(const T* x) { __builtin_prefetch(x + kAhead / sizeof(T), 0, kAmd ? 1 : 3); }

// Numbers of T in a cache line. Rows are computed in whole lines, which become straight vector code,
// the only code there is of an activation: what is left of a row is copied to a line and back.
template <class T>
constexpr int64_t kCount = kLine / sizeof(T);
constexpr int64_t kFloats = kCount<float>;

// A parameter (k) as float32, repeated for each row of a fold; itself where it is that already.
struct Repeated {
  std::unique_ptr<float[]> made;
  const float* data = nullptr;
  int64_t size = 0;
  alignas(kLine) float last[kLine / 2];  // what does not fill a line, filled up

  template <class T>
  Repeated(const T* parameter, int64_t k, int64_t fold) : size(k * fold) {
    if (!parameter) return;
    if constexpr (std::is_same_v<T, float>) data = parameter;
    if (!data || fold > 1) {
      made.reset(new float[size + kCount<T> + kFloats]);  // its last line ends behind `size`
      const auto from = reinterpret_cast<uintptr_t>(made.get());
      float* to = made.get() + (-from & (kLine - 1)) / sizeof(float);  // lines of the caches
      for (int64_t i = 0; i < k; ++i) to[i] = wide(parameter[i]);
      for (int64_t i = k; i < size; i += k) std::memcpy(to + i, to, k * sizeof(float));
      std::memset(to + size, 0, kCount<T> * sizeof(float));
      data = to;
      return;
    }
    const int64_t left = size % kCount<T>;
    if (!left) return;
    for (float& number : last) number = 0.0f;
    std::memcpy(last, data + size - left, left * sizeof(float));
  }
  // A line from number i on, of which as many lie there as are left.
  const float* line(int64_t i) const { return made ? data + i : last; }
};

// In a pass over memory that does next to nothing else AMD's processors read so far ahead that what
// they write waits for those reads: they are given something to do. 16 to 64 MiB took a sixth less
// time; in the caches it would take more.
inline void take_time() {
#if defined(__x86_64__)
  __asm__ volatile(".rept 32\n\tnop\n\t.endr");
#endif
}
template <class A, class T>
constexpr bool kQuick = kAmd && std::is_same_v<T, float> &&
                        (std::is_same_v<A, None> || std::is_same_v<A, Relu> ||
                         std::is_same_v<A, Relu2> || std::is_same_v<A, LeakyRelu>);

// Where x lies: beside the caches, in them, or nothing is known. In the caches AMD's processors want
// nothing asked for and four lines at a time: 64 rows of 1024 took 4.9 us in place of 6.5.
enum Place { kFar, kNear, kAnywhere };
template <class A, class T>
constexpr Place kPast = kQuick<A, T> ? kFar : kAnywhere;
template <class A, class T>
constexpr Place kInside = kQuick<A, T> ? kNear : kAnywhere;

// n numbers of a row, whole lines; b_step: numbers of b from line to line, 0 where there is no bias.
// kBias: whether there may be one. Only a product alone is told apart: a residual is added to it
// with one rounding.
template <class A, class T, bool kBias, bool kResidual, Place kPlace>
void forward_lines(const T* __restrict x, const float* __restrict w, const float* __restrict b,
                   int64_t b_step, const T* __restrict r, T* __restrict y, int64_t n) {
  constexpr int64_t line = kCount<T>;
  const auto compute = [&](int64_t j) {
    if constexpr (kPlace != kNear) ask_for(x + j);
    if constexpr (kResidual && kPlace != kNear) ask_for(r + j);
    if constexpr (kPlace == kFar) take_time();
    if constexpr (std::is_same_v<T, Half>) {
      float xs[line], rs[line], ys[line];
      widen(x + j, xs, line);
      if constexpr (kResidual) widen(r + j, rs, line);
#pragma omp simd
      for (int64_t i = 0; i < line; ++i) {
        float v = xs[i] * w[j + i];
        if constexpr (kBias) v += b[i];
        v = A::f(v);
        if constexpr (kResidual) v += rs[i];
        ys[i] = v;
      }
      narrow_all(ys, y + j, line);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < line; ++i) {
        float v = wide(x[j + i]) * w[j + i];
        if constexpr (kBias) v += b[i];
        v = A::f(v);
        if constexpr (kResidual) v += wide(r[j + i]);
        y[j + i] = narrow<T>(v);
      }
    }
    b += b_step;
  };
  if constexpr (kPlace == kNear) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < n; j += line) compute(j);
  } else {
    for (int64_t j = 0; j < n; j += line) compute(j);
  }
}

template <class T>
using Forward = void (*)(const T*, const float*, const float*, int64_t, const T*, T*, int64_t);

// n numbers of a row from number j of it on.
template <class T>
void forward_row(Forward<T> lines, const T* x, const Repeated& w, const Repeated& b, int64_t j,
                 const T* r, T* y, int64_t n) {
  constexpr int64_t line = kCount<T>;
  const int64_t left = n % line, i = n - left;
  const bool biased = b.data != nullptr;
  if (i) lines(x, w.data + j, biased ? b.data + j : kNoBias.line, biased ? line : 0, r, y, i);
  if (!left) return;
  alignas(kLine) T xs[line], rs[line], ys[line];
  line_of(xs, x + i, left * sizeof(T));
  if (r) line_of(rs, r + i, left * sizeof(T));
  lines(xs, w.line(j + i), biased ? b.line(j + i) : kNoBias.line, 0, rs, ys, line);
  part_of(y + i, ys, left * sizeof(T));
}

template <class T>
void forward_all(Forward<T> lines, const Call& c, const T* x, const T* w, const T* b, const T* r,
                 T* y) {
  const int64_t m = c.m, k = c.k;
  int64_t x_stride = c.x_stride, r_stride = c.r_stride;
  const Walk walk(m, k, x_stride == k && (!r || r_stride == k));
  const Repeated ws(w, k, walk.fold), bs(b, k, walk.fold);
  if (walk.fold > 1) x_stride = r_stride = walk.width;
  const int64_t segments = (walk.width + kSegment - 1) / kSegment;
  const int threads = threads_worth(double(m) * k / kAlone);
  for_each(walk.rows * segments, threads, [&](int64_t t) {
    const int64_t row = t / segments, j = t % segments * kSegment, left = walk.numbers(row) - j;
    const int64_t n = left < kSegment ? left : kSegment;
    forward_row<T>(lines, x + row * x_stride + j, ws, bs, j,
                   r ? r + row * r_stride + j : nullptr, y + row * walk.width + j, n);
  });
}

template <class A, class T>
void backward_lines(const T* __restrict dy, const T* __restrict x, const float* __restrict w,
                    const float* __restrict b, int64_t b_step, T* __restrict dx,
                    float* __restrict dw, float* __restrict db, int64_t n) {
  constexpr int64_t line = kCount<T>;
  for (int64_t j = 0; j < n; j += line, b += b_step) {
    ask_for(dy + j);
    ask_for(x + j);
    if constexpr (std::is_same_v<T, Half>) {
      float xs[line], gs[line], out[line];
      widen(x + j, xs, line);
      widen(dy + j, gs, line);
#pragma omp simd
      for (int64_t i = 0; i < line; ++i) {
        const float g = A::d(gs[i], xs[i] * w[j + i] + b[i]);
        out[i] = g * w[j + i];
        dw[j + i] += g * xs[i];
        db[j + i] += g;
      }
      narrow_all(out, dx + j, line);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < line; ++i) {
        const float v = wide(x[j + i]), g = A::d(wide(dy[j + i]), v * w[j + i] + b[i]);
        dx[j + i] = narrow<T>(g * w[j + i]);
        dw[j + i] += g * v;
        db[j + i] += g;
      }
    }
  }
}

template <class T>
using Backward = void (*)(const T*, const T*, const float*, const float*, int64_t, T*, float*,
                          float*, int64_t);

// n numbers of a row from number j of it on.
template <class T>
void backward_row(Backward<T> lines, const T* dy, const T* x, const Repeated& w, const Repeated& b,
                  int64_t j, T* dx, float* dw, float* db, int64_t n) {
  constexpr int64_t line = kCount<T>;
  const int64_t left = n % line, i = n - left;
  const bool biased = b.data != nullptr;
  const float* bs = biased ? b.data + j : kNoBias.line;
  if (i) lines(dy, x, w.data + j, bs, biased ? line : 0, dx, dw, db, i);
  if (!left) return;
  alignas(kLine) T gs[line], xs[line], out[line];
  line_of(gs, dy + i, left * sizeof(T));
  line_of(xs, x + i, left * sizeof(T));
  bs = biased ? b.line(j + i) : kNoBias.line;
  // Sums of a line of its own: behind what is left w and b go on where rows are folded, and what
  // they make of zeros may be NaN.
  alignas(kLine) float ws[line] = {}, sums[line] = {};
  lines(gs, xs, w.line(j + i), bs, 0, out, ws, sums, line);
  for (int64_t l = 0; l < left; ++l) dw[i + l] += ws[l], db[i + l] += sums[l];
  part_of(dx + i, out, left * sizeof(T));
}

template <class T>
void backward_all(Backward<T> lines, const Call& c, const T* dy, const T* x, const T* w, const T* b,
                  T* dx, T* dw, T* db) {
  const int64_t m = c.m, k = c.k, most_chunks = c.chunks;
  const bool past = c.past;
  int64_t x_stride = c.x_stride;
  const Walk walk(m, k, x_stride == k);
  const Repeated ws(w, k, walk.fold);
  const Repeated bs(b, k, walk.fold);
  if (walk.fold > 1) x_stride = walk.width;
  int64_t chunks = 1 + m * k / kAlone;
  if (chunks > most_chunks) chunks = most_chunks;
  // a chunk costs a pass over its sums: few rows share the columns out instead
  const int64_t enough = walk.rows / (walk.width <= kNarrow ? kLeast / 2 : kLeast);
  if (chunks > enough) chunks = enough ? enough : 1;
  const int64_t part = chunks < most_chunks ? kBlock : walk.width;
  const int64_t parts = (walk.width + part - 1) / part, all = walk.width;
  const bool direct = walk.rows <= kRows && walk.fold == 1;  // float32 sums are the results
  std::vector<double> sums(direct ? 0 : 2 * chunks * all);
  const int threads = threads_worth(double(m) * k / kAlone);
  for_each(chunks * parts, threads, [&](int64_t t) {
    const int64_t chunk = t / parts, begin = t % parts * part;
    const int64_t end = begin + part < all ? begin + part : all;
    const int64_t r0 = walk.rows * chunk / chunks, r1 = walk.rows * (chunk + 1) / chunks;
    double* sum_w = sums.data() + 2 * chunk * all;
    double* sum_b = sum_w + all;
    alignas(kLine) float in_w[kBlock], in_b[kBlock];
    alignas(kLine) T on_its_way[kBlock];
    for (int64_t r = r0; r < r1; r += kRows) {
      const int64_t stop = r + kRows < r1 ? r + kRows : r1;
      for (int64_t j = begin; j < end; j += kBlock) {
        const int64_t n = end - j < kBlock ? end - j : kBlock;
        const int64_t room = n + kCount<T> < kBlock ? n + kCount<T> : kBlock;
        for (int64_t i = 0; i < room; ++i) in_w[i] = in_b[i] = 0.0f;
        for (int64_t row = r; row < stop; ++row) {
          const int64_t left = walk.numbers(row) - j, here = left < n ? left : n;
          backward_row<T>(lines, dy + row * all + j, x + row * x_stride + j, ws, bs, j,
                          dx && !past ? dx + row * all + j : on_its_way, in_w, in_b, here);
          if (dx && past) write_through(dx + row * all + j, on_its_way, here * sizeof(T));
        }
        if (direct) {
          for (int64_t i = 0; dw && i < n; ++i) dw[j + i] = narrow<T>(in_w[i]);
          for (int64_t i = 0; db && i < n; ++i) db[j + i] = narrow<T>(in_b[i]);
        } else {
          for (int64_t i = 0; i < n; ++i) sum_w[j + i] += in_w[i], sum_b[j + i] += in_b[i];
        }
      }
    }
    if (past) written_through();
  });
  for (int64_t j = 0; !direct && j < k; ++j) {
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

template <class T>
void forward(const Call& c, const T* x, const T* w, const T* b, const T* r, T* y) {
#define LINES(A, PRE)                                                       \
  {forward_lines<A, T, true, false, kInside<A, T>>, forward_lines<A, T, true, false, kPast<A, T>>, \
   forward_lines<A, T, true, true, kInside<A, T>>, forward_lines<A, T, true, true, kAnywhere>},
  static constexpr Forward<T> kLines[kActivations][4] = {FASTLINEAR_ACTIVATIONS(LINES)};
#undef LINES
  static constexpr Forward<T> kScaled[4] = {forward_lines<None, T, false, false, kInside<None, T>>,
                                            forward_lines<None, T, false, false, kPast<None, T>>,
                                            forward_lines<None, T, false, true, kInside<None, T>>,
                                            forward_lines<None, T, false, true, kAnywhere>};
  if (c.fresh) large_pages(y, size_t(c.m) * c.k * sizeof(T));
  if (c.act < 0 || c.act >= kActivations) std::abort();
  const Forward<T>* lines = c.act || b ? kLines[c.act] : kScaled;
  forward_all<T>(lines[(r ? 2 : 0) + (c.past ? 1 : 0)], c, x, w, b, r, y);
}

template <class T>
void backward(const Call& c, const T* dy, const T* x, const T* w, const T* b, T* dx, T* dw, T* db) {
#define LINES(A, PRE) backward_lines<A, T>,
  static constexpr Backward<T> kLines[kActivations] = {FASTLINEAR_ACTIVATIONS(LINES)};
#undef LINES
  if (c.fresh && dx) large_pages(dx, size_t(c.m) * c.k * sizeof(T));
  if (c.act < 0 || c.act >= kActivations) std::abort();
  backward_all<T>(kLines[c.act], c, dy, x, w, b, dx, dw, db);
}

}  // namespace

// b and r may be null.
extern "C" void fastlinear_diagonal_forward(const int64_t* call, const void* x, const void* w,
                                            const void* b, const void* r, void* y) {
  const Call& c = *reinterpret_cast<const Call*>(call);
#define RUN(T)                                                                              \
  forward(c, static_cast<const T*>(x), static_cast<const T*>(w), static_cast<const T*>(b), \
          static_cast<const T*>(r), static_cast<T*>(y))
  c.dtype == 0 ? RUN(float) : c.dtype == 1 ? RUN(Bf16) : RUN(Half);
#undef RUN
}

// b, dx, dw and db may be null.
extern "C" void fastlinear_diagonal_backward(const int64_t* call, const void* dy, const void* x,
                                             const void* w, const void* b, void* dx, void* dw,
                                             void* db) {
  const Call& c = *reinterpret_cast<const Call*>(call);
#define RUN(T)                                                                                \
  backward(c, static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<const T*>(w), \
           static_cast<const T*>(b), static_cast<T*>(dx), static_cast<T*>(dw),               \
           static_cast<T*>(db))
  c.dtype == 0 ? RUN(float) : c.dtype == 1 ? RUN(Bf16) : RUN(Half);
#undef RUN
}
