// Whole MLPs on the CPU, float32, one call for all layers: h_{i+1} = act_i(h_i W_i^T + b_i).
//
//   fastlinear_mlp_forward    y, and what the backward reads where it is asked for
//   fastlinear_mlp_backward   dx, every dW and db
//
// Weights are read where they lie at every call; nothing of them is kept between calls. Scratch
// belongs to the thread. Vectors are those of the processor compiled for (kLanes floats).

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kMaxVectors = 4;
constexpr int kRowsOf[kMaxVectors + 1] = {0, 14, 12, 8, 6};  // accumulator rows for 1..4 vectors
#elif defined(__AVX__)
constexpr int kLanes = 8, kMaxVectors = 2;
constexpr int kRowsOf[kMaxVectors + 1] = {0, 8, 6};
#else
constexpr int kLanes = 4, kMaxVectors = 2;
constexpr int kRowsOf[kMaxVectors + 1] = {0, 8, 6};
#endif
constexpr int kBlock = kLanes * kMaxVectors;  // rows of x that go through all layers together
constexpr int64_t kDotRows = 16;              // up to here rows take dot products along W's rows
constexpr int kDotFeatures = 4;               // rows of W that meet some of h at a time
constexpr int64_t kDotDepth = 1024;           // products along a row before they join the total
constexpr int64_t kDepth = 32;                // products summed before they join the total
constexpr int64_t kPackAhead = 24;            // rows between reading one and asking for it
constexpr int64_t kReadByAll = 256;           // up to this width each thread may read all weights
constexpr int64_t kTurned = 128;              // up to this width weights may be turned instead of x
constexpr double kFlopsAThread = 4.5e5;        // below this much work a second thread does not pay
constexpr double kFlopsABarrier = 6e4;        // what could be computed while threads wait

typedef float V __attribute__((vector_size(kLanes * 4)));
typedef int32_t I __attribute__((vector_size(kLanes * 4)));
typedef float Vu __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline V load(const float* p) { return *reinterpret_cast<const Vu*>(p); }
inline void store(float* p, V v) { *reinterpret_cast<Vu*>(p) = v; }
inline V all(float x) { return x - V{}; }
#if defined(__AVX512F__)
inline V part(const float* p, int64_t n) {  // n < kLanes numbers, then zeros
  return reinterpret_cast<V>(_mm512_maskz_loadu_ps((1u << n) - 1, p));
}
inline void put(float* p, V v, int64_t n) {  // the first n <= kLanes numbers
  _mm512_mask_storeu_ps(p, (1u << n) - 1, reinterpret_cast<__m512>(v));
}
#else
inline V part(const float* p, int64_t n) {
  float t[kLanes] = {};
  std::memcpy(t, p, n * 4);
  return load(t);
}
inline void put(float* p, V v, int64_t n) {
  if (n == kLanes) store(p, v);
  else std::memcpy(p, &v, n * 4);
}
#endif
inline V get(const float* p, int64_t n) { return n == kLanes ? load(p) : part(p, n); }

// ---------------------------------------------------------------------------------------------
// Activations and their derivatives; comparisons are written so that NaN stays NaN.

inline V abs_(V x) { return reinterpret_cast<V>(reinterpret_cast<I>(x) & 0x7fffffff); }
inline V pick(I mask, V a, V b) { return mask ? a : b; }
inline V shuffle(V a, V b, I from) {  // a's lanes are numbered from 0, b's from kLanes
#if defined(__clang__)
  V v;
  for (int i = 0; i < kLanes; ++i) v[i] = from[i] < kLanes ? a[from[i]] : b[from[i] - kLanes];
  return v;
#else
  return __builtin_shuffle(a, b, from);
#endif
}

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
// s = sigmoid(x) and s (1 - s), the latter without the cancellation of 1 - s near 1
inline V sigmoid_(V x, V& slope) {
  const V e = exp_(-x), s = 1.0f / (1.0f + e);
  slope = pick(x < all(-88.0f), all(0.0f), e * s * s);
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
    case kRelu2: return dy * (2.0f * relu_(s));
    case kSilu: {
      V slope;
      const V g = sigmoid_(s, slope);
      return dy * (g + s * slope);
    }
    case kGelu: return dy * (cdf_(s) + s * 0.3989422804f * exp_(-0.5f * s * s));
    case kGeluTanh: {
      V slope;
      const V g = sigmoid_(s * (kAlpha + kBeta * s * s), slope);
      // far out the slope is 0 and its factor may be infinite
      const V more = slope * s * (kAlpha + 3.0f * kBeta * s * s);
      return dy * (g + pick(abs_(s) > all(100.0f), all(0.0f), more));
    }
    case kSigmoid: return dy * (s * (1.0f - s));
    case kTanh: return dy * (1.0f - s * s);
    case kQuickGelu: {
      V slope;
      const V g = sigmoid_(1.702f * s, slope);
      return dy * (g + 1.702f * s * slope);
    }
    case kLeakyRelu: return pick(s > all(0.0f), dy, 0.01f * dy);
    default: return dy;
  }
}

