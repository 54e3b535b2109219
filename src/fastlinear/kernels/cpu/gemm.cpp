// C = A B in float32 on the CPU: A and B with any strides of which one is 1, C by rows.
//
// A is laid out once, in panels of up to kMostRows rows whose numbers of one depth lie side by side.
// Threads share C's columns. A thread lays kGroup panels of B's columns together for kDepth of its
// rows, so that memory is read in long stretches, and walks kHeight rows of A's panels past each. Sums
// of kDepth products join C in order: the same additions whatever the number of threads.

#include "threads.h"
#include "vectors.h"

#include <algorithm>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int kMostRows = 14;     // of C in registers, two vectors each
constexpr int64_t kHeight = 768;  // rows of A and C, about, that stay near while B passes
#elif defined(__AVX__)
constexpr int kMostRows = 6;
constexpr int64_t kHeight = 1 << 30;  // all
#else
constexpr int kMostRows = 4;
constexpr int64_t kHeight = 1 << 30;
#endif
constexpr int64_t kColumns = 2 * kLanes;  // of a panel of B
constexpr int64_t kGroup = 8;             // panels of B laid together at a time
constexpr int64_t kDepth = 128;           // products summed before they join C
constexpr int64_t kAhead = 4;             // rows of B between reading one and asking for it

static_assert(kMostRows <= kLanes, "a panel's rows are one vector");

thread_local Scratch left_panels, right_panels;

struct Matrix {
  const float* at;
  int64_t row, col;  // strides
};

// A[i .. i + rows) as [depth][rows].
void lay_left(const Matrix& a, int64_t i, int64_t rows, int64_t depth, float* to) {
  const float* from = a.at + i * a.row;
  if (a.row == 1) {
    for (int64_t p = 0; p < depth; ++p) put(to + p * rows, part(from + p * a.col, rows), rows);
    return;
  }
  for (int64_t p = 0; p < depth; p += kLanes)
    turn<false>(from + p, a.row, to + p * rows, rows, rows, std::min<int64_t>(kLanes, depth - p));
}

// Panels of B's columns j .. j + columns, for its rows from .. from + depth: [panel][depth][kColumns],
// with zeros beside the last column.
void lay_right(const Matrix& b, int64_t from, int64_t depth, int64_t j, int64_t columns, float* to) {
  const int64_t panels = (columns + kColumns - 1) / kColumns;
  if (b.col == 1) {
    for (int64_t p = 0; p < depth; ++p) {
      const float* row = b.at + (from + p) * b.row + j;
      for (int64_t c = 0; c < columns; c += kLanes) __builtin_prefetch(row + kAhead * b.row + c);
      float* here = to + p * kColumns;
      for (int64_t q = 0; q < panels; ++q, here += depth * kColumns)
        for (int64_t v = 0; v < kColumns; v += kLanes) {
          const int64_t left = columns - q * kColumns - v;
          store(here + v, left >= kLanes ? load(row + q * kColumns + v)
                          : left > 0     ? part(row + q * kColumns + v, left)
                                         : V{});
        }
    }
    return;
  }
  for (int64_t q = 0; q < panels; ++q, to += depth * kColumns)
    for (int64_t v = 0; v < kColumns; v += kLanes) {
      const int64_t left = columns - q * kColumns - v;
      const float* column = b.at + from + (j + q * kColumns + v) * b.col;
      for (int64_t p = 0; p < depth; p += kLanes) {
        const int64_t deep = std::min<int64_t>(kLanes, depth - p);
        if (left > 0) {
          turn<true>(column + p, b.col, to + p * kColumns + v, kColumns, left, deep);
        } else {
          for (int64_t i = 0; i < deep; ++i) store(to + (p + i) * kColumns + v, V{});
        }
      }
    }
}

