// What one call is made of, as cpp.py writes it, and how its groups' rows become tasks of threads.
#pragma once

#include "../../../../kernels/cpu/threads.h"
#include "../../../../kernels/cpu/vectors.h"
#include "../../../../kernels/cpu/grouped_tiles.h"

#include <algorithm>
#include <atomic>
#include <vector>

namespace {

struct Ragged {
  int64_t rows, groups, k, n;
  int64_t act, half;         // which activation; whether the numbers are bfloat16
  int64_t wide, size_step;   // whether sizes are int64; how far apart they lie
  int64_t x_row, y_row;      // strides of rows; y: of dy in a backward
  int64_t w_group, w_row, w_col;
};

constexpr int64_t kLeastColumns = 64;  // of a task
constexpr double kFixed = 4;           // rows' worth of work that a task takes besides its rows
constexpr double kRowsOfZeros = 16;     // are written while one is multiplied
constexpr double kUneven = 1.1;        // the longest list's share of an even one before tasks are cut

// First rows of the groups, then of what no group owns.
struct Bounds {
  std::vector<int64_t> begin;

  // False for sizes below 0, or more than there are rows.
  bool read(const Ragged& c, const void* sizes) {
    begin.assign(1, 0);
    begin.reserve(c.groups + 1);
    for (int64_t g = 0; g < c.groups; ++g) {
      const int64_t at = g * c.size_step;
      const int64_t size = c.wide ? static_cast<const int64_t*>(sizes)[at]
                                  : static_cast<const int32_t*>(sizes)[at];
      if (size < 0 || size > c.rows - begin.back()) return false;
      begin.push_back(begin.back() + size);
    }
    return true;
  }
  int64_t owned() const { return begin.back(); }
  int64_t size(int64_t g) const { return begin[g + 1] - begin[g]; }
};

// One task: results of a kind, of group g: rows [r0, r1), columns [c0, c1).
struct Task {
  int64_t kind, group, r0, r1, c0, c1;
  double cost;
};
enum Kind : int64_t { kForward, kInput, kWeight, kBoth, kZeros };

// Tasks, each of which one thread has on its list, the longest first. Whoever is done with its own
// helps the others. The same groups in the same sizes are on the same lists forward and backward: the
// second cache of a core still has what it read of their weights.
class Tasks {
 public:
  explicit Tasks(int threads) : lists_(threads) {}

  void add(Kind kind, int64_t group, int64_t r0, int64_t r1, int64_t columns, double cost) {
    all_.push_back({kind, group, r0, r1, 0, columns, cost});
  }

  // Whether threads are about equally long at their lists, which this makes.
  bool even() {
    std::stable_sort(all_.begin(), all_.end(),
                     [](const Task& a, const Task& b) { return a.cost > b.cost; });
    std::vector<double> busy(lists_.size(), 0.0);
    for (auto& list : lists_) list.clear();
    for (size_t i = 0; i < all_.size(); ++i) {
      const auto least = std::min_element(busy.begin(), busy.end());
      *least += all_[i].cost;
      lists_[least - busy.begin()].push_back(i);
    }
    taken_ = std::vector<std::atomic<bool>>(all_.size());
    return *std::max_element(busy.begin(), busy.end()) <= kUneven * total() / double(lists_.size());
  }

  // Cuts long tasks and makes the lists: along the results' columns, if they are wide enough, else
  // along rows, in multiples of these steps; 0 for never.
  void cut(int64_t columns_step, int64_t rows_step) {
    const double most = total() / (4.0 * double(lists_.size()));
    const std::vector<Task> whole = std::move(all_);
    all_.clear();
    for (const auto& t : whole) {
      const auto parts = std::max<int64_t>(1, static_cast<int64_t>(t.cost / most + 0.5));
      const bool wide = columns_step > 0 && (t.c1 - t.c0) / parts >= kLeastColumns;
      const int64_t from = wide ? t.c0 : t.r0, to = wide ? t.c1 : t.r1;
      const int64_t step = t.kind == kZeros ? 0 : wide ? columns_step : rows_step;
      if (parts == 1 || step == 0) {
        all_.push_back(t);
        continue;
      }
      const int64_t size = ((to - from + parts - 1) / parts + step - 1) / step * step;
      for (int64_t at = from; at < to; at += size) {
        Task part = t;
        const int64_t end = std::min(to, at + size);
        part.cost = t.cost * double(end - at) / double(to - from);
        (wide ? part.c0 : part.r0) = at;
        (wide ? part.c1 : part.r1) = end;
        all_.push_back(part);
      }
    }
    even();
  }

  void clear() { all_.clear(); }
  void take_over(const Tasks& other) {
    all_.insert(all_.end(), other.all_.begin(), other.all_.end());
    even();
  }

  // Called by each of the threads; backwards: what was read last comes first.
  template <class Work>
  void run(int thread, bool backwards, Work work) {
    for (size_t l = 0; l < lists_.size(); ++l) {
      const auto& list = lists_[(thread + l) % lists_.size()];
      for (size_t i = 0; i < list.size(); ++i) {
        const size_t task = list[backwards == (l == 0) ? list.size() - 1 - i : i];
        if (!taken_[task].exchange(true, std::memory_order_relaxed)) work(all_[task]);
      }
    }
  }

 private:
  std::vector<Task> all_;
  std::vector<std::vector<size_t>> lists_;
  std::vector<std::atomic<bool>> taken_;

  double total() const {
    double sum = 0;
    for (const auto& t : all_) sum += t.cost;
    return sum;
  }
};

inline int this_thread() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Threads for so many products of all rows.
int threads_for(const Ragged& c, const Bounds& bounds, double products) {
  const double rows = double(bounds.owned());
  int64_t owners = 0;
  for (int64_t g = 0; g < c.groups; ++g) owners += bounds.size(g) > 0;
  const double flops = 2.0 * products * rows * c.k * c.n;
  const double bytes = 4.0 * (double(owners) * c.k * c.n + rows * (c.k + c.n));
  return threads_worth((flops / (c.half ? kHalfRate : 1) + 4 * bytes) / kFlopsAThread);
}

}  // namespace