// ---------------------------------------------------------------------------------------------
// Scratch of a thread: grows to the largest net seen (a forward takes a few hundred kilobytes; the
// backward of 512 rows through layers of 2048 features 32 megabytes).

struct Scratch {
  float* data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
  float* at_least(size_t floats) {
    if (floats > size) {
      std::free(data);
      size = (floats + 15) / 16 * 16;
      data = static_cast<float*>(std::aligned_alloc(64, size * 4));
      if (!data) { size = 0; std::abort(); }
    }
    return data;
  }
};
thread_local Scratch scratch, panels_of, weights_of;

inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// ---------------------------------------------------------------------------------------------
// Lanes of vectors: transposed, and summed up.

// Lanes with bit S of their index clear: a's own, then those of b at S lanes less.
template <int S>
inline V low(V a, V b) {
  I from;
  for (int i = 0; i < kLanes; ++i) from[i] = (i & S) ? i - S + kLanes : i;
  return shuffle(a, b, from);
}
// Lanes with bit S of their index set: a's from S lanes more, then b's own.
template <int S>
inline V high(V a, V b) {
  I from;
  for (int i = 0; i < kLanes; ++i) from[i] = (i & S) ? i + kLanes : i + S;
  return shuffle(a, b, from);
}

constexpr int reversed(int i) {
  int r = 0;
  for (int bit = 1; bit < kLanes; bit <<= 1) r = (r << 1) | ((i & bit) ? 1 : 0);
  return r;
}

template <int S>
inline void turn_pairs(V* t) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (!(i & S)) {
      const V a = t[i], b = t[i + S];
      t[i] = low<S>(a, b);
      t[i + S] = high<S>(a, b);
    }
}

// Lanes with bit S of their index clear: sums of a's lanes S apart; the others: of b's.
template <int S>
inline V merge(V a, V b) {
  I second, apart;
  for (int i = 0; i < kLanes; ++i) {
    second[i] = (i & S) ? -1 : 0;
    apart[i] = (i & S) ? i - S + kLanes : i + S;
  }
  return pick(second, b, a) + shuffle(a, b, apart);
}

// Lane i of the result is the sum over the lanes of v[i].
inline V sums(const V* v) {
  V t[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) t[i] = v[reversed(i)];
  if constexpr (kLanes == 16)
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) t[i] = merge<8>(t[2 * i], t[2 * i + 1]);
  if constexpr (kLanes >= 8)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) t[i] = merge<4>(t[2 * i], t[2 * i + 1]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) t[i] = merge<2>(t[2 * i], t[2 * i + 1]);
  return merge<1>(t[0], t[1]);
}

// ---------------------------------------------------------------------------------------------
// A few rows: dot products along the weight's rows.

