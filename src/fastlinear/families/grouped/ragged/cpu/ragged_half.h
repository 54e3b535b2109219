// Tasks in bfloat16, for processors with AMX: grouped_linear's blocks on the rows of a group.
#pragma once

#include "../../../../kernels/cpu/grouped_half.h"
#include "ragged_call.h"

namespace {

constexpr double kFixedHalf = 64;   // as kFixed: a weight is laid out anew for each task
constexpr int64_t kStripHalf = 32;  // a cut falls between so many
constexpr int64_t kFewHalf = 2;     // rows for which a weight is read as it lies

thread_local Scratch weights_of;

// The rows of one group as a call of grouped_linear whose groups lie on top of each other.
Call grouped(const Ragged& c, int64_t rows) {
  const int64_t length = rows <= kFewHalf ? rows : kFewRows + 1;
  return {1, length, c.groups, c.k, c.n, c.act, 1,
          {0, c.x_row, 0, 1}, {0, c.y_row, 0, 1}, {0, c.n, 0, 1}, {0, c.k, 0, 1},
          c.w_group, c.w_row, c.w_col};
}

void forward_task(const Ragged& c, const Task& t, const Bf16* x, const Bf16* w, const Bf16* bias,
                  Bf16* y, Bf16* pre) {
  using Weight = RightHalf<Bf16>;
  const Call call = grouped(c, t.r1 - t.r0);
  const bool lies = by_dots(call);
  float* memory = weights_of.at_least(Weight::room(c.k, c.n));
  const Weight weight(w + t.group * c.w_group, c.w_col, c.w_row, lies ? 0 : c.k, lies ? 0 : c.n, memory);
  forward_block(call, x, w, bias, y, pre, t.group, 0, t.r0, t.r1 - t.r0, weight);
}

// dx of the task's rows, dW and db of its columns, which are outputs; one of them, or both.
void backward_task(const Ragged& c, const Task& t, const Bf16* dy, const Bf16* saved, const Bf16* x,
                   const Bf16* w, Bf16* dx, Bf16* dw, Bf16* db, Bf16*) {
  using Weight = RightHalf<Bf16>;
  using Total = SumsHalf<Bf16>;
  if (t.kind == kInput) dw = db = nullptr;
  if (t.kind == kWeight) dx = nullptr;
  const int64_t width = t.c1 - t.c0, at = t.group * c.n + t.c0;
  if (t.r0 == t.r1) {
    if (dw) std::fill(dw + at * c.k, dw + (at + width) * c.k, Bf16{0});
    if (db) std::fill(db + at, db + at + width, Bf16{0});
    return;
  }
  const Call call = grouped(c, t.r1 - t.r0);
  const int64_t more = Total::room(call, width);
  float* memory = weights_of.at_least(more + (dx ? Weight::room(c.n, c.k) : 0));
  Total total(call, width, memory);
  const Weight weight(w + t.group * c.w_group, c.w_row, c.w_col, dx ? c.n : 0, dx ? c.k : 0,
                      memory + more);
  for (int64_t from = t.r0; from < t.r1; from += kChunk) {
    const int64_t rows = std::min(kChunk, t.r1 - from);
    const Part part{0, from, rows, t.c0, t.c1, from == t.r0, from + rows == t.r1};
    backward_block(call, dy, saved, x, dx, dw, db, t.group, part, &weight, total);
  }
}

// Each task derives what it reads.
void derive_rows(const Ragged&, const Bf16*, const Bf16*, Bf16*, int64_t, int64_t) {}

}  // namespace
