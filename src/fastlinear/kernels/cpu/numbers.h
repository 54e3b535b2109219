// Numbers of 16 bits and float32, each from the other, rounded to the nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

struct Bf16 {
  uint16_t bits;
};

// float16 one by one is integer arithmetic, which becomes vector code; GCC 12 makes none of _Float16.
struct Half {
  uint16_t bits;
};

// Bit by bit: where the condition holds the first, else the second. A branch would stay one.
inline uint32_t chosen(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

inline float wide(Half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  const uint32_t small = bits_as<uint32_t>(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f);
  const uint32_t normal = (rest << 13) + chosen(rest >= 0x7c00u, 0x70000000u, 0x38000000u);
  return bits_as<float>(sign | chosen(rest < 0x400u, small, normal));
}

inline float wide(float x) { return x; }
inline float wide(Bf16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }

template <class T>
inline T narrow(float x);
template <>
inline float narrow<float>(float x) { return x; }
template <>
inline Bf16 narrow<Bf16>(float x) {  // NaN stays NaN
  const uint32_t bits = bits_as<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {uint16_t(x != x ? 0x7fc0u : rounded)};
}
template <>
inline Half narrow<Half>(float x) {
  const uint32_t bits = bits_as<uint32_t>(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  // below 2^-14: the sum's last bit is worth 2^-24, a subnormal's last, and the processor rounds it
  const uint32_t small = bits_as<uint32_t>(bits_as<float>(size) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (size + 0xfffu + (size >> 13 & 1u) - 0x38000000u) >> 13;
  const uint32_t rounded = chosen(size < 0x38800000u, small, normal);
  const uint32_t finite = chosen(size >= 0x477ff000u, 0x7c00u, rounded);  // from 65520 on
  return {uint16_t(sign | chosen(size > 0x7f800000u, 0x7e00u, finite))};
}

inline void widen(const Bf16* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = wide(from[i]);
}

inline void narrow_all(const float* from, Bf16* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = narrow<Bf16>(from[i]);
}

// n numbers of float16, by the processor's own conversions where it has them.
inline void widen(const Half* from, float* to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(some));
  }
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(some));
  }
#endif
  for (; i < n; ++i) to[i] = wide(from[i]);
}

inline void narrow_all(const float* from, Half* to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    const __m256i some = _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), some);
  }
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m128i some = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), some);
  }
#endif
  for (; i < n; ++i) to[i] = narrow<Half>(from[i]);
}

}  // namespace
