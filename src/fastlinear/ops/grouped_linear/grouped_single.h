// Blocks of one group in float32: forward, and the backward's three results.
#pragma once

#include "grouped_call.h"
#include "grouped_product.h"

namespace {

constexpr int64_t kChunk = 128;  // tokens whose gradients are in the caches at a time
constexpr int64_t kSumRows = 16; // of a column sum in float32 before it goes to float64
constexpr int64_t kNear = 3;     // rows that lie at most so many times their length apart are read in place

thread_local Scratch weights_of, blocks_of;

// The weight of a group as (depth x columns) rows of vectors: in place, or laid out anew.
struct Right {
  const float* at = nullptr;
  int64_t row = 0, group = -1;

  void find(const float* w, int64_t row_stride, int64_t col_stride, int64_t depth, int64_t columns,
            int64_t g) {
    if (group == g) return;
    group = g;
    if (col_stride == 1) {
      at = w, row = row_stride;
      return;
    }
    row = padded(columns);
    float* to = weights_of.at_least(depth * row);
    gather(w, row_stride, col_stride, depth, columns, to, row);
    at = to;
  }
};

// Tokens [from, from + rows) of one batch of group g.
void forward_block(const Call& c, const float* x, const float* w, const float* bias, float* y,
                   float* pre, int64_t g, int64_t b, int64_t from, int64_t rows, Right& right) {
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
  if (c.length <= kFewRows && c.w_col == 1) {
    p.b = own, p.b_row = c.w_row;
    dots(p);
  } else {
    right.find(own, c.w_col, c.w_row, c.k, c.n, g);
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

// Sums of columns, kSumRows numbers in float32 and then in float64.
inline void add_columns(const float* p, int64_t pitch, int64_t rows, int64_t columns, double* sums) {
  for (int64_t r = 0; r < rows; r += kSumRows) {
    const int64_t stop = std::min(rows, r + kSumRows);
    for (int64_t j = 0; j < columns; j += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, columns - j);
      V sum{};
      for (int64_t i = r; i < stop; ++i) sum += get(p + i * pitch + j, n);
      for (int64_t i = 0; i < n; ++i) sums[j + i] += sum[i];
    }
  }
}

// Of group g: dx of tokens [from, to) of batch b where it is given, or dW and db of outputs [n0, n1)
// over all tokens, or both of all.
void backward_block(const Call& c, const float* dy, const float* saved, const float* x,
                    const float* w, float* dx, float* dw, float* db, int64_t g, const Part& part,
                    Right& right) {
  const int64_t width = part.n1 - part.n0, np = padded(width), kp = padded(c.k);
  const int64_t sums = (db ? 2 * np : 0);
  float* room = blocks_of.at_least(sums + kChunk * (2 * np + 2 * kp));
  double* total = reinterpret_cast<double*>(room);
  float *grad = room + sums, *kept = grad + kChunk * np, *in = kept + kChunk * np,
        *out = in + kChunk * kp;
  if (db) std::fill(total, total + np, 0.0);
  if (dx) right.find(w + g * c.w_group, c.w_row, c.w_col, c.n, c.k, g);
  bool first = true;
  for (int64_t b = part.b0; b < part.b1; ++b)
    for (int64_t from = part.from; from < part.to; from += kChunk) {
      const int64_t rows = std::min(kChunk, part.to - from);
      const auto place = [&](const Strides& s, int64_t j) {
        return g * s.group + b * s.batch + from * s.token + j * s.feature;
      };
      gather(dy + place(c.y, part.n0), c.y.token, c.y.feature, rows, width, grad, np);
      if (saved) {
        const float* at = saved + place(c.saved, part.n0);
        int64_t pitch = c.saved.token;
        if (c.saved.feature != 1) {
          gather(at, c.saved.token, c.saved.feature, rows, width, kept, np);
          at = kept, pitch = np;
        }
        derive(c.act, grad, np, at, pitch, rows, width);
      }
      if (db) add_columns(grad, np, rows, width, total);
      if (dx) {
        float* to = dx + place(c.dx, 0);
        Product p{grad, np, 1, right.at, right.row, to, c.dx.token, rows, c.n, c.k};
        if (c.dx.feature != 1) p.c = out, p.c_row = kp;
        product(p);
        if (c.dx.feature != 1) scatter(out, kp, rows, c.k, to, c.dx.token, c.dx.feature);
      }
      if (dw) {
        const float* at = x + place(c.x, 0);
        int64_t row = c.x.token;
        if (c.x.feature != 1 || row > kNear * c.k) {
          gather(at, row, c.x.feature, rows, c.k, in, kp);
          at = in, row = kp;
        }
        float* to = dw + (g * c.n + part.n0) * c.k;
        Product p{grad, 1, np, at, row, to, c.k, width, rows, c.k};
        p.add = !first;
        product(p);
      }
      first = false;
    }
  if (db)
    for (int64_t j = 0; j < width; ++j) db[g * c.n + part.n0 + j] = static_cast<float>(total[j]);
}

}  // namespace
