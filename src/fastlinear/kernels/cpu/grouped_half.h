// Blocks of one group in bfloat16, for processors with products of it: they accumulate in float32.
#pragma once

#include "grouped_single.h"
#include "grouped_tiles.h"

#include <type_traits>

namespace {

// The weight of a group, and the sums of its gradients.
template <class T>
struct RightHalf;
template <class T>
struct SumsHalf;
template <class T>
struct Own {
  using Weight = Right;
  using Total = Sums;
};
template <>
struct Own<Bf16> {
  using Weight = RightHalf<Bf16>;
  using Total = SumsHalf<Bf16>;
};

#if defined(FASTLINEAR_HALF)

inline __m512i pairs(const Bf16* p, int64_t n) {  // n numbers, then zeros
  const __mmask32 lanes = n >= kPairs ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
  return _mm512_maskz_loadu_epi16(lanes, p);
}

inline __m512i couples(const Bf16* a, const Bf16* b, int64_t n) {  // a_i, b_i side by side
  const __m512i low = _mm512_cvtepu16_epi32(halves(a, n));
  if (!b) return low;
  return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(b, n)), 16));
}

inline void turn_square(V* t) {
  turn_pairs<1>(t);
  turn_pairs<2>(t);
  turn_pairs<4>(t);
  turn_pairs<8>(t);
}

// Rows of pairs of B's rows, dense along columns: every row is read once, as it lies in memory.
void pack_rows(const Bf16* b, int64_t row, int64_t depth, int64_t columns, Bf16* to) {
  const int64_t whole = tiles_of(depth, kPairs) * kPairs, below = whole * kSide;
  for (int64_t p = 0; p < whole; p += 2, to += kPairs) {
    const Bf16 *low = b + p * row, *high = p + 1 < depth ? low + row : nullptr;
    Bf16* at = to;
    for (int64_t j = 0; j < columns; j += kSide, at += below)
      _mm512_storeu_si512(at, p < depth ? couples(low + j, high ? high + j : nullptr,
                                                  std::min(kSide, columns - j))
                                        : _mm512_setzero_si512());
  }
}

// B (depth x columns) by strides → tiles of pairs of rows, those of one column tile side by side.
void pack_right(const Bf16* b, int64_t row, int64_t col, int64_t depth, int64_t columns, Bf16* to) {
  if (col == 1 && row != 1) return pack_rows(b, row, depth, columns, to);
  for (int64_t j = 0; j < columns; j += kSide) {
    const int64_t width = std::min(kSide, columns - j);
    for (int64_t p = 0; p < depth; p += kPairs, to += kTile) {
      const int64_t deep = std::min(kPairs, depth - p);
      const Bf16* from = b + p * row + j * col;
      if (row == 1) {
        V t[kSide];
#pragma GCC unroll 16
        for (int64_t n = 0; n < kSide; ++n)
          t[n] = n < width ? reinterpret_cast<V>(pairs(from + n * col, deep)) : V{};
        turn_square(t);
#pragma GCC unroll 16
        for (int64_t i = 0; i < kSide; ++i) store(reinterpret_cast<float*>(to) + i * kSide, t[i]);
        continue;
      }
      for (int64_t i = 0; i < kSide; ++i) {
        alignas(64) Bf16 numbers[kPairs] = {};
        for (int64_t n = 0; n < width; ++n)
          for (int64_t half = 0; half < 2 && 2 * i + half < deep; ++half)
            numbers[2 * n + half] = from[(2 * i + half) * row + n * col];
        _mm512_storeu_si512(to + i * kPairs, _mm512_load_si512(numbers));
      }
    }
  }
}

// Rows of bfloat16 (rows x columns, `pitch` apart, zeros up to whole tiles) → tiles of its transpose.
void pack_turned(const Bf16* a, int64_t pitch, int64_t rows, int64_t columns, Bf16* to) {
  for (int64_t j = 0; j < columns; j += kSide)
    for (int64_t p = 0; p < rows; p += kPairs, to += kTile) {
      V t[kSide];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kSide; ++i) {
        const Bf16* at = a + (p + 2 * i) * pitch + j;
        t[i] = reinterpret_cast<V>(couples(at, at + pitch, kSide));
      }
      turn_square(t);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kSide; ++i) store(reinterpret_cast<float*>(to) + i * kSide, t[i]);
    }
}