// out[r][i] = W[i, from..to) h[r, from..to), lane by lane, added to what is there unless from = 0.
// ahead: null, or two rows of k to come, which are brought near meanwhile.
template <int R, int F>
void dots(const float* w, const float* h, int64_t k, int64_t from, int64_t to, V* out,
          const float* ahead) {
  V acc[R][F];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < F; ++i) acc[r][i] = V{};
  auto add = [&](auto&& get) {
    V x[F];
#pragma GCC unroll 16
    for (int i = 0; i < F; ++i) x[i] = get(w + i * k);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V y = get(h + r * k);
#pragma GCC unroll 16
      for (int i = 0; i < F; ++i) acc[r][i] += x[i] * y;
    }
  };
  int64_t p = from;
  if (ahead)
    for (; p + kLanes <= to; p += kLanes) {
      __builtin_prefetch(ahead + p, 0, 2);
      __builtin_prefetch(ahead + k + p, 0, 2);
      add([p](const float* row) { return load(row + p); });
    }
  else
    for (; p + kLanes <= to; p += kLanes) add([p](const float* row) { return load(row + p); });
  if (p < to) add([p, to](const float* row) { return part(row + p, to - p); });
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < F; ++i) {
      V& o = out[r * kLanes + i];
      o = from ? o + acc[r][i] : acc[r][i];
    }
}

// The same for count <= kDotFeatures rows of W.
template <int R>
void dots_of(const float* w, const float* h, int64_t k, int64_t from, int64_t to, V* out,
             const float* ahead, int64_t count) {
  if (count == kDotFeatures) return dots<R, kDotFeatures>(w, h, k, from, to, out, ahead);
  for (int64_t i = 0; i < count; ++i) dots<R, 1>(w + i * k, h, k, from, to, out + i, nullptr);
}

using Dots = void (*)(const float*, const float*, int64_t, int64_t, int64_t, V*, const float*,
                      int64_t);
#if defined(__AVX512F__)
constexpr Dots kDotsOf[] = {nullptr,    dots_of<1>, dots_of<2>, dots_of<3>,
                            dots_of<4>, dots_of<5>, dots_of<6>};
#else
constexpr Dots kDotsOf[] = {nullptr, dots_of<1>, dots_of<2>};
#endif
constexpr int64_t kDotsRows = sizeof(kDotsOf) / sizeof(Dots) - 1;

// out[r][i], summed over the lanes, is W[i] h[r]: count <= kLanes rows of W, m of h, all of k.
// Where rows are long, a few of W at a time meet all of h while they are near.
void dots_all(const float* w, const float* h, int64_t m, int64_t k, int64_t count, V* out) {
  const int64_t parts = (m + kDotsRows - 1) / kDotsRows;
  const int64_t group = k < kDotDepth || parts == 1 ? kLanes : kDotFeatures;
  for (int64_t g = 0; g < count; g += group)
    for (int64_t from = 0; from < k; from += kDotDepth) {
      const int64_t to = k < from + kDotDepth ? k : from + kDotDepth;
      const int64_t end = g + group < count ? g + group : count;
      if (m == 1 && end - g == kLanes) {
        dots<1, kLanes>(w, h, k, from, to, out, nullptr);
        continue;
      }
      for (int64_t s = 0; s < parts; ++s) {
        const int64_t r0 = m * s / parts, r1 = m * (s + 1) / parts;
        for (int64_t i = g; i < end; i += kDotFeatures) {
          const float* row = w + i * k;
          const bool near = group == kLanes || s < parts - 1;
          const float* ahead = near ? nullptr : to < k ? row + kDotDepth : row + group * k - from;
          kDotsOf[r1 - r0](row, h + r0 * k, k, from, to, out + r0 * kLanes + i, ahead,
                           end - i < kDotFeatures ? end - i : kDotFeatures);
        }
      }
    }
}

// ---------------------------------------------------------------------------------------------
// Many rows: C[i, j] = sum_p A[i, p] B[p, j], A's numbers broadcast, B's and C's rows in vectors.

struct Product {
  const float* a;
  int64_t a_row, a_col;  // strides of A
  const float* b;
  int64_t b_row;
  float* c;
  int64_t c_row;
  int64_t depth;
  const float* bias;  // one number a row of C, or null
  float* pre;         // C before the activation, or null
  int which;
  const float* bias_of_columns = nullptr;  // one number a column of C
};

// acc = A[rows, from..to) B[from..to, columns)
template <int N, int R>
inline void accumulate(const Product& g, const float* a, const float* b, int64_t from, int64_t to,
                       V (&acc)[R][N]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) acc[r][v] = V{};
  a += from * g.a_col;
  b += from * g.b_row;
  for (int64_t p = from; p < to; ++p, a += g.a_col, b += g.b_row) {
    V x[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) x[v] = load(b + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float s = a[r * g.a_row];
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) acc[r][v] += s * x[v];
    }
  }
}

