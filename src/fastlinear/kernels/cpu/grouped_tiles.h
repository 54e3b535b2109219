// C = A B of bfloat16 numbers into float32, in tiles of 16 rows and 32 numbers: by AMX where the
// processor has it, else by products of pairs in vectors.
#pragma once

#include "grouped_rows.h"

#include <algorithm>
#include <cstring>

#if defined(__AVX512BF16__)
#define FASTLINEAR_HALF
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define FASTLINEAR_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

// What a thread needs while it computes.
template <class T>
struct Tiles {};

#if defined(FASTLINEAR_HALF)

constexpr int64_t kSide = 16;   // rows of a tile, and its float32 numbers a row
constexpr int64_t kPairs = 32;  // bfloat16 numbers of a tile's row
constexpr int64_t kTile = kSide * kPairs;
constexpr int64_t kStrip = 2 * kSide;  // tokens whose results are in the first cache at a time

inline int64_t tiles_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Tiles of A: how far apart those below and beside each other begin, and a tile's rows (in bytes).
struct Left {
  const Bf16* at;
  int64_t below, beside, bytes;
};

// Where results go at once, rounded: so many rows and columns, rows `row` apart. `added` is, in whole
// tiles, a number of each column, or where `by_rows` of each row; null for nothing.
struct Written {
  Bf16* to;
  int64_t row, rows, columns;
  const float* added;
  bool by_rows, relu;
};

#if defined(FASTLINEAR_TILES)

constexpr bool kWrites = false;         // tiles leave through memory
constexpr int64_t kHalfDepth = kPairs;  // numbers of A's rows read at a time: whole tiles
constexpr int kHalfRate = 8;            // of float32 products

// Linux grants a process the use of tiles when it asks.
bool has_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
}

