// Memory of results: large pages under new ones, and stores that go around the caches.
#pragma once

#include "../../../kernels/cpu/large_pages.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

constexpr size_t kLine = 64;

// Reads fewer bytes than a line as a whole one, the rest zeros.
inline void line_of(void* line, const void* from, size_t bytes) {
#if defined(__AVX512BW__)
  _mm512_storeu_si512(line, _mm512_maskz_loadu_epi8((uint64_t(1) << bytes) - 1, from));
#else
  std::memset(line, 0, kLine);
  std::memcpy(line, from, bytes);
#endif
}

// Writes fewer bytes than a line of it.
inline void part_of(void* to, const void* line, size_t bytes) {
#if defined(__AVX512BW__)
  _mm512_mask_storeu_epi8(to, (uint64_t(1) << bytes) - 1, _mm512_loadu_si512(line));
#else
  std::memcpy(to, line, bytes);
#endif
}

// Copies bytes that are in the caches to memory that is not, without reading it first: whole lines
// around the caches. `written_through()` must follow before another thread reads them.
inline void write_through(void* to, const void* from, size_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
#if defined(__AVX__)
  size_t head = (kLine - reinterpret_cast<uintptr_t>(out) % kLine) % kLine;
  if (head > bytes) head = bytes;
  std::memcpy(out, in, head);
  size_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
#if defined(__AVX512F__)
    const __m512i line = _mm512_loadu_si512(in + i);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), line);
#else
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i + 32), high);
#endif
  }
  std::memcpy(out + i, in + i, bytes - i);
#else
  std::memcpy(out, in, bytes);
#endif
}

inline void written_through() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

}  // namespace