// One tile of C. Sums of kDepth products are added up, which keeps roundings few.
template <int N, int R>
inline void tile(const Product& g, int64_t i) {
  const float* a = g.a + i * g.a_row;
  const float* b = g.b;
  V acc[R][N];
  accumulate<N, R>(g, a, b, 0, g.depth < kDepth ? g.depth : kDepth, acc);
  for (int64_t p = kDepth; p < g.depth; p += kDepth) {
    V more[R][N];
    accumulate<N, R>(g, a, b, p, g.depth < p + kDepth ? g.depth : p + kDepth, more);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < N; ++v) acc[r][v] += more[r][v];
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    float* c = g.c + (i + r) * g.c_row;
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      V z = acc[r][v];
      if (g.bias) z += all(g.bias[i + r]);
      if (g.bias_of_columns) z += load(g.bias_of_columns + v * kLanes);
      if (g.pre) store(g.pre + (i + r) * g.c_row + v * kLanes, z);
      store(c + v * kLanes, g.which == kRelu ? relu_(z) : z);
    }
  }
  if (g.which > kRelu)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < N; ++v) {
        float* c = g.c + (i + r) * g.c_row + v * kLanes;
        store(c, act(g.which, load(c)));
      }
}

// N vectors of columns of C, from column j on. Where B's rows lie far apart, caches would hold few
// of them: their numbers in this panel are laid together first.
template <int N>
void panel(Product g, int64_t rows, int64_t j) {
  constexpr int R = kRowsOf[N];
  g.b += j;
  g.c += j;
  if (g.pre) g.pre += j;
  if (g.bias_of_columns) g.bias_of_columns += j;
  if (g.b_row > 2 * kBlock && rows > R) {
    float* together = panels_of.at_least(g.depth * N * kLanes);
    for (int64_t p = 0; p < g.depth; ++p)
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        const float* from = g.b + p * g.b_row + v * kLanes;
        __builtin_prefetch(from + kPackAhead * g.b_row);
        store(together + (p * N + v) * kLanes, load(from));
      }
    g.b = together;
    g.b_row = N * kLanes;
  }
  int64_t i = 0;
  for (; i + R <= rows; i += R) tile<N, R>(g, i);
  for (; i + 4 <= rows; i += 4) tile<N, 4>(g, i);
  for (; i < rows; ++i) tile<N, 1>(g, i);
}

// All columns of C; `columns` is a multiple of kLanes, as are b_row and c_row from there on.
void product(const Product& g, int64_t rows, int64_t columns) {
  int64_t j = 0;
  while (j < columns) {
    const int64_t left = (columns - j) / kLanes;
    if constexpr (kMaxVectors == 4) {
      if (left >= 4) { panel<kMaxVectors>(g, rows, j); j += 4 * kLanes; continue; }
      if (left == 3) { panel<kMaxVectors - 1>(g, rows, j); j += 3 * kLanes; continue; }
    }
    if (left >= 2) { panel<2>(g, rows, j); j += 2 * kLanes; continue; }
    panel<1>(g, rows, j);
    j += kLanes;
  }
}

// to[c * to_row + r] = from[r * from_row + c], at most kLanes rows and columns. With Pad a row of
// `to` is filled up with zeros to kLanes numbers.
template <bool Pad>
inline void turn(const float* from, int64_t from_row, float* to, int64_t to_row, int64_t rows,
                 int64_t columns) {
  V t[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    const float* row = from + i * from_row;
    t[i] = i >= rows ? V{} : columns >= kLanes ? load(row) : part(row, columns);
  }
  turn_pairs<1>(t);
  turn_pairs<2>(t);
  if constexpr (kLanes >= 8) turn_pairs<4>(t);
  if constexpr (kLanes >= 16) turn_pairs<8>(t);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i >= columns) continue;
    if (Pad || rows >= kLanes) store(to + i * to_row, t[i]);
    else put(to + i * to_row, t[i], rows);
  }
}