// Features (depth x tokens, `pitch` apart) → rows of tokens, `whole` apart, zeros up to whole tiles.
void lay_turned(const Bf16* a, int64_t pitch, int64_t depth, int64_t tokens, Bf16* to, int64_t whole) {
  for (int64_t p = 0; p < whole; p += kPairs)
    for (int64_t j = 0; j < tokens; j += kSide) {
      const int64_t n = std::min(kSide, tokens - j);
      V t[kSide];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kSide; ++i) {
        const int64_t f = p + 2 * i;
        const Bf16* at = a + f * pitch + j;
        t[i] = f < depth ? reinterpret_cast<V>(couples(at, f + 1 < depth ? at + pitch : nullptr, n)) : V{};
      }
      turn_square(t);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kSide; ++i) store(reinterpret_cast<float*>(to + (j + i) * whole + p), t[i]);
    }
}

// A row of `count` numbers and zeros up to `pitch`.
inline void copy_row(const Bf16* from, int64_t count, Bf16* to, int64_t pitch) {
  for (int64_t c = 0; c < pitch; c += kPairs)
    _mm512_storeu_si512(to + c, c < count ? pairs(from + c, count - c) : _mm512_setzero_si512());
}

// --------------------------------------------------------------------------------------------

template <class T>
struct RightHalf {
  static int64_t room(int64_t depth, int64_t columns) {
    return tiles_of(depth, kPairs) * tiles_of(columns, kSide) * kTile / 2;
  }
  RightHalf(const T* w, int64_t row, int64_t col, int64_t depth, int64_t columns, float* to)
      : at(reinterpret_cast<T*>(to)) {
    pack_right(w, row, col, depth, columns, reinterpret_cast<T*>(to));
  }
  explicit RightHalf(const T* laid) : at(laid) {}
  const T* at;
};

// Rows of a matrix by strides, with zeros up to whole tiles.
void lay_rows(const Bf16* a, int64_t row, int64_t col, int64_t rows, int64_t depth, Bf16* to) {
  const int64_t pitch = tiles_of(depth, kPairs) * kPairs, whole = tiles_of(rows, kSide) * kSide;
  if (col != 1 && row == 1) return lay_turned(a, col, depth, rows, to, pitch);
  for (int64_t r = 0; r < whole; ++r, to += pitch) {
    if (r >= rows) std::fill(to, to + pitch, Bf16{0});
    else if (col == 1) copy_row(a + r * row, depth, to, pitch);
    else
      for (int64_t c = 0; c < pitch; ++c) to[c] = c < depth ? a[r * row + c * col] : Bf16{0};
  }
}

// A group's weight in a forward: tiles of its transpose, or where features lie apart its rows.
inline RightHalf<Bf16> weight_of(const Call& c, const Bf16* w, float* memory) {
  if (!by_features(c)) return {w, c.w_col, c.w_row, c.k, c.n, memory};
  lay_rows(w, c.w_row, c.w_col, c.n, c.k, reinterpret_cast<Bf16*>(memory));
  return RightHalf<Bf16>(reinterpret_cast<const Bf16*>(memory));
}

// The same for dx: tiles of the weight, or rows of its transpose.
inline RightHalf<Bf16> turned_weight_of(const Call& c, const Bf16* w, float* memory, bool features) {
  if (!features) return {w, c.w_row, c.w_col, c.n, c.k, memory};
  lay_rows(w, c.w_col, c.w_row, c.k, c.n, reinterpret_cast<Bf16*>(memory));
  return RightHalf<Bf16>(reinterpret_cast<const Bf16*>(memory));
}