template <>
struct Tiles<Bf16> {
  Tiles() {
    has_tiles();
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

template <bool Two, bool Wide>
inline void four_tiles(const Left& a, const Bf16* b, int64_t depth, float* c, int64_t pitch, bool add) {
  const int64_t bytes = 4 * pitch;
  float* low = c + kSide * pitch;
  if (add) {
    _tile_loadd(0, c, bytes);
    if (Wide) _tile_loadd(1, c + kSide, bytes);
    if (Two) _tile_loadd(2, low, bytes);
    if (Two && Wide) _tile_loadd(3, low + kSide, bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t p = 0; p < depth; ++p) {
    _tile_loadd(4, a.at + p * a.beside, a.bytes);
    _tile_loadd(6, b + p * kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (Wide) {
      _tile_loadd(7, b + (depth + p) * kTile, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (Two) {
      _tile_loadd(5, a.at + a.below + p * a.beside, a.bytes);
      _tile_dpbf16ps(2, 5, 6);
      if (Wide) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, bytes);
  if (Wide) _tile_stored(1, c + kSide, bytes);
  if (Two) _tile_stored(2, low, bytes);
  if (Two && Wide) _tile_stored(3, low + kSide, bytes);
}

// C = A B or C + A B, in whole tiles: so many rows and columns of them, and a depth of so many numbers.
void tile_product(Left a, const Bf16* b, int64_t rows, int64_t columns, int64_t numbers, float* c,
                  int64_t pitch, bool add) {
  const int64_t depth = tiles_of(numbers, kPairs);
  for (int64_t i = 0; i < rows; i += 2, a.at += 2 * a.below, c += 2 * kSide * pitch)
    for (int64_t j = 0; j < columns; j += 2) {
      const Bf16* right = b + j * depth * kTile;
      float* to = c + j * kSide;
      const bool two = i + 1 < rows, wide = j + 1 < columns;
      if (two && wide) four_tiles<true, true>(a, right, depth, to, pitch, add);
      else if (two) four_tiles<true, false>(a, right, depth, to, pitch, add);
      else if (wide) four_tiles<false, true>(a, right, depth, to, pitch, add);
      else four_tiles<false, false>(a, right, depth, to, pitch, add);
    }
}

void tile_product_written(const Left&, const Bf16*, int64_t, const Written&) {}  // not called: kWrites

bool serves_half() { return has_tiles(); }

#else

constexpr bool kWrites = true;
constexpr int64_t kHalfDepth = 2;
constexpr int kHalfRate = 2;
constexpr int kBlockRows = 8, kBlockTiles = 3;  // of C in registers

// sum += rows of A, `row` apart and `beside` from tile to tile, times N column tiles of B.
template <int N>
__attribute__((always_inline)) inline void multiply_block(__m512 (&sum)[kBlockRows][N], const Bf16* a,
                                                          int64_t row, int64_t beside, const Bf16* b,
                                                          int64_t numbers) {
  const int64_t next = tiles_of(numbers, kPairs) * kTile;  // column tile of B
  for (int64_t p = 0; p < numbers; p += kPairs, a += beside, b += kTile) {
    const int64_t deep = std::min(kPairs, numbers - p);
    for (int64_t q = 0; q < deep; q += 2) {
      __m512bh right[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        right[n] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + n * next + q * kSide));
#pragma GCC unroll 8
      for (int r = 0; r < kBlockRows; ++r) {
        int32_t pair;
        std::memcpy(&pair, a + r * row + q, sizeof pair);
        const auto left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[r][n] = _mm512_dpbf16_ps(sum[r][n], left, right[n]);
      }
    }
  }
}

template <int N>
inline void block_product(const Bf16* a, int64_t row, int64_t beside, const Bf16* b, int64_t numbers,
                          float* c, int64_t pitch, bool add) {
  __m512 sum[kBlockRows][N];
#pragma GCC unroll 8
  for (int r = 0; r < kBlockRows; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      sum[r][n] = add ? _mm512_loadu_ps(c + r * pitch + n * kSide) : _mm512_setzero_ps();
  multiply_block<N>(sum, a, row, beside, b, numbers);
#pragma GCC unroll 8
  for (int r = 0; r < kBlockRows; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) _mm512_storeu_ps(c + r * pitch + n * kSide, sum[r][n]);
}

// The same into `w`, from its row i and column tile j on.
template <int N>
inline void block_written(const Bf16* a, int64_t row, int64_t beside, const Bf16* b, int64_t numbers,
                          const Written& w, int64_t i, int64_t j) {
  __m512 sum[kBlockRows][N];
#pragma GCC unroll 8
  for (int r = 0; r < kBlockRows; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      sum[r][n] = !w.added ? _mm512_setzero_ps()
                  : w.by_rows ? _mm512_set1_ps(w.added[i + r])
                              : _mm512_loadu_ps(w.added + (j + n) * kSide);
  multiply_block<N>(sum, a, row, beside, b, numbers);
  const int64_t last = std::min<int64_t>(kBlockRows, w.rows - i);
#pragma GCC unroll 8
  for (int r = 0; r < kBlockRows; ++r) {
    if (r >= last) return;
    Bf16* to = w.to + (i + r) * w.row + j * kSide;
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      __m512 z = sum[r][n];
      if (w.relu) z = _mm512_max_ps(_mm512_setzero_ps(), z);  // the second one where it is NaN
      rounded(to + n * kSide, reinterpret_cast<V>(z), std::min(kSide, w.columns - (j + n) * kSide));
    }
  }
}

// A B + added, written at once.
void tile_product_written(const Left& a, const Bf16* b, int64_t numbers, const Written& w) {
  const int64_t row = a.bytes / 2, next = tiles_of(numbers, kPairs) * kTile;
  const int64_t columns = tiles_of(w.columns, kSide), panels = tiles_of(columns, kBlockTiles);
  for (int64_t i = 0; i < w.rows; i += kBlockRows) {
    const Bf16* from = a.at + i / kSide * a.below + i % kSide * row;
    for (int64_t panel = 0, j = 0; panel < panels; ++panel) {
      const int64_t width = (columns - j + panels - panel - 1) / (panels - panel);
      const Bf16* right = b + j * next;
      if (width == 3) block_written<3>(from, row, a.beside, right, numbers, w, i, j);
      else if (width == 2) block_written<2>(from, row, a.beside, right, numbers, w, i, j);
      else block_written<1>(from, row, a.beside, right, numbers, w, i, j);
      j += width;
    }
  }
}

// C = A B or C + A B, in whole tiles: so many rows and columns of them, and a depth of so many numbers.
void tile_product(Left a, const Bf16* b, int64_t rows, int64_t columns, int64_t numbers, float* c,
                  int64_t pitch, bool add) {
  const int64_t row = a.bytes / 2, next = tiles_of(numbers, kPairs) * kTile;
  const int64_t panels = tiles_of(columns, kBlockTiles);
  for (int64_t panel = 0, j = 0; panel < panels; ++panel) {
    const int64_t width = (columns - j + panels - panel - 1) / (panels - panel);
    for (int64_t i = 0; i < rows * kSide; i += kBlockRows) {
      const Bf16* from = a.at + i / kSide * a.below + i % kSide * row;
      const Bf16* right = b + j * next;
      float* to = c + i * pitch + j * kSide;
      if (width == 3) block_product<3>(from, row, a.beside, right, numbers, to, pitch, add);
      else if (width == 2) block_product<2>(from, row, a.beside, right, numbers, to, pitch, add);
      else block_product<1>(from, row, a.beside, right, numbers, to, pitch, add);
    }
    j += width;
  }
}

bool serves_half() { return true; }

#endif

#else

constexpr int kHalfRate = 1;

bool serves_half() { return false; }

#endif

}  // namespace