// R rows and a panel of columns of C, or of `columns` where Cut.
template <int R, bool Cut>
void tile(const float* a, const float* b, int64_t depth, float* c, int64_t c_row, bool add,
          int64_t columns) {
  V sum[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    sum[r][0] = sum[r][1] = V{};
    __builtin_prefetch(c + r * c_row, 1);
    __builtin_prefetch(c + r * c_row + kLanes, 1);
  }
  for (int64_t p = 0; p < depth; ++p) {
    const V first = load(b + p * kColumns), second = load(b + p * kColumns + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float left = a[p * R + r];
      sum[r][0] += left * first;
      sum[r][1] += left * second;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    float* to = c + r * c_row;
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v, to += kLanes) {
      const int64_t n = Cut ? std::min<int64_t>(kLanes, columns - v * kLanes) : kLanes;
      if (Cut && n <= 0) continue;
      V z = sum[r][v];
      if (add) z += Cut ? get(to, n) : load(to);
      if (Cut) put(to, z, n);
      else store(to, z);
    }
  }
}

template <bool Cut>
void tile_of(int64_t rows, const float* a, const float* b, int64_t depth, float* c, int64_t c_row,
             bool add, int64_t columns) {
  switch (rows) {
#define ROWS(R) case R: return tile<R, Cut>(a, b, depth, c, c_row, add, columns);
    ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if defined(__AVX__)
    ROWS(5) ROWS(6)
#endif
#if defined(__AVX512F__)
    ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) ROWS(13) ROWS(14)
#endif
#undef ROWS
  }
}

// How C's rows are cut: panels whose heights differ by one at most.
struct Panels {
  int64_t rows, count;

  explicit Panels(int64_t m) : rows(m), count((m + kMostRows - 1) / kMostRows) {}
  int64_t begin(int64_t i) const { return rows * i / count; }
};

}  // namespace

// C (m, n; rows c_row apart) = A (m, k) B (k, n). Of each pair of strides one is 1; none of the sizes
// is 0.
extern "C" void fastlinear_gemm(const float* a, int64_t a_row, int64_t a_col, const float* b,
                                int64_t b_row, int64_t b_col, float* c, int64_t c_row, int64_t m,
                                int64_t n, int64_t k) {
  const Matrix left{a, a_row, a_col}, right{b, b_row, b_col};
  const Panels rows(m);
  const int64_t panels = (n + kColumns - 1) / kColumns;
  const double wanted = 2.0 * m * n * k / kFlopsAThread;
  const int threads = threads_worth(std::min<double>(wanted, panels));
  float* const packed = left_panels.at_least(m * k);
  // A's panels of kDepth at a time, one behind the other: [depth / kDepth][panel][kDepth][rows]
  auto lay = [&](int64_t i) {
    const int64_t begin = rows.begin(i), height = rows.begin(i + 1) - begin;
    for (int64_t p = 0; p < k; p += kDepth) {
      const int64_t deep = std::min(kDepth, k - p);
      const Matrix part{a + p * a_col, a_row, a_col};
      lay_left(part, begin, height, deep, packed + p * m + begin * deep);
    }
  };
  const int64_t stretches = (m + kHeight - 1) / kHeight;
  auto columns_of = [&](int64_t t) {
    const int64_t from = panels * t / threads * kColumns;
    const int64_t stop = std::min(n, panels * (t + 1) / threads * kColumns);
    float* const near = right_panels.at_least(kDepth * kGroup * kColumns);
    for (int64_t j = from; j < stop; j += kGroup * kColumns)
      for (int64_t s = 0; s < stretches; ++s)
        for (int64_t p = 0; p < k; p += kDepth) {
          const int64_t deep = std::min(kDepth, k - p), width = std::min(kGroup * kColumns, stop - j);
          const int64_t first = rows.count * s / stretches, last = rows.count * (s + 1) / stretches;
          lay_right(right, p, deep, j, width, near);
          for (int64_t q = 0; q * kColumns < width; ++q) {
            const float* const other = near + q * deep * kColumns;
            float* const to = c + j + q * kColumns;
            const int64_t wide = std::min(kColumns, width - q * kColumns);
            for (int64_t i = first; i < last; ++i) {
              const int64_t begin = rows.begin(i), height = rows.begin(i + 1) - begin;
              const float* const one = packed + p * m + begin * deep;
              if (wide == kColumns)
                tile_of<false>(height, one, other, deep, to + begin * c_row, c_row, p > 0, wide);
              else
                tile_of<true>(height, one, other, deep, to + begin * c_row, c_row, p > 0, wide);
            }
          }
        }
  };
  for_each(rows.count, threads, lay);
  for_each(threads, threads, columns_of);
}
