// A net's backward, layer by layer, and its gradients of biases.

#pragma once

#include "mlp_forward.h"

namespace {

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
