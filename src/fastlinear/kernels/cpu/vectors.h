// Vectors of the processor compiled for, kLanes floats each: loads of parts, lanes turned and added.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

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
#elif defined(__AVX__)
inline __m256i first_of(int64_t n) {  // lanes before n
  static const int32_t kOnes[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kOnes + 8 - n));
}
inline V part(const float* p, int64_t n) {
  return reinterpret_cast<V>(_mm256_maskload_ps(p, first_of(n)));
}
inline void put(float* p, V v, int64_t n) {  // masked stores are microcode on some processors
  if (n == kLanes) return store(p, v);
  __m128 rest = _mm256_castps256_ps128(reinterpret_cast<__m256>(v));
  if (n & 4) {
    _mm_storeu_ps(p, rest);
    rest = _mm256_extractf128_ps(reinterpret_cast<__m256>(v), 1);
    p += 4;
  }
  if (n & 2) {
    _mm_storel_pi(reinterpret_cast<__m64*>(p), rest);
    rest = _mm_movehl_ps(rest, rest);
    p += 2;
  }
  if (n & 1) _mm_store_ss(p, rest);
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

inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// ---------------------------------------------------------------------------------------------
// Lanes summed up, and matrices transposed in registers.

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

}  // namespace
