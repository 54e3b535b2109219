// Rows of tokens between the layouts of users and the dense blocks that products read and write,
// and the activations on the way.
#pragma once

#include "../../activations/cpp.h"
#include "vectors.h"

#include <algorithm>

namespace {

using Bf16 = uint16_t;
constexpr int64_t kAhead = 8;  // rows between reading one and asking for it

struct Strides {
  int64_t batch, token, group, feature;
};

// Rows of one group: how far apart tokens and features lie.
template <class T>
struct Rows {
  T* at;
  int64_t row, col;
};

// The numbers are read as float32 and written rounded to the nearest.
inline V widened(const float* p, int64_t n) { return get(p, n); }
inline void rounded(float* p, V v, int64_t n) { put(p, v, n); }
#if defined(__AVX512F__)
inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
inline __m256i halves(const Bf16* p, int64_t n) {  // n numbers, then zeros
  if (n == kLanes) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_maskz_loadu_epi16(first_lanes(n), p);
}
inline V widened(const Bf16* p, int64_t n) {
  return reinterpret_cast<V>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(p, n)), 16));
}
inline __m256i narrowed(V v) {  // ties to even; NaN stays NaN
#if defined(__AVX512BF16__)
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(v)));
#else
  const __m512i bits = reinterpret_cast<__m512i>(v), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512 f = reinterpret_cast<__m512>(v);
  const __mmask16 nan = _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
  const __m512i all = _mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(all, 16));
#endif
}
inline void rounded(Bf16* p, V v, int64_t n) {
  if (n == kLanes) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(v));
  else _mm256_mask_storeu_epi16(p, first_lanes(n), narrowed(v));
}
#endif

// Rows by strides → dense ones, `pitch` apart, as float32.
template <class T>
void gather(const T* from, int64_t row, int64_t col, int64_t rows, int64_t cols, float* to,
            int64_t pitch) {
  if (col == 1) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; c += kLanes) {
        const int64_t n = std::min<int64_t>(kLanes, cols - c);
        __builtin_prefetch(from + (r + kAhead) * row + c);
        put(to + r * pitch + c, widened(from + r * row + c, n), n);
      }
    return;
  }
  if (row != 1) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) rounded(to + r * pitch + c, widened(from + r * row + c * col, 1), 1);
    return;
  }
  for (int64_t r = 0; r < rows; r += kLanes)
    for (int64_t c = 0; c < cols; c += kLanes) {
      const int64_t height = std::min<int64_t>(kLanes, rows - r);
      const int64_t width = std::min<int64_t>(kLanes, cols - c);
      float block[kLanes * kLanes];
      for (int64_t i = 0; i < width; ++i)
        put(block + i * kLanes, widened(from + r + (c + i) * col, height), height);
      turn<false>(block, kLanes, to + r * pitch + c, pitch, width, height);
    }
}

// The way back.
template <class T>
void scatter(const float* from, int64_t pitch, int64_t rows, int64_t cols, T* to, int64_t row,
             int64_t col) {
  if (col == 1) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; c += kLanes) {
        const int64_t n = std::min<int64_t>(kLanes, cols - c);
        rounded(to + r * row + c, get(from + r * pitch + c, n), n);
      }
    return;
  }
  if (row != 1) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) rounded(to + r * row + c * col, get(from + r * pitch + c, 1), 1);
    return;
  }
  // halves of a line one after the other: lines that lie apart by powers of two share few places
  for (int64_t c = 0; c < cols; c += kLanes)
    for (int64_t r = 0; r < rows; r += kLanes) {
      const int64_t height = std::min<int64_t>(kLanes, rows - r);
      const int64_t width = std::min<int64_t>(kLanes, cols - c);
      float block[kLanes * kLanes];
      turn<false>(from + r * pitch + c, pitch, block, kLanes, height, width);
      for (int64_t i = 0; i < width; ++i)
        rounded(to + r + (c + i) * col, get(block + i * kLanes, height), height);
    }
}

// --------------------------------------------------------------------------------------------

template <class A>
void activate_rows(float* p, int64_t pitch, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    float* row = p + r * pitch;
    for (int64_t c = 0; c < cols; ++c) row[c] = A::f(row[c]);
  }
}

template <class A>
void derive_rows(float* p, int64_t pitch, const float* saved, int64_t saved_pitch, int64_t rows,
                 int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    float* __restrict dy = p + r * pitch;
    const float* __restrict from = saved + r * saved_pitch;
    for (int64_t c = 0; c < cols; ++c) dy[c] = derived<A>(dy[c], from[c]);
  }
}

// p = act(p)
void activate(int64_t which, float* p, int64_t pitch, int64_t rows, int64_t cols) {
  if (which == kNone) return;
  with(which, [&](auto a) { activate_rows<decltype(a)>(p, pitch, rows, cols); });
}

// p = p act', from the output or the pre-activation, whichever the activation saves.
void derive(int64_t which, float* p, int64_t pitch, const float* saved, int64_t saved_pitch,
            int64_t rows, int64_t cols) {
  if (which == kNone) return;
  with(which, [&](auto a) {
    derive_rows<decltype(a)>(p, pitch, saved, saved_pitch, rows, cols);
  });
}


// Sums of a few rows join those of all in float64.
inline void join(double* total, V sum) {
  float lanes[kLanes];
  store(lanes, sum);
  for (int i = 0; i < kLanes; ++i) total[i] += lanes[i];
}

constexpr int64_t kSumRows = 16;  // of a column sum in float32 before it goes to float64

// Sums of columns; total has room for whole vectors.
inline void add_columns(const float* p, int64_t pitch, int64_t rows, int64_t columns, double* total) {
  for (int64_t r = 0; r < rows; r += kSumRows) {
    const int64_t stop = std::min(rows, r + kSumRows);
    for (int64_t j = 0; j < columns; j += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, columns - j);
      V sum{};
      for (int64_t i = r; i < stop; ++i) sum += get(p + i * pitch + j, n);
      join(total + j, sum);
    }
  }
}

// to = dy where `saved` is not 0 or less, else 0, and its column sums, in one pass: the derivative of
// relu, or of nothing where saved is null. Rows of dy and saved are dense.
template <class T>
void pass_through(const T* dy, int64_t row, const T* saved, int64_t saved_row, int64_t rows,
                  int64_t columns, T* to, int64_t pitch, double* total) {
  for (int64_t r = 0; r < rows; r += kSumRows) {
    const int64_t stop = std::min(rows, r + kSumRows);
    for (int64_t j = 0; j < columns; j += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, columns - j);
      V sum{};
      for (int64_t i = r; i < stop; ++i) {
        __builtin_prefetch(dy + (i + kSumRows) * row + j);
        V d = widened(dy + i * row + j, n);
        if (saved) {
          __builtin_prefetch(saved + (i + kSumRows) * saved_row + j);
          d = pick(widened(saved + i * saved_row + j, n) <= V{}, V{}, d);
        }
        rounded(to + i * pitch + j, d, n);
        sum += d;
      }
      if (total) join(total + j, sum);
    }
  }
}

}  // namespace
