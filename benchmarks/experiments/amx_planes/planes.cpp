// float32 products by AMX: each number as a sum of three bfloat16 planes, six of the nine products of
// planes. One thread; rows and columns come in 32s, depths in 512s.

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t kSide = 16, kPairs = 32, kTile = kSide * kPairs;
constexpr int64_t kBlock = 32;               // rows and columns of four tiles of results
constexpr int64_t kPlanes = 3;               // high, middle, low: 8 bits each
constexpr int64_t kStep = 2 * kPlanes * kTile;  // numbers of 32 rows and 32 of the depth
constexpr int64_t kDepth = 512;              // numbers of a strip: 32 rows of it stay in the second cache
constexpr int64_t kRows = 256;               // rows of A that do

struct Tiles {
  Tiles() {
    syscall(SYS_arch_prctl, 0x1023, 18);  // Linux grants tiles when asked
    struct {
      uint8_t palette = 1, start = 0, zeros[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = kSide;
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

template <int Plane>
inline void load_a(const uint16_t* a) {
  _tile_loadd(4, a + 2 * Plane * kTile, 64);
  _tile_loadd(5, a + (2 * Plane + 1) * kTile, 64);
}

template <int Plane>
inline void load_b(const uint16_t* b) {
  _tile_loadd(6, b + 2 * Plane * kTile, 64);
  _tile_loadd(7, b + (2 * Plane + 1) * kTile, 64);
}

inline void zero() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline void multiply() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// 32 x 32 results: all products of planes above 2^-24, neighbours sharing one of the two.
inline void block(const uint16_t* a, const uint16_t* b, int64_t steps, int64_t a_step, int64_t b_step) {
  for (int64_t p = 0; p < steps; ++p, a += a_step, b += b_step) {
    load_a<2>(a), load_b<0>(b), multiply();
    load_a<1>(a), multiply();
    load_b<1>(b), multiply();
    load_a<0>(a), multiply();
    load_b<2>(b), multiply();
    load_b<0>(b), multiply();
  }
}

inline __m256i rounded(__m512 x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }

inline __m512 widened(__m256i h) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

// 16 numbers as three planes, written `apart` numbers from each other.
inline void split(__m512 x, uint16_t* to, int64_t apart) {
  for (int64_t plane = 0; plane < kPlanes; ++plane, to += apart) {
    const __m256i h = rounded(x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), h);
    x = _mm512_sub_ps(x, widened(h));
  }
}

// 16 rows of 16 numbers, turned.
inline void turn(__m512i (&r)[16]) {
  alignas(64) int32_t from[16][16], to[16][16];
  for (int i = 0; i < 16; ++i) _mm512_store_si512(from[i], r[i]);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) to[j][i] = from[i][j];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(to[i]);
}

}  // namespace

// (rows, depth) as planes: 32 rows after the other, of each 32 numbers after the other.
extern "C" void split_rows(const float* x, uint16_t* planes, int64_t rows, int64_t depth) {
  for (int64_t r = 0; r < rows; ++r) {
    uint16_t* to = planes + r / kBlock * (depth / kPairs) * kStep + r % kBlock / kSide * kTile +
                   r % kSide * kPairs;
    for (int64_t k = 0; k < depth; k += kSide)
      split(_mm512_loadu_ps(x + r * depth + k), to + k / kPairs * kStep + k % kPairs, 2 * kTile);
  }
}

// The same of a weight (columns, depth), for the right side: pairs of the depth lie side by side.
extern "C" void split_columns(const float* w, uint16_t* planes, int64_t columns, int64_t depth) {
  split_rows(w, planes, columns, depth);
  for (int64_t tile = 0; tile < columns * depth * kPlanes / kTile; ++tile) {
    auto* at = planes + tile * kTile;
    __m512i rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(at + i * kPairs);
    turn(rows);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(at + i * kPairs, rows[i]);
  }
}

// c (m, n) = A B of planes.
extern "C" void product(const uint16_t* a, const uint16_t* b, float* c, int64_t m, int64_t n, int64_t k) {
  const Tiles tiles;
  const int64_t strip = k / kPairs * kStep;  // of 32 rows or columns
  for (int64_t m0 = 0; m0 < m; m0 += kRows)
    for (int64_t k0 = 0; k0 < k; k0 += kDepth)
      for (int64_t j = 0; j < n; j += kBlock)
        for (int64_t i = m0; i < std::min(m, m0 + kRows); i += kBlock) {
          float *to = c + i * n + j, *low = to + kSide * n;
          if (k0 > 0) {
            _tile_loadd(0, to, 4 * n);
            _tile_loadd(1, to + kSide, 4 * n);
            _tile_loadd(2, low, 4 * n);
            _tile_loadd(3, low + kSide, 4 * n);
          } else {
            zero();
          }
          const int64_t from = k0 / kPairs * kStep;
          block(a + i / kBlock * strip + from, b + j / kBlock * strip + from, kDepth / kPairs, kStep, kStep);
          _tile_stored(0, to, 4 * n);
          _tile_stored(1, to + kSide, 4 * n);
          _tile_stored(2, low, 4 * n);
          _tile_stored(3, low + kSide, 4 * n);
        }
}

// The same numbers of one step again and again, from the first cache: what the tiles can do.
extern "C" void tile_loop(const uint16_t* a, const uint16_t* b, float* c, int64_t steps) {
  const Tiles tiles;
  zero();
  block(a, b, steps, 0, 0);
  _tile_stored(0, c, 64);
}
