// A few rows: dot products along the weight's rows.

#pragma once

#include "../../../kernels/cpu/vectors.h"

namespace {

constexpr int kDotFeatures = 4;      // rows of W that meet some of h at a time
constexpr int64_t kDotDepth = 1024;  // products along a row before they join the total
constexpr int64_t kDotAhead = 128;   // numbers of a long row between reading one and asking for it

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
  else if (F <= kDotFeatures && k >= kDotDepth)
    for (; p + kLanes <= to; p += kLanes) {
#pragma GCC unroll 4
      for (int i = 0; i < F; ++i) __builtin_prefetch(w + i * k + p + kDotAhead);
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

}  // namespace
