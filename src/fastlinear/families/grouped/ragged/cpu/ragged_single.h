// Tasks in float32: products by the BLAS that PyTorch brings, one thread each, with bias, activation
// and its derivative on rows that are in the caches.
#pragma once

#include "../../../../kernels/cpu/grouped_rows.h"
#include "ragged_call.h"

namespace {

using Sgemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*,
                       const float*, const int*, const float*, const int*, const float*, float*,
                       const int*);
Sgemm sgemm = nullptr;  // handed in by cpp.py

thread_local Scratch sums_of;
constexpr int64_t kFew = 16;            // rows up to which a turned matrix is best read as it lies
constexpr int64_t kNearby = 1 << 18;    // numbers of a weight that stay in the second cache
constexpr int64_t kRowsAtOnce = 256;

// A matrix by rows, or one whose transpose lies by rows.
struct Matrix {
  const float* at;
  int64_t row;
  bool turned;
};

// C (rows x columns) = A (rows x depth) B, by rows; A may be turned as well.
void blas(int64_t rows, int64_t columns, int64_t depth, const Matrix& a, const Matrix& b, float* c,
          int64_t c_row) {
  // BLAS counts along columns: there these are C^T = B^T A^T
  const int m = int(columns), n = int(rows), k = int(depth), ldc = int(c_row);
  const auto lead = [](const Matrix& t, int64_t high, int64_t wide) {
    return int(std::max(t.row, t.turned ? high : wide));  // of one row it may be anything
  };
  const int lda = lead(b, depth, columns), ldb = lead(a, rows, depth);
  const float one = 1, zero = 0;
  sgemm(b.turned ? "T" : "N", a.turned ? "T" : "N", &m, &n, &k, &one, b.at, &lda, a.at, &ldb, &zero,
        c, &ldc);
}

#if defined(__AVX512F__)
constexpr bool kWideRegisters = true;
#else
constexpr bool kWideRegisters = false;
#endif

// R rows of A times C rows of a turned B: sums of lanes.
template <int R, int C>
inline void dot_tile(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
                     int64_t c_row, int64_t depth) {
  V sum[kLanes] = {};
  const auto step = [&](int64_t p, int64_t n) {
    V right[C];
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) right[j] = get(b + j * b_row + p, n);
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
      const V left = get(a + i * a_row + p, n);
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) sum[i * C + j] += left * right[j];
    }
  };
  int64_t p = 0;
  for (; p + kLanes <= depth; p += kLanes) step(p, kLanes);
  if (p < depth) step(p, depth - p);
  float found[kLanes];
  store(found, sums(sum));
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) c[i * c_row + j] = found[i * C + j];
}

template <int C>
void dot_columns(int64_t rows, int64_t depth, const Matrix& a, const float* b, int64_t b_row, float* c,
                 int64_t c_row) {
  int64_t i = 0;
#define TILE(R) dot_tile<R, C>(a.at + i * a.row, a.row, b, b_row, c + i * c_row, c_row, depth)
  for (; i + 4 <= rows; i += 4) TILE(4);
  switch (rows - i) {
    case 3: return TILE(3);
    case 2: return TILE(2);
    case 1: return TILE(1);
  }
#undef TILE
}

void multiply(int64_t rows, int64_t columns, int64_t depth, const Matrix& a, const Matrix& b, float* c,
              int64_t c_row) {
  if constexpr (kWideRegisters) {
    if (b.turned && rows > 2 && rows <= kFew) {
      int64_t j = 0;
      for (; j + 4 <= columns; j += 4)
        dot_columns<4>(rows, depth, a, b.at + j * b.row, b.row, c + j, c_row);
      for (; j < columns; ++j)
        dot_columns<1>(rows, depth, a, b.at + j * b.row, b.row, c + j, c_row);
      return;
    }
  }
  blas(rows, columns, depth, a, b, c, c_row);
}

