// Blocks of one group in float32: forward, and the backward's three results.
#pragma once

#include "grouped_call.h"
#include "grouped_product.h"

namespace {

constexpr int64_t kChunk = 128;  // tokens whose gradients are in the caches at a time
constexpr int64_t kTokens = 64;  // tokens whose results are in the first cache, where features lie apart
#if defined(__AVX512F__)
constexpr int64_t kWorthAnew = INT64_MAX;
#else
constexpr int64_t kWorthAnew = 128;  // tokens from which a weight is worth a copy
#endif
constexpr int64_t kNear = 3;     // rows at most so many times their length apart are read in place

thread_local Scratch blocks_of;

// Rows so many numbers apart fall on few sets of the first cache, where a panel's then displace each other.
constexpr bool collide(int64_t pitch) { return pitch % 128 == 0; }

// A group's weight as (depth x columns) rows of vectors: in place, or laid out anew.
struct Right {
  static int64_t pitch(int64_t columns) {
    const int64_t dense = padded(columns);
    return dense + (collide(dense) ? 16 : 0);
  }
  static int64_t room(int64_t depth, int64_t columns) { return depth * pitch(columns); }

  Right(const float* w, int64_t row_stride, int64_t col_stride, int64_t depth, int64_t columns,
        float* to, bool anew = false) {
    if (col_stride == 1 && !anew) {
      at = w, row = row_stride;
      return;
    }
    at = to, row = pitch(columns);
    gather(w, row_stride, col_stride, depth, columns, to, row);
  }
  const float* at;
  int64_t row;
};

// Where features lie apart the weight's numbers are read one by one, wherever they are.
inline Right weight_of(const Call& c, const float* w, float* memory) {
  return {w, c.w_col, by_features(c) ? 1 : c.w_row, c.k, c.n, memory};
}
inline Right turned_weight_of(const Call& c, const float* w, float* memory, bool features) {
  const bool anew = !features && collide(c.w_row) && c.length >= kWorthAnew;
  return {w, c.w_row, features ? 1 : c.w_col, c.n, c.k, memory, anew};
}

// As forward_block, where a feature's tokens are dense in x and y: y_g = W_g x_g, as they lie.
void forward_features(const Call& c, const float* x, const float* w, const float* bias, float* y,
                      float* pre, int64_t rows) {
  float* laid = blocks_of.at_least(kTokens * (c.k + c.n));
  float* made = laid + kTokens * c.k;
  for (int64_t r = 0; r < rows; r += kTokens) {
    const int64_t count = std::min(kTokens, rows - r);
    gather(x + r, c.x.feature, 1, c.k, count, laid, kTokens);
    product({w, c.w_row, c.w_col, laid, kTokens, made, kTokens, c.n, c.k, count});
    for (int64_t j = 0; j < c.n; ++j) {
      const V added = bias ? all(bias[j]) : V{};
      float* row = made + j * kTokens;
      for (int64_t t = 0; t < count; t += kLanes) {
        const int64_t n = std::min<int64_t>(kLanes, count - t);
        V z = get(row + t, n) + added;
        if (pre) put(pre + j * c.y.feature + r + t, z, n);
        if (c.act == kRelu) z = pick(z < V{}, V{}, z);
        put(c.act <= kRelu ? y + j * c.y.feature + r + t : row + t, z, n);
      }
    }
    if (c.act <= kRelu) continue;
    activate(c.act, made, kTokens, c.n, count);
    scatter(made, kTokens, c.n, count, y + r, c.y.feature, int64_t{1});
  }
}

// Tokens [from, from + rows) of one batch of group g.
void forward_block(const Call& c, const float* x, const float* w, const float* bias, float* y,
                   float* pre, int64_t g, int64_t b, int64_t from, int64_t rows, const Right& right) {
  const Strides &in = c.x, &out = c.y;
  if (by_features(c)) {
    const int64_t at = g * in.group + b * in.batch + from, to = g * out.group + b * out.batch + from;
    return forward_features(c, x + at, w + g * c.w_group, bias ? bias + g * c.n : nullptr, y + to,
                            pre ? pre + to : nullptr, rows);
  }
  const int64_t np = padded(c.n), kp = padded(c.k);
  float* room = blocks_of.at_least(rows * (np + kp));
  const float* a = x + g * in.group + b * in.batch + from * in.token;
  Product p{a, in.token, 1, nullptr, 0, nullptr, np, rows, c.k, c.n};
  if (in.feature != 1) {
    gather(a, in.token, in.feature, rows, c.k, room, kp);
    p.a = room, p.a_row = kp;
  }
  float* to = (pre ? pre : y) + g * out.group + b * out.batch + from * out.token;
  p.c = out.feature == 1 ? to : room + rows * kp;
  if (out.feature == 1) p.c_row = out.token;
  p.bias = bias ? bias + g * c.n : nullptr;
  p.relu = c.act == kRelu && !pre;
  const float* own = w + g * c.w_group;
  if (by_dots(c)) {
    p.b = own, p.b_row = c.w_row;
    dots(p);
  } else {
    p.b = right.at, p.b_row = right.row;
    product(p);
  }
  if (pre) {
    if (out.feature != 1) scatter(p.c, np, rows, c.n, to, out.token, out.feature);
    float* done = room + rows * kp;
    if (out.feature == 1) gather(p.c, p.c_row, 1, rows, c.n, done, np);
    activate(c.act, done, np, rows, c.n);
    to = y + g * out.group + b * out.batch + from * out.token;
    return scatter(done, np, rows, c.n, to, out.token, out.feature);
  }
  if (!p.relu) activate(c.act, p.c, p.c_row, rows, c.n);
  if (out.feature != 1) scatter(p.c, np, rows, c.n, to, out.token, out.feature);
}

// The sums of one group's backward: of db, in float64, and of whatever dW is made of.
struct Sums {
  double* columns;
  float* dw;  // bfloat16 alone; float32 sums are dW itself
  static int64_t room(const Call&, int64_t width) { return 2 * padded(width); }