// The same for any number of rows and columns.
template <bool Pad>
void transpose(const float* from, int64_t from_row, float* to, int64_t to_row, int64_t rows,
               int64_t columns) {
  for (int64_t r = 0; r < rows; r += kLanes)
    for (int64_t c = 0; c < columns; c += kLanes)
      turn<Pad>(from + r * from_row + c, from_row, to + c * to_row + r, to_row, rows - r,
                columns - c);
}

struct Net {
  int64_t layers;
  const int64_t* widths;  // layers + 1
  const int32_t* acts;
  const float* const* weights;  // (n_{i+1}, n_i), contiguous
  const float* const* biases;   // null entries where there is none
};

int64_t widest(const Net& net) {
  int64_t w = 0;
  for (int64_t i = 0; i <= net.layers; ++i) w = net.widths[i] > w ? net.widths[i] : w;
  return w;
}

// A few rows through all layers, the features of every layer shared out among threads: each weight
// is read by one of them only, once for all rows that its dot products take together.
void forward_rows(const Net& net, const float* x, float* y, float* const* saved, int64_t m,
                  int threads) {
  const int64_t wide = widest(net), last = net.layers - 1;
  float* const space = scratch.at_least(2 * wide * m);
  auto work = [&](int64_t t, int64_t team) {
    const float* h = x;
    V sum[kDotRows * kLanes];  // [row][feature]
    for (int64_t l = 0; l <= last; ++l) {
      const int64_t k = net.widths[l], n = net.widths[l + 1], groups = (n + kLanes - 1) / kLanes;
      const int which = net.acts[l];
      float* keep = saved ? saved[l] : nullptr;
      const bool keep_pre = keep && saves_pre(which);
      float* out = l == last ? y : keep && !keep_pre ? keep : space + (l % 2) * wide * m;
      const float* w = net.weights[l];
      const float* bias = net.biases[l];
      const int64_t end = groups * (t + 1) / team;
      for (int64_t g = groups * t / team; g < end; ++g) {
        const int64_t j = g * kLanes, count = n - j < kLanes ? n - j : kLanes;
        const V b = bias ? get(bias + j, count) : V{};
        if (count < kLanes) std::memset(sum, 0, sizeof(sum));
        dots_all(w + j * k, h, m, k, count, sum);
        for (int64_t r = 0; r < m; ++r) {
          const V v = b + sums(sum + r * kLanes);
          if (keep_pre) put(keep + r * n + j, v, count);
          put(out + r * n + j, act(which, v), count);
        }
      }
      h = out;
      if (l < last && team > 1) {
#pragma omp barrier
      }
    }
  };
  if (threads <= 1) return work(0, 1);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num(), omp_get_num_threads());
#endif
}

// `rows` <= kBlock rows of x through all layers, held transposed: (width, columns).
void forward_block(const Net& net, const float* x, float* y, float* const* saved, int64_t from,
                   int64_t rows) {
  const int64_t columns = padded(rows), wide = widest(net), last = net.layers - 1;
  float* space = scratch.at_least(3 * wide * kBlock);
  float* h = space;
  float* next = space + wide * kBlock;
  float* pre = space + 2 * wide * kBlock;
  const int64_t n0 = net.widths[0];
  transpose<true>(x + from * n0, n0, h, columns, rows, n0);
  for (int64_t l = 0; l <= last; ++l) {
    const int64_t k = net.widths[l], n = net.widths[l + 1];
    const bool keep_pre = saved && saves_pre(net.acts[l]);
    const Product g{net.weights[l], k, 1, h, columns, next, columns, k, net.biases[l],
                    keep_pre ? pre : nullptr, net.acts[l]};
    product(g, n, columns);
    if (l == last) transpose<false>(next, columns, y + from * n, n, n, rows);
    if (saved && (keep_pre || l < last))
      transpose<false>(keep_pre ? pre : next, columns, saved[l] + from * n, n, n, rows);
    float* t = h;
    h = next;
    next = t;
  }
}

