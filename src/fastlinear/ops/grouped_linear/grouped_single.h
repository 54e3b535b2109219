// Blocks of one group in float32: forward, and the backward's three results.
#pragma once

#include "grouped_call.h"
#include "grouped_product.h"

namespace {

constexpr int64_t kChunk = 128;  // tokens whose gradients are in the caches at a time
constexpr int64_t kNear = 3;     // rows at most so many times their length apart are read in place

thread_local Scratch blocks_of;

// A group's weight as (depth x columns) rows of vectors: in place, or laid out anew.
struct Right {
  static int64_t room(int64_t depth, int64_t columns) { return depth * padded(columns); }

  Right(const float* w, int64_t row_stride, int64_t col_stride, int64_t depth, int64_t columns,
        float* to) {
    if (col_stride == 1) {
      at = w, row = row_stride;
      return;
    }
    at = to, row = padded(columns);
    gather(w, row_stride, col_stride, depth, columns, to, row);
  }
  const float* at;
  int64_t row;
};

inline Right weight_of(const Call& c, const float* w, float* memory) {
  return {w, c.w_col, c.w_row, c.k, c.n, memory};
}
inline Right turned_weight_of(const Call& c, const float* w, float* memory, bool) {
  return {w, c.w_row, c.w_col, c.n, c.k, memory};
}

// Tokens [from, from + rows) of one batch of group g.
void forward_block(const Call& c, const float* x, const float* w, const float* bias, float* y,
                   float* pre, int64_t g, int64_t b, int64_t from, int64_t rows, const Right& right) {
  const Strides &in = c.x, &out = c.y;
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
  p.start = bias ? bias + g * c.n : nullptr;
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
  if (c.act <= kRelu && c.y.feature == 1 && (!saved || c.saved.feature == 1)) {
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
  if (dx) {
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
    Product p{grad, 1, np, at, row, dw + (g * c.n + part.n0) * c.k, c.k, width, rows, c.k};
    p.add = !part.first;
    product(p);
  }
  if (db && part.last)
    for (int64_t j = 0; j < width; ++j)
      db[g * c.n + part.n0 + j] = static_cast<float>(sums.columns[j]);
}

}  // namespace