template <class T>
struct SumsHalf {
  double* columns;
  float* dw;  // whole tiles
  static int64_t room(const Call& c, int64_t width) {
    return 2 * padded(width) + tiles_of(width, kSide) * tiles_of(c.k, kSide) * kSide * kSide;
  }
  SumsHalf(const Call&, int64_t width, float* memory)
      : columns(reinterpret_cast<double*>(memory)), dw(memory + 2 * padded(width)) {
    std::fill(columns, columns + padded(width), 0.0);
  }
};

// x (rows x k) times few rows of W (n x k), both dense along k: sums of lanes.
void dots(const Bf16* x, int64_t row, int64_t rows, const Bf16* w, int64_t w_row, int64_t k,
          int64_t n, float* to, int64_t pitch) {
  for (int64_t j = 0; j < n; j += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, n - j);
    for (int64_t i = 0; i < rows; ++i) {
      __m512 sum[kLanes];
#pragma GCC unroll 16
      for (int v = 0; v < kLanes; ++v) sum[v] = _mm512_setzero_ps();
      for (int64_t p = 0; p < k; p += kPairs) {
        const auto left = reinterpret_cast<__m512bh>(pairs(x + i * row + p, k - p));
#pragma GCC unroll 16
        for (int v = 0; v < kLanes; ++v) {
          const Bf16* at = w + (j + (v < count ? v : 0)) * w_row + p;
          sum[v] = _mm512_dpbf16_ps(sum[v], left, reinterpret_cast<__m512bh>(pairs(at, k - p)));
        }
      }
      V lanes[kLanes];
#pragma GCC unroll 16
      for (int v = 0; v < kLanes; ++v) lanes[v] = reinterpret_cast<V>(sum[v]);
      put(to + i * pitch + j, sums(lanes), count);
    }
  }
}

// Pre-activations without bias (rows x n, float32) → pre and y where they lie.
void finish(const Call& c, float* p, int64_t pitch, const float* bias, int64_t rows, Bf16* y, Bf16* pre) {
  const bool simple = c.act <= kRelu;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < c.n; j += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, c.n - j);
      float* at = p + r * pitch + j;
      V z = load(at) + load(bias + j);
      if (c.act == kRelu) z = pick(z < V{}, V{}, z);
      if (simple && c.y.feature == 1) rounded(y + r * c.y.token + j, z, n);
      else store(at, z);
    }
  if (simple && c.y.feature == 1) return;
  if (pre) scatter(p, pitch, rows, c.n, pre, c.y.token, c.y.feature);
  if (!simple) activate(c.act, p, pitch, rows, c.n);
  scatter(p, pitch, rows, c.n, y, c.y.token, c.y.feature);
}

// Asks for rows that lie apart, which the processor does not see coming.
template <class T>
inline void ask_for(T* at, const Strides& s, int64_t rows, int64_t columns) {
  constexpr int64_t kLine = 64 / sizeof(T);
  if (s.feature != 1) return;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < columns; j += kLine)
      __builtin_prefetch(at + r * s.token + j, !std::is_const_v<T>);
}

// As forward_block, where a feature's tokens are dense in x and y: y_g = W_g x_g, as they lie.
void forward_features(const Call& c, const Bf16* x, const Bf16* bias, Bf16* y, Bf16* pre, const Bf16* w,
                      int64_t rows) {
  const int64_t depth = tiles_of(c.k, kPairs), high = tiles_of(c.n, kSide);
  float* made = blocks_of.at_least(kTokens * (high * kSide + depth * kPairs / 2) + high * kSide);
  Bf16* laid = reinterpret_cast<Bf16*>(made + kTokens * high * kSide);
  float* added = reinterpret_cast<float*>(laid + kTokens * depth * kPairs);
  for (int64_t j = 0; j < high * kSide; j += kLanes)
    store(added + j, bias && j < c.n ? widened(bias + j, std::min<int64_t>(kLanes, c.n - j)) : V{});
  const Left a{w, kSide * depth * kPairs, kPairs, 2 * depth * kPairs};
  for (int64_t r = 0; r < rows; r += kTokens) {
    const int64_t count = std::min(kTokens, rows - r);
    pack_rows(x + r, c.x.feature, c.k, count, laid);
    if (kWrites && c.act <= kRelu && !pre) {
      tile_product_written(a, laid, c.k,
                           {y + r, c.y.feature, c.n, count, added, true, c.act == kRelu});
      continue;
    }
    tile_product(a, laid, high, tiles_of(count, kSide), c.k, made, kTokens, false);
    for (int64_t j = 0; j < c.n; ++j) {
      const V bias_of_row = all(added[j]);
      float* row = made + j * kTokens;
      for (int64_t t = 0; t < count; t += kLanes) {
        const int64_t n = std::min<int64_t>(kLanes, count - t);
        V z = load(row + t) + bias_of_row;
        if (pre) rounded(pre + j * c.y.feature + r + t, z, n);
        if (c.act == kRelu) z = pick(z < V{}, V{}, z);
        if (c.act <= kRelu) rounded(y + j * c.y.feature + r + t, z, n);
        else store(row + t, z);
      }
    }
    if (c.act <= kRelu) continue;
    activate(c.act, made, kTokens, c.n, count);
    for (int64_t j = 0; j < c.n; ++j)
      for (int64_t t = 0; t < count; t += kLanes)
        rounded(y + j * c.y.feature + r + t, load(made + j * kTokens + t),
                std::min<int64_t>(kLanes, count - t));
  }
}