  Sums(const Call&, int64_t width, float* memory)
      : columns(reinterpret_cast<double*>(memory)), dw(memory + 2 * padded(width)) {
    std::fill(columns, columns + padded(width), 0.0);
  }
};

// dpre = dy act' of features (rows x tokens), zeros up to whole lines → `laid`, kChunk apart, and the sums of
// its rows. Room for as many float32 numbers twice, for all but none and relu; laid may be its begin.
template <class T>
void grade_features(const Call& c, const T* dy, const T* saved, int64_t rows, int64_t tokens, float* room,
                    T* laid, double* total) {
  constexpr int64_t kLine = 32;
  const bool formed = c.act > kRelu;
  if (formed) {
    float* kept = room + rows * kChunk;
    gather(dy, c.y.feature, 1, rows, tokens, room, kChunk);
    gather(saved, c.saved.feature, 1, rows, tokens, kept, kChunk);
    derive(c.act, room, kChunk, kept, kChunk, rows, tokens);
  }
  const int64_t whole = (tokens + kLine - 1) / kLine * kLine;
  for (int64_t j = 0; j < rows; ++j) {
    V sum{};
    for (int64_t t = 0; t < whole; t += kLanes) {
      const int64_t n = std::clamp<int64_t>(tokens - t, 0, kLanes);
      V d{};
      if (n > 0 && formed) d = get(room + j * kChunk + t, n);
      else if (n > 0) d = widened(dy + j * c.y.feature + t, n);
      if (n > 0 && c.act == kRelu) d = pick(widened(saved + j * c.saved.feature + t, n) <= V{}, V{}, d);
      rounded(laid + j * kChunk + t, d, kLanes);
      sum += d;
    }
    if (!total) continue;
    float lanes[kLanes];
    store(lanes, sum);
    for (int i = 0; i < kLanes; ++i) total[j] += lanes[i];
  }
}

// One chunk of tokens of group g: dx where it is given, and what it adds to dW and db of outputs
// [n0, n1).
void backward_block(const Call& c, const float* dy, const float* saved, const float* x, float* dx,
                    float* dw, float* db, int64_t g, const Part& part, const Right* right,
                    Sums& sums) {
  const int64_t width = part.n1 - part.n0, np = padded(width), kp = padded(c.k), rows = part.rows;
  float* grad = blocks_of.at_least(kChunk * (2 * np + kp));
  float *kept = grad + kChunk * np, *block = kept + kChunk * np;
  const auto place = [&](const Strides& s, int64_t j) {
    return g * s.group + part.batch * s.batch + part.from * s.token + j * s.feature;
  };
  const float* from = dy + place(c.y, part.n0);
  const float* held = saved ? saved + place(c.saved, part.n0) : nullptr;
  const bool features = backward_by_features(c, saved);  // dpre lies as they do
  if (features) {
    grade_features(c, from, held, width, rows, grad, grad, db ? sums.columns : nullptr);
  } else if (c.act <= kRelu && c.y.feature == 1 && (!saved || c.saved.feature == 1)) {
    double* total = db ? sums.columns : nullptr;
    pass_through(from, c.y.token, held, c.saved.token, rows, width, grad, np, total);
  } else {
    gather(from, c.y.token, c.y.feature, rows, width, grad, np);
    int64_t pitch = c.saved.token;
    if (saved && c.saved.feature != 1) {
      gather(held, c.saved.token, c.saved.feature, rows, width, kept, np);
      held = kept, pitch = np;
    }
    if (saved) derive(c.act, grad, np, held, pitch, rows, width);
    if (db) add_columns(grad, np, rows, width, sums.columns);
  }
  if (dx && features) {
    float* to = dx + place(c.dx, 0);
    const bool there = c.dx.token == 1;
    product({right->at, c.w_col, c.w_row, grad, kChunk, there ? to : block,
             there ? c.dx.feature : kChunk, c.k, width, rows});
    if (!there) scatter(block, kChunk, c.k, rows, to, c.dx.feature, c.dx.token);
  } else if (dx) {
    float* to = dx + place(c.dx, 0);
    Product p{grad, np, 1, right->at, right->row, to, c.dx.token, rows, c.n, c.k};
    if (c.dx.feature != 1) p.c = block, p.c_row = kp;
    product(p);
    if (c.dx.feature != 1) scatter(block, kp, rows, c.k, to, c.dx.token, c.dx.feature);
  }
  if (dw) {
    const float* at = x + place(c.x, 0);
    int64_t row = c.x.token;
    if (c.x.feature != 1 || row > kNear * c.k) {
      gather(at, row, c.x.feature, rows, c.k, block, kp);
      at = block, row = kp;
    }
    Product p{grad, features ? kChunk : 1, features ? 1 : np, at, row, dw + (g * c.n + part.n0) * c.k,
              c.k, width, rows, c.k};
    p.add = !part.first;
    product(p);
  }
  if (db && part.last)
    for (int64_t j = 0; j < width; ++j)
      db[g * c.n + part.n0 + j] = static_cast<float>(sums.columns[j]);
}

}  // namespace
