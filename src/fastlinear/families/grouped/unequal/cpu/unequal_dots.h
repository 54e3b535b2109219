// Forward blocks of few tokens in float32: sums along the depth, so that the weight is read where it
// lies. A weight that serves few tokens is not worth laying out anew.
#pragma once

#include "../../../../kernels/cpu/grouped_call.h"

namespace {

constexpr int64_t kMostTokens = 32, kDepthAToken = 8;  // where it pays
constexpr int64_t kNearNumbers = 8192;                 // numbers of tokens in the first cache

inline bool by_sums(const Call& c) {
  return c.length <= kMostTokens && c.length * kDepthAToken <= c.k;
}

// R tokens times kLanes / R outputs, of which `count` are there.
template <int R>
inline void sum_tile(const Call& c, const float* x, const float* w, const float* bias, float* to,
                     int64_t count) {
  constexpr int C = kLanes / R;
  V sum[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) sum[i] = V{};
  const float *left[R], *right[C];
  for (int r = 0; r < R; ++r) left[r] = x + r * c.x.token;
  for (int j = 0; j < C; ++j) right[j] = w + (j < count ? j : 0) * c.w_row;
  const auto step = [&](int64_t p, auto read) __attribute__((always_inline)) {
    V a[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) a[r] = read(left[r] + p);
#pragma GCC unroll 16
    for (int j = 0; j < C; ++j) {
      const V b = read(right[j] + p);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r * C + j] += a[r] * b;
    }
  };
  int64_t p = 0;
  for (; p + kLanes <= c.k; p += kLanes) step(p, [](const float* from) { return load(from); });
  if (p < c.k) step(p, [n = c.k - p](const float* from) { return part(from, n); });
  float found[kLanes];
  store(found, sums(sum));
  const auto finish = [&](int64_t n) {
    for (int r = 0; r < R; ++r)
      for (int64_t j = 0; j < n; ++j)
        to[r * c.y.token + j] = found[r * C + j] + (bias ? bias[j] : 0.0f);
  };
  if (count == C) finish(C);
  else finish(count);
}

template <int R>
inline void sum_rows(const Call& c, const float* x, const float* w, const float* bias, float* to,
                     int64_t width) {
  constexpr int C = kLanes / R;
  for (int64_t j = 0; j < width; j += C)
    sum_tile<R>(c, x, w + j * c.w_row, bias ? bias + j : nullptr, to + j, std::min<int64_t>(C, width - j));
}

// y = x W^T + bias of tokens whose features lie side by side.
void sum_block(const Call& c, const float* x, const float* w, const float* bias, float* to,
               int64_t rows) {
  constexpr int64_t kAtOnce = 4;  // outputs of a tile of four tokens
  const int64_t near = std::clamp<int64_t>(kNearNumbers / c.k / 4 * 4, 4, 16);
  for (int64_t from = 0; from < rows; from += near) {
    const int64_t until = std::min(rows, from + near);
    const int64_t fours = from + (until - from) / 4 * 4;
    for (int64_t j = 0; fours > from && j < c.n; j += kAtOnce) {
      const int64_t width = std::min(kAtOnce, c.n - j);
      for (int64_t r = from; r < fours; r += 4)
        sum_rows<4>(c, x + r * c.x.token, w + j * c.w_row, bias ? bias + j : nullptr,
                    to + r * c.y.token + j, width);
    }
    int64_t r = fours;
    if (r + 2 <= until) {
      sum_rows<2>(c, x + r * c.x.token, w, bias, to + r * c.y.token, c.n);
      r += 2;
    }
    if (r < until) sum_rows<1>(c, x + r * c.x.token, w, bias, to + r * c.y.token, c.n);
  }
}

}  // namespace