// The part of a group's weight that makes outputs [c0, ...) from all inputs, turned; or the one that
// makes gradients of inputs [c0, ...) from all outputs.
Matrix weight_of(const Ragged& c, const float* w, int64_t group, int64_t c0, bool turned) {
  w += group * c.w_group + c0 * (turned ? c.w_row : c.w_col);
  return c.w_col == 1 ? Matrix{w, c.w_row, turned} : Matrix{w, c.w_col, !turned};
}

void forward_task(const Ragged& c, const Task& t, const float* x, const float* w, const float* bias,
                  float* y, float* pre) {
  const int64_t columns = t.c1 - t.c0;
  const bool plain = !bias && !c.act;
  const int64_t most = plain || c.k * columns > kNearby ? t.r1 - t.r0 : kRowsAtOnce;
  const Matrix right = weight_of(c, w, t.group, t.c0, true);
  for (int64_t from = t.r0; from < t.r1; from += most) {
    const int64_t rows = std::min(most, t.r1 - from);
    float* into = (pre ? pre : y) + from * c.n + t.c0;
    multiply(rows, columns, c.k, {x + from * c.x_row, c.x_row, false}, right, into, c.n);
    if (plain) continue;
    for (int64_t r = 0; r < rows; ++r, into += c.n) {
      const float* added = bias ? bias + t.group * c.n + t.c0 : nullptr;
      for (int64_t j = 0; added && j < columns; ++j) into[j] += added[j];
      float* out = y + (from + r) * c.n + t.c0;
      if (pre) std::copy(into, into + columns, out);
      activate(c.act, out, c.n, 1, columns);
    }
  }
}

// dpre of rows [from, to).
void derive_rows(const Ragged& c, const float* dy, const float* saved, float* dpre, int64_t from,
                 int64_t to) {
  for (int64_t r = from; r < to; ++r) {
    float* out = dpre + r * c.n;
    std::copy(dy + r * c.y_row, dy + r * c.y_row + c.n, out);
    derive(c.act, out, c.n, saved + r * c.n, c.n, 1, c.n);
  }
}

void input_task(const Ragged& c, const Task& t, const Matrix& dpre, const float* w, float* dx) {
  multiply(t.r1 - t.r0, t.c1 - t.c0, c.n, {dpre.at + t.r0 * dpre.row, dpre.row, false},
           weight_of(c, w, t.group, t.c0, false), dx + t.r0 * c.k + t.c0, c.k);
}

// dW and db of outputs [c0, c1); zeros where the group has no rows.
void weight_task(const Ragged& c, const Task& t, const Matrix& dpre, const float* x, float* dw,
                 float* db) {
  const int64_t rows = t.r1 - t.r0, width = t.c1 - t.c0, at = t.group * c.n + t.c0;
  const float* from = dpre.at + t.r0 * dpre.row + t.c0;
  if (dw && rows)
    blas(width, c.k, rows, {from, dpre.row, true}, {x + t.r0 * c.x_row, c.x_row, false},
         dw + at * c.k, c.k);
  else if (dw)
    std::fill(dw + at * c.k, dw + (at + width) * c.k, 0.0f);
  if (!db) return;
  auto* total = reinterpret_cast<double*>(sums_of.at_least(2 * padded(width)));
  std::fill(total, total + padded(width), 0.0);
  add_columns(from, dpre.row, rows, width, total);
  for (int64_t j = 0; j < width; ++j) db[at + j] = static_cast<float>(total[j]);
}

// room: for dpre, which is there where the task is a part of a group's.
void backward_task(const Ragged& c, const Task& t, const float* dy, const float* saved, const float* x,
                   const float* w, float* dx, float* dw, float* db, float* room) {
  const Matrix dpre = saved ? Matrix{room, c.n, false} : Matrix{dy, c.y_row, false};
  if (saved && t.kind == kBoth) derive_rows(c, dy, saved, room, t.r0, t.r1);
  if (dx && t.kind != kWeight && t.r0 < t.r1) {
    Task own = t;
    if (t.kind == kBoth) own.c1 = c.k;
    input_task(c, own, dpre, w, dx);
  }
  if ((dw || db) && t.kind != kInput) weight_task(c, t, dpre, x, dw, db);
}

}  // namespace
