// Many rows: C[i, j] = sum_p A[i, p] B[p, j], A's numbers broadcast, B's and C's rows in vectors.

#pragma once

#include "../../../activations/cpp.h"
#include "../../../kernels/cpu/threads.h"
#include "../../../kernels/cpu/vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int kMaxVectors = 4;
constexpr int kRowsOf[kMaxVectors + 1] = {0, 14, 12, 8, 6};  // accumulator rows for 1..4 vectors
#else
constexpr int kMaxVectors = 2;
constexpr int kRowsOf[kMaxVectors + 1] = {0, 8, 6};
#endif
constexpr int kApartRows = 6;  // at most, where rows of A lie so far apart that they share a cache set
constexpr int kBlock = kLanes * kMaxVectors;  // columns of a panel
constexpr int64_t kDepth = 64;      // products summed before they join the total
constexpr int64_t kDeep = 1024;     // of B's rows, a panel this deep stays in the second cache
constexpr int64_t kPackAhead = 24;  // rows between reading one and asking for it

thread_local Scratch panels_of;

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
  bool more = false;  // C holds the sums of the depth before this part of it
  bool open = false;  // and is to hold sums: further parts follow
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
  if (g.more)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < N; ++v) acc[r][v] += load(g.c + (i + r) * g.c_row + v * kLanes);
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
      if (g.open) {
        store(c + v * kLanes, z);
        continue;
      }
      if (g.bias) z += all(g.bias[i + r]);
      if (g.bias_of_columns) z += load(g.bias_of_columns + v * kLanes);
      if (g.pre) store(g.pre + (i + r) * g.c_row + v * kLanes, z);
      store(c + v * kLanes, g.which == kRelu ? relu_(z) : z);
    }
  }
  if (g.which > kRelu && !g.open)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < N; ++v) {
        float* c = g.c + (i + r) * g.c_row + v * kLanes;
        store(c, act(g.which, load(c)));
      }
}

// N vectors of columns of C, from column j on, of a depth whose part of B stays near. Where B's rows
// lie far apart, caches would hold few of them: their numbers in this panel are laid together first.
template <int N>
void near_panel(Product g, int64_t rows, int64_t j) {
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
  if (R > kApartRows && g.a_row % 1024 == 0 && g.a_col == 1)
    for (; i + kApartRows <= rows; i += kApartRows) tile<N, kApartRows>(g, i);
  for (; i + R <= rows; i += R) tile<N, R>(g, i);
  for (; i + 4 <= rows; i += 4) tile<N, 4>(g, i);
  for (; i < rows; ++i) tile<N, 1>(g, i);
}

// N vectors of columns of C, from column j on. The total of a number goes by way of C from one part
// of the depth to the next: the same additions in the same order.
template <int N>
void panel(Product g, int64_t rows, int64_t j) {
  const int64_t depth = g.depth;
  for (int64_t from = 0; from < depth || from == 0; from += kDeep) {
    g.more = from > 0;
    g.open = depth - from > kDeep;
    g.depth = g.open ? kDeep : depth - from;
    near_panel<N>(g, rows, j);
    g.a += kDeep * g.a_col;
    g.b += kDeep * g.b_row;
  }
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

// Columns of the product shared out among threads, or rows where columns are few; each number of C
// is one thread's work throughout.
void shared_product(const Product& g, int64_t rows, int64_t columns) {
  const int threads = threads_worth(2.0 * rows * columns * g.depth / kFlopsAThread);
  if (threads <= 1) return product(g, rows, columns);
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
}

}  // namespace