// As forward_block, the features of every layer shared out among threads: each weight is read by
// one of them only. One barrier a layer.
void forward_shared(const Net& net, const float* x, float* y, float* const* saved, int64_t from,
                    int64_t rows, int threads) {
  const int64_t columns = padded(rows), wide = widest(net), last = net.layers - 1;
  float* const space = scratch.at_least(3 * wide * kBlock);
  float* const pre = space + 2 * wide * kBlock;
  const int64_t n0 = net.widths[0];
  transpose<true>(x + from * n0, n0, space, columns, rows, n0);
#pragma omp parallel num_threads(threads)
  {
#if defined(_OPENMP)
    const int64_t t = omp_get_thread_num(), team = omp_get_num_threads();
#else
    const int64_t t = 0, team = 1;
#endif
    for (int64_t l = 0; l <= last; ++l) {
      const int64_t k = net.widths[l], n = net.widths[l + 1];
      const int64_t f0 = n * t / team, f1 = n * (t + 1) / team;
      const float* h = space + (l % 2) * wide * kBlock;
      float* next = space + ((l + 1) % 2) * wide * kBlock;
      const bool keep_pre = saved && saves_pre(net.acts[l]);
      const float* bias = net.biases[l] ? net.biases[l] + f0 : nullptr;
      product({net.weights[l] + f0 * k, k, 1, h, columns, next + f0 * columns, columns, k, bias,
               keep_pre ? pre + f0 * columns : nullptr, net.acts[l]},
              f1 - f0, columns);
      if (l == last)
        transpose<false>(next + f0 * columns, columns, y + from * n + f0, n, f1 - f0, rows);
      if (saved && (keep_pre || l < last))
        transpose<false>((keep_pre ? pre : next) + f0 * columns, columns,
                         saved[l] + from * n + f0, n, f1 - f0, rows);
#pragma omp barrier
    }
  }
}

// Whether turning every weight in every thread costs less than turning the rows of x and y. Wider
// layers than kTurned gain nothing by it.
bool many_rows(const Net& net, int64_t m, int threads) {
  int64_t weights = 0;
  for (int64_t l = 0; l <= net.layers; ++l) {
    if (net.widths[l] % kLanes) return false;
    if (l) weights += net.widths[l - 1] * net.widths[l];
  }
  return widest(net) <= kTurned && m >= 8 * kBlock &&
         m * (net.widths[0] + net.widths[net.layers]) >= 2 * weights * threads;
}

// Many rows through narrow layers whose widths are multiples of kLanes: activations stay as they
// lie, weights are transposed, in panels of kBlock features. Rows are shared out; what a thread
// computes is, bit for bit, what forward_block does.
void forward_turned(const Net& net, const float* x, float* y, float* const* saved, int64_t m,
                    int threads) {
  const int64_t wide = widest(net), last = net.layers - 1;
  auto work = [&](int64_t t, int64_t team) {
    int64_t numbers = 0;
    for (int64_t l = 0; l <= last; ++l) numbers += net.widths[l] * net.widths[l + 1];
    float* const turned = weights_of.at_least(numbers);
    float* to = turned;
    for (int64_t l = 0; l <= last; ++l) {
      const int64_t k = net.widths[l], n = net.widths[l + 1];
      for (int64_t j = 0; j < n; j += kBlock) {
        const int64_t size = n - j < kBlock ? n - j : kBlock;
        transpose<true>(net.weights[l] + j * k, k, to, size, size, k);
        to += k * size;
      }
    }
    float* const space = scratch.at_least(2 * wide * kBlock);
    const int64_t blocks = (m + kBlock - 1) / kBlock, end = blocks * (t + 1) / team;
    for (int64_t block = blocks * t / team; block < end; ++block) {
      const int64_t from = block * kBlock, rows = m - from < kBlock ? m - from : kBlock;
      const float* h = x + from * net.widths[0];
      const float* b = turned;
      for (int64_t l = 0; l <= last; ++l) {
        const int64_t k = net.widths[l], n = net.widths[l + 1];
        float* keep = saved ? saved[l] + from * n : nullptr;
        const bool keep_pre = keep && saves_pre(net.acts[l]);
        float* out = l == last            ? y + from * n
                     : keep && !keep_pre ? keep
                                         : space + (l % 2) * wide * kBlock;
        const float* bias = net.biases[l];
        for (int64_t j = 0; j < n; j += kBlock) {
          const int64_t size = n - j < kBlock ? n - j : kBlock;
          product({h, k, 1, b, size, out + j, n, k, nullptr, keep_pre ? keep + j : nullptr,
                   net.acts[l], bias ? bias + j : nullptr},
                  rows, size);
          b += k * size;
        }
        h = out;
      }
    }
  };
  if (threads <= 1) return work(0, 1);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num(), omp_get_num_threads());
