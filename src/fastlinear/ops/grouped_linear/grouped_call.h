// What one call is made of, as cpp.py writes it.
#pragma once

#include "../common/threads.h"
#include "grouped_rows.h"

namespace {

constexpr int64_t kRelu = 1;  // of the activations' numbers

struct Call {
  int64_t batch, length, groups, k, n;
  int64_t act, half;          // which activation; whether the numbers are bfloat16
  Strides x, y, saved, dx;    // y: also of the pre-activation forward, of dy backward
  int64_t w_group, w_row, w_col;
};

// A part of a group's backward: tokens of batches [b0, b1), and outputs.
struct Part {
  int64_t b0, b1, from, to, n0, n1;
};

}  // namespace
