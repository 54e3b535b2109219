// C = A B + bias or C + A B in float32: A's numbers broadcast, B's and C's rows in vectors.
#pragma once

#include "vectors.h"

#include <algorithm>

namespace {

#if defined(__AVX512F__)
constexpr int kMaxVectors = 4;
constexpr int kRowsOf[kMaxVectors + 1] = {0, 12, 12, 8, 6};  // of C in registers for 1..4 vectors
#else
constexpr int kMaxVectors = 2;
constexpr int kRowsOf[kMaxVectors + 1] = {0, 8, 6};
#endif
constexpr int64_t kDepth = 128;  // products summed before they join the total

struct Product {
  const float* a;
  int64_t a_row, a_col;  // strides of A
  const float* b;
  int64_t b_row;
  float* c;
  int64_t c_row;
  int64_t rows, depth, columns;
  const float* bias = nullptr;   // a number a column of C, or null
  bool add = false;              // to what C holds
  bool relu = false;
};

inline V loaded(const float* p, bool cut, int64_t tail) { return cut ? part(p, tail) : load(p); }

// R rows and N vectors of columns of C, the last of `tail` numbers, or whole where not Cut.
template <int R, int N, bool Cut>
inline void tile(const Product& g, const float* a, const float* b, float* c, const float* bias,
                 int64_t depth, bool add, bool relu, int64_t tail) {
  V sum[R][N];
  // the next rows of A, and C, which lie apart: on their way while this tile is computed; with half as
  // long vectors asking for A takes more of the loads than it gains
  if (kLanes == 16 && g.a_col == 1)
    for (int r = 0; r < R; ++r)
      for (int64_t p = 0; p < depth; p += kLanes)
        __builtin_prefetch(a + (R + r) * g.a_row + p);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      __builtin_prefetch(c + r * g.c_row + v * kLanes, 1);
      sum[r][v] = V{};
    }
  for (int64_t p = 0; p < depth; ++p) {
    V right[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v)
      right[v] = loaded(b + p * g.b_row + v * kLanes, Cut && v == N - 1, tail);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float left = a[r * g.a_row + p * g.a_col];
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) sum[r][v] += left * right[v];
    }
  }
  V added[N] = {};  // last: sums that begin with a bias are rounded as coarsely as it
  if (bias)
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) added[v] = loaded(bias + v * kLanes, Cut && v == N - 1, tail);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      float* to = c + r * g.c_row + v * kLanes;
      const bool cut = Cut && v == N - 1;
      V z = sum[r][v] + added[v];
      if (add) z += loaded(to, cut, tail);
      if (relu) z = pick(z < V{}, V{}, z);
      if (cut) put(to, z, tail);
      else store(to, z);
    }
}

template <int N, bool Cut>
void panel(const Product& g, int64_t j, int64_t from, int64_t depth, int64_t tail) {
  constexpr int R = kRowsOf[N];
  const bool last = from + depth == g.depth, add = g.add || from > 0, relu = g.relu && last;
  const float* bias = g.bias && !from ? g.bias + j : nullptr;
  const float *a = g.a + from * g.a_col, *b = g.b + from * g.b_row + j;
  int64_t i = 0;
#define TILE(ROWS)                                                                              \
  tile<ROWS, N, Cut>(g, a + i * g.a_row, b, g.c + i * g.c_row + j, bias, depth, add, relu, tail)
  for (; i + R <= g.rows; i += R) TILE(R);
  if constexpr (R > 8)
    if (i + 8 <= g.rows) { TILE(8); i += 8; }
  if (i + 4 <= g.rows) { TILE(4); i += 4; }
  if (i + 2 <= g.rows) { TILE(2); i += 2; }
  if (i < g.rows) TILE(1);
#undef TILE
}

void product(const Product& g) {
  const int64_t vectors = (g.columns + kLanes - 1) / kLanes;
  const int64_t panels = (vectors + kMaxVectors - 1) / kMaxVectors;
  for (int64_t from = 0; from == 0 || from < g.depth; from += kDepth) {
    const int64_t depth = std::min(kDepth, g.depth - from);
    for (int64_t p = 0, at = 0; p < panels; ++p) {
      const int64_t width = (vectors - at + panels - p - 1) / (panels - p), j = at * kLanes;
      at += width;
      const int64_t tail = at == vectors ? g.columns - (vectors - 1) * kLanes : kLanes;
#define PANEL(N) tail == kLanes ? panel<N, false>(g, j, from, depth, tail) : panel<N, true>(g, j, from, depth, tail)
      if (width == 1) PANEL(1);
      else if (width == 2) PANEL(2);
#if defined(__AVX512F__)
      else if (width == 3) PANEL(3);
      else PANEL(4);
#endif
#undef PANEL
    }
  }
}

// The same for few rows and B given transposed (columns x depth, rows of it dense): sums of lanes.
void dots(const Product& g) {
  for (int64_t j = 0; j < g.columns; j += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, g.columns - j);
    for (int64_t i = 0; i < g.rows; ++i) {
      const float* a = g.a + i * g.a_row;
      V sum[kLanes];
#pragma GCC unroll 16
      for (int n = 0; n < kLanes; ++n) sum[n] = V{};
      const float* b = g.b + j * g.b_row;
      for (int64_t p = 0; p < g.depth; p += kLanes) {
        const int64_t n = std::min<int64_t>(kLanes, g.depth - p);
        const V left = get(a + p, n);
        if (count == kLanes) {
#pragma GCC unroll 16
          for (int r = 0; r < kLanes; ++r) sum[r] += left * get(b + r * g.b_row + p, n);
        } else {
          for (int64_t r = 0; r < count; ++r) sum[r] += left * get(b + r * g.b_row + p, n);
        }
      }
      V z = sums(sum);
      if (g.bias) z += get(g.bias + j, count);
      if (g.relu) z = pick(z < V{}, V{}, z);
      put(g.c + i * g.c_row + j, z, count);
    }
  }
}

}  // namespace