void forward_block(const Call& c, const Bf16* x, const Bf16* w, const Bf16* bias, Bf16* y, Bf16* pre,
                   int64_t g, int64_t b, int64_t from, int64_t rows, const RightHalf<Bf16>& right) {
  if (by_features(c)) {
    const auto first = [&](const Strides& s) { return g * s.group + b * s.batch + from; };
    const int64_t to = first(c.y);
    return forward_features(c, x + first(c.x), bias ? bias + g * c.n : nullptr, y + to,
                            pre ? pre + to : nullptr, right.at, rows);
  }
  const Strides &in = c.x, &out = c.y;
  const int64_t depth = tiles_of(c.k, kPairs), columns = tiles_of(c.n, kSide);
  const int64_t kp = depth * kPairs, np = columns * kSide;
  float* room = blocks_of.at_least(np + kStrip * (np + kp / 2 + padded(c.k)));
  float *added = room, *made = added + np, *wide = made + kStrip * np;
  Bf16* laid = reinterpret_cast<Bf16*>(wide + kStrip * padded(c.k));
  for (int64_t j = 0; j < np; j += kLanes)
    store(added + j, bias && j < c.n
                         ? widened(bias + g * c.n + j, std::min<int64_t>(kLanes, c.n - j)) : V{});
  const Bf16* own = w + g * c.w_group;
  for (int64_t r = 0; r < rows; r += kStrip) {
    const int64_t count = std::min(kStrip, rows - r), low = tiles_of(count, kSide);
    const auto place = [&](const Strides& s) {
      return g * s.group + b * s.batch + (from + r) * s.token;
    };
    const Bf16* at = x + place(in);
    ask_for(y + place(out), out, count, c.n);
    if (r + kStrip < rows) ask_for(at + kStrip * in.token, in, kStrip, c.k);
    Left a{at, kSide * in.token, kPairs, 2 * in.token};
    if (by_dots(c)) {
      dots(at, in.token, count, own, c.w_row, c.k, c.n, made, np);
    } else {
      if (in.feature != 1 || c.k % kHalfDepth || count % kSide) {
        if (in.feature == 1) {
          for (int64_t i = 0; i < count; ++i) copy_row(at + i * in.token, c.k, laid + i * kp, kp);
        } else if (in.token == 1) {
          lay_turned(at, in.feature, c.k, count, laid, kp);
        } else {
          gather(at, in.token, in.feature, count, c.k, wide, padded(c.k));
          for (int64_t i = 0; i < count; ++i) {
            for (int64_t k = 0; k < kp; k += kLanes)
              rounded(laid + i * kp + k,
                      k < c.k ? get(wide + i * padded(c.k) + k, std::min<int64_t>(kLanes, c.k - k)) : V{},
                      kLanes);
          }
        }
        a = {laid, kSide * kp, kPairs, 2 * kp};
      }
      if (kWrites && c.act <= kRelu && out.feature == 1) {
        tile_product_written(a, right.at, c.k,
                             {y + place(out), out.token, count, c.n, added, false, c.act == kRelu});
        continue;
      }
      tile_product(a, right.at, low, columns, c.k, made, np, false);
    }
    finish(c, made, np, added, count, y + place(out), pre ? pre + place(out) : nullptr);
  }
}

