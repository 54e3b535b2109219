// What one call is made of, as cpp.py writes it.
#pragma once

#include "threads.h"
#include "grouped_rows.h"

namespace {

struct Call {
  int64_t batch, length, groups, k, n;
  int64_t act, half;          // which activation; whether the numbers are bfloat16
  Strides x, y, saved, dx;    // y: also of the pre-activation forward, of dy backward
  int64_t w_group, w_row, w_col;
};

// A part of a group's backward: tokens of a batch, and outputs. First and last: of its sums.
struct Part {
  int64_t batch, from, rows, n0, n1;
  bool first, last;
};

constexpr int64_t kFewRows = 4;  // for which weights are not laid out anew

inline bool by_dots(const Call& c) {
  return c.length <= kFewRows && c.w_col == 1 && c.x.feature == 1;
}

// Whether x and y lie as features, each with its tokens side by side.
inline bool lies_by_features(const Strides& s) { return s.token == 1 && s.feature != 1; }
inline bool by_features(const Call& c) {
  return !by_dots(c) && lies_by_features(c.x) && lies_by_features(c.y);
}
inline bool backward_by_features(const Call& c, const void* saved) {
  return lies_by_features(c.x) && lies_by_features(c.y) && (!saved || lies_by_features(c.saved));
}

}  // namespace