#endif
}

double flops_a_row(const Net& net) {
  double f = 0;
  for (int64_t l = 0; l < net.layers; ++l) f += 2.0 * net.widths[l] * net.widths[l + 1];
  return f;
}

int threads_for(const Net& net, int64_t m) {
#if defined(_OPENMP)
  // a few rows take as long as five: the weights must come near
  const double flops = flops_a_row(net) * (m < 5 ? 5 : m);
  const double wanted = flops / (kFlopsAThread + net.layers * kFlopsABarrier);
  if (wanted < 2 || omp_in_parallel()) return 1;
  const int most = omp_get_max_threads();
  return wanted < most ? static_cast<int>(wanted) : most;
#else
  (void)net, (void)m;
  return 1;
#endif
}

// Columns of the product shared out among threads, or rows where columns are few; each number of C
// is one thread's work throughout.
void shared_product(const Product& g, int64_t rows, int64_t columns) {
#if defined(_OPENMP)
  const double wanted = 2.0 * rows * columns * g.depth / kFlopsAThread;
  if (wanted >= 2 && !omp_in_parallel() && omp_get_max_threads() > 1) {
    const int most = omp_get_max_threads();
    const int threads = wanted < most ? static_cast<int>(wanted) : most;
    const int64_t panels = columns / kBlock;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int t = 0; t < threads; ++t) {
      Product part = g;
      if (panels >= threads) {
        const int64_t from = panels * t / threads * kBlock;
        const int64_t to = t + 1 < threads ? panels * (t + 1) / threads * kBlock : columns;
        part.b += from;
        part.c += from;
        product(part, rows, to - from);
      } else {
        const int64_t from = rows * t / threads, to = rows * (t + 1) / threads;
        part.a += from * g.a_row;
        part.c += from * g.c_row;
        product(part, to - from, columns);
      }
    }
    return;
  }
#endif
  product(g, rows, columns);
}

// Rows of n numbers, stride from_row, to rows with stride to_row > n, the rest zero.
void widen(const float* from, int64_t from_row, float* to, int64_t to_row, int64_t rows,
           int64_t n) {
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(to + r * to_row, from + r * from_row, n * 4);
    std::memset(to + r * to_row + n, 0, (to_row - n) * 4);
  }
}

// N vectors of columns of d (m, n; row stride d_row): d *= act'(s), and db = column sums, sixteen
// rows at a time; the last vector's first `count` numbers count.
template <int N>
inline void derive_columns(int which, float* d, int64_t d_row, const float* s, float* db, int64_t m,
                           int64_t n, int64_t count) {
  V total[N] = {};
  for (int64_t r0 = 0; r0 < m; r0 += 16) {
    V sum[N] = {};
    for (int64_t r = r0; r < m && r < r0 + 16; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        float* p = d + r * d_row + v * kLanes;
        V x = load(p);
        if (which != kNone) {
          const int64_t here = v + 1 < N ? kLanes : count;
          x = dact(which, x, get(s + r * n + v * kLanes, here));
          put(p, x, here);
        }
        sum[v] += x;
      }
    for (int v = 0; v < N; ++v) total[v] += sum[v];
  }
  if (db)
    for (int v = 0; v < N; ++v) put(db + v * kLanes, total[v], v + 1 < N ? kLanes : count);
}

// d *= act'(s), and db = column sums.
void derive(int which, float* d, int64_t d_row, const float* s, float* db, int64_t m, int64_t n) {
  int64_t j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes)
    derive_columns<4>(which, d + j, d_row, s + j, db ? db + j : nullptr, m, n, kLanes);
  for (; j < n; j += kLanes)
    derive_columns<1>(which, d + j, d_row, s + j, db ? db + j : nullptr, m, n,
                      n - j < kLanes ? n - j : kLanes);
}

}  // namespace

