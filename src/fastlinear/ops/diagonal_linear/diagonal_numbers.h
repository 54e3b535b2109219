// Numbers of 16 bits and float32, each from the other, rounded to the nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

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

#if defined(__FLT16_MAX__) && !defined(FASTLINEAR_HALF_BY_HAND)
using Half = _Float16;
inline float wide(Half x) { return static_cast<float>(x); }
#else
struct Half {
  uint16_t bits;
};
inline float wide(Half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  const uint32_t small = bits_as<uint32_t>(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f);
  const uint32_t normal = (rest << 13) + (rest >= 0x7c00u ? 0x70000000u : 0x38000000u);
  return bits_as<float>(sign | (rest < 0x400u ? small : normal));
}
#endif

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
#if defined(__FLT16_MAX__) && !defined(FASTLINEAR_HALF_BY_HAND)
  return static_cast<Half>(x);
#else
  const uint32_t bits = bits_as<uint32_t>(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  // below 2^-14: the sum's last bit is worth 2^-24, a subnormal's last, and the processor rounds it
  const uint32_t small = bits_as<uint32_t>(bits_as<float>(size) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (size + 0xfffu + (size >> 13 & 1u) - 0x38000000u) >> 13;
  const uint32_t rounded = size < 0x38800000u ? small : normal;
  const uint32_t finite = size >= 0x477ff000u ? 0x7c00u : rounded;  // 65520 rounds to infinity
  return {uint16_t(sign | (size > 0x7f800000u ? 0x7e00u : finite))};
#endif
}

}  // namespace