// As backward_block, where features lie apart: dx_g = W_g' dpre_g and dW_g = dpre_g x_g', as they lie.
void backward_features(const Call& c, const Bf16* dy, const Bf16* saved, const Bf16* x, Bf16* dx,
                       Bf16* dw, Bf16* db, const Part& part, const Bf16* turned, SumsHalf<Bf16>& sums) {
  const int64_t width = part.n1 - part.n0, high = tiles_of(width, kSide), rows = part.rows;
  const int64_t columns = tiles_of(c.k, kSide), kp = columns * kSide, nd = tiles_of(width, kPairs) * kPairs;
  float* room = blocks_of.at_least(2 * kChunk * width + kTokens * kp +
                                   (kChunk * high * kSide + kTokens * nd + kChunk * kp) / 2);
  float* strip = room + 2 * kChunk * width;
  Bf16* laid = reinterpret_cast<Bf16*>(strip + kTokens * kp);
  Bf16 *packed = laid + kChunk * high * kSide, *tokens = packed + kTokens * nd;
  grade_features(c, dy, saved, width, rows, room, laid, db ? sums.columns : nullptr);
  for (int64_t r = 0; dx && r < rows; r += kTokens) {
    const int64_t count = std::min(kTokens, rows - r);
    pack_rows(laid + r, kChunk, width, count, packed);
    const Left a{turned, kSide * nd, kPairs, 2 * nd};
    tile_product(a, packed, columns, tiles_of(count, kSide), width, strip, kTokens, false);
    scatter(strip, kTokens, c.k, count, dx + r * c.dx.token, c.dx.feature, c.dx.token);
  }
  if (dw) {
    pack_right(x, 1, c.x.feature, rows, c.k, tokens);
    const Left a{laid, kSide * kChunk, kPairs, 2 * kChunk};
    tile_product(a, tokens, high, columns, rows, sums.dw, kp, !part.first);
    if (part.last) scatter(sums.dw, kp, width, c.k, dw, c.k, int64_t{1});
  }
  for (int64_t j = 0; db && part.last && j < width; ++j)
    rounded(db + j, all(static_cast<float>(sums.columns[j])), 1);
}