// x (m, n_0) and y (m, n_L), both contiguous. saved: null, or one (m, n_{i+1}) buffer a layer; the
// last may be y itself where its activation keeps the output.
extern "C" void fastlinear_mlp_forward(int64_t layers, const int64_t* widths, const int32_t* acts,
                                       const float* const* weights, const float* const* biases,
                                       const float* x, float* y, float* const* saved, int64_t m) {
  const Net net{layers, widths, acts, weights, biases};
  const int threads = threads_for(net, m);
  if (m <= kDotRows) return forward_rows(net, x, y, saved, m, threads);
  if (many_rows(net, m, threads)) return forward_turned(net, x, y, saved, m, threads);
  int64_t blocks = (m + kBlock - 1) / kBlock;
  // rows are shared out where there are blocks for all, or few weights for each thread to read
  if (threads > 1 && blocks < threads && (widest(net) > kReadByAll || m < threads * kLanes)) {
    for (int64_t b = 0; b < m; b += kBlock)
      forward_shared(net, x, y, saved, b, m - b < kBlock ? m - b : kBlock, threads);
    return;
  }
  blocks = (blocks + threads - 1) / threads * threads;
  const int64_t size = padded((m + blocks - 1) / blocks);
  auto work = [&](int64_t from) {
    forward_block(net, x, y, saved, from, m - from < size ? m - from : size);
  };
  if (threads <= 1) {
    for (int64_t from = 0; from < m; from += size) work(from);
    return;
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t from = 0; from < m; from += size) work(from);
}

// dy (m, n_L), x (m, n_0), saved as the forward wrote it; dx, and each entry of dws and dbs, may be
// null where not needed. Layers before `first` are not reached.
extern "C" void fastlinear_mlp_backward(int64_t layers, const int64_t* widths, const int32_t* acts,
                                        const float* const* weights, const float* x,
                                        const float* const* saved, const float* dy, float* dx,
                                        float* const* dws, float* const* dbs, int64_t first,
                                        int64_t m) {
  const Net net{layers, widths, acts, weights, nullptr};
  const int64_t wide = padded(widest(net)), mp = padded(m);
  bool narrow = false;  // whether a layer's inputs do not fill their vectors
  for (int64_t l = 0; l < layers; ++l) narrow = narrow || widths[l] % kLanes;
  float* d = scratch.at_least(3 * m * wide + mp * wide + (narrow ? wide * wide : 0));
  float* next = d + m * wide;
  float* input = next + m * wide;   // layer l's input where it must be recomputed or widened
  float* turned = input + m * wide;  // d, transposed
  float* square = turned + mp * wide;  // a weight widened, or its gradient before it is narrowed
  widen(dy, widths[layers], d, wide, m, widths[layers]);
  for (int64_t l = layers - 1; l >= first; --l) {
    const int64_t k = widths[l], n = widths[l + 1], kp = padded(k);
    derive(acts[l], d, wide, saved[l], dbs[l], m, n);
    if (dws[l]) {
      const float* h = l ? saved[l - 1] : x;
      int64_t h_row = k;
      if (l && saves_pre(acts[l - 1])) {
        for (int64_t r = 0; r < m; ++r)
          for (int64_t j = 0; j < k; j += kLanes)
            store(input + r * kp + j,
                  act(acts[l - 1], get(h + r * k + j, k - j < kLanes ? k - j : kLanes)));
        h = input, h_row = kp;
      } else if (k != kp) {
        widen(h, k, input, kp, m, k);
        h = input, h_row = kp;
      }
      float* c = k == kp ? dws[l] : square;
      transpose<true>(d, wide, turned, mp, m, n);
      shared_product({turned, mp, 1, h, h_row, c, kp, m, nullptr, nullptr, kNone}, n, kp);
      if (c == square)
        for (int64_t r = 0; r < n; ++r) std::memcpy(dws[l] + r * k, square + r * kp, k * 4);
    }
    if (l == first && !(l == 0 && dx)) break;
    const float* w = weights[l];
    if (k != kp) {
      widen(w, k, square, kp, n, k);
      w = square;
    }
    shared_product({d, wide, 1, w, kp, next, wide, n, nullptr, nullptr, kNone}, m, kp);
    float* t = d;
    d = next;
    next = t;
  }
  if (dx)
    for (int64_t r = 0; r < m; ++r) std::memcpy(dx + r * widths[0], d + r * wide, widths[0] * 4);
}