void backward_block(const Call& c, const Bf16* dy, const Bf16* saved, const Bf16* x, Bf16* dx,
                    Bf16* dw, Bf16* db, int64_t g, const Part& part, const RightHalf<Bf16>* right,
                    SumsHalf<Bf16>& sums) {
  if (backward_by_features(c, saved)) {
    const auto first = [&](const Strides& s, int64_t j) {
      return g * s.group + part.batch * s.batch + part.from * s.token + j * s.feature;
    };
    const int64_t row = g * c.n + part.n0;
    return backward_features(c, dy + first(c.y, part.n0),
                             saved ? saved + first(c.saved, part.n0) : nullptr, x + first(c.x, 0),
                             dx ? dx + first(c.dx, 0) : nullptr, dw ? dw + row * c.k : nullptr,
                             db ? db + row : nullptr, part, right ? right->at : nullptr, sums);
  }
  const int64_t width = part.n1 - part.n0, np = padded(width);
  const int64_t deep = tiles_of(width, kPairs), nd = deep * kPairs;  // dx's depth
  const int64_t high = tiles_of(width, kSide), columns = tiles_of(c.k, kSide), kp = columns * kSide;
  const int64_t steps = kChunk / kPairs;
  const int64_t rows = part.rows, depth = tiles_of(rows, kPairs), whole = depth * kPairs;
  float* grad = blocks_of.at_least(2 * kChunk * np + kStrip * kp + kChunk * nd / 2 +
                                   (high + columns) * steps * kTile / 2);
  float *kept = grad + kChunk * np, *strip = kept + kChunk * np;
  Bf16* laid = reinterpret_cast<Bf16*>(strip + kStrip * kp);  // dpre, zeros up to whole tiles
  Bf16 *turned = laid + kChunk * nd, *tokens = turned + high * steps * kTile;
  const auto place = [&](const Strides& s, int64_t token, int64_t j) {
    return g * s.group + part.batch * s.batch + (part.from + token) * s.token + j * s.feature;
  };
  const Bf16* from = dy + place(c.y, 0, part.n0);
  const Bf16* held = saved ? saved + place(c.saved, 0, part.n0) : nullptr;
  for (int64_t r = 0; r < whole; ++r)
    std::fill(laid + r * nd + (r < rows ? width : 0), laid + (r + 1) * nd, Bf16{0});
  if (c.act <= kRelu && c.y.feature == 1 && (!saved || c.saved.feature == 1)) {
    double* total = db ? sums.columns : nullptr;
    pass_through(from, c.y.token, held, c.saved.token, rows, width, laid, nd, total);
  } else {
    gather(from, c.y.token, c.y.feature, rows, width, grad, np);
    if (saved) {
      gather(held, c.saved.token, c.saved.feature, rows, width, kept, np);
      derive(c.act, grad, np, kept, np, rows, width);
    }
    if (db) add_columns(grad, np, rows, width, sums.columns);
    scatter(grad, np, rows, width, laid, nd, int64_t{1});
  }
  for (int64_t r = 0; dx && r < rows; r += kStrip) {
    const int64_t count = std::min(kStrip, rows - r);
    const Left a{laid + r * nd, kSide * nd, kPairs, 2 * nd};
    Bf16* to = dx + place(c.dx, r, 0);
    ask_for(to, c.dx, count, c.k);
    if (kWrites && c.dx.feature == 1) {
      tile_product_written(a, right->at, width, {to, c.dx.token, count, c.k, nullptr, false, false});
      continue;
    }
    tile_product(a, right->at, tiles_of(count, kSide), columns, width, strip, kp, false);
    scatter(strip, kp, count, c.k, to, c.dx.token, c.dx.feature);
  }
  if (dw) {
    const Bf16* at = x + place(c.x, 0, 0);
    ask_for(at, c.x, rows, c.k);
    pack_turned(laid, nd, whole, width, turned);
    pack_right(at, c.x.token, c.x.feature, rows, c.k, tokens);
    const Left a{turned, depth * kTile, kTile, 2 * kPairs};
    tile_product(a, tokens, high, columns, rows, sums.dw, kp, !part.first);
    Bf16* to = dw + (g * c.n + part.n0) * c.k;
    if (part.last) scatter(sums.dw, kp, width, c.k, to, c.k, int64_t{1});
  }
  for (int64_t j = 0; db && part.last && j < width; ++j)
    rounded(db + g * c.n + part.n0 + j, all(static_cast<float>(sums.columns[j])), 1);
}

#else

template <class T>
struct RightHalf {
  static int64_t room(int64_t, int64_t) { return 0; }
  RightHalf(const T*, int64_t, int64_t, int64_t, int64_t, float*) {}
};
inline RightHalf<Bf16> weight_of(const Call&, const Bf16*, float*) { return {nullptr, 0, 0, 0, 0, nullptr}; }
inline RightHalf<Bf16> turned_weight_of(const Call&, const Bf16*, float*, bool) {
  return {nullptr, 0, 0, 0, 0, nullptr};
}
template <class T>
struct SumsHalf {
  static int64_t room(const Call&, int64_t) { return 0; }
  SumsHalf(const Call&, int64_t, float*) {}
};
void forward_block(const Call&, const Bf16*, const Bf16*, const Bf16*, Bf16*, Bf16*, int64_t,
                   int64_t, int64_t, int64_t, const RightHalf<Bf16>&) {}
void backward_block(const Call&, const Bf16*, const Bf16*, const Bf16*, Bf16*, Bf16*, Bf16*, int64_t,
                    const Part&, const RightHalf<Bf16>*, SumsHalf<Bf16>&) {}

#endif

}  // namespace
