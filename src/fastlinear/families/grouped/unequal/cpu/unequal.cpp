// Linear layers of unequal sizes on the CPU, one call forward and one backward.
//
//   fastlinear_unequal_forward    y_g = act(x_g W_g^T + b_g), and the pre-activations where asked for
//   fastlinear_unequal_backward   dx, dW and db of every group that wants them
//
// All matrices are dense but x and dy, whose rows are. A task is a group, or a part of a large one; its blocks are those of
// grouped_linear. Sums run in float32 in an order that depends on the sizes alone, so that results do
// not depend on the number of threads.

#include "../../../../kernels/cpu/grouped_half.h"
#include "../../../../kernels/cpu/grouped_single.h"
#include "unequal_dots.h"

#include <vector>

namespace {

thread_local Scratch weights_of;

constexpr int64_t kBlock = 256;         // tokens of a forward at a time
constexpr int64_t kNarrow = 64;         // outputs of a part at least
constexpr int64_t kTasksAThread = 8;    // so that one that is held up leaves work to the others
constexpr double kLeastWork = 1 << 19;  // products of a part at least

// As cpu.py writes them. Where a result begins in its buffer, in numbers; -1 for none.
struct Group {
  int64_t m, n, k;
  int64_t x_pitch, dy_pitch;  // from a row to the next
  int64_t y, dx, dw, db;  // y: of the pre-activations too
};

struct Groups {
  int64_t count, act, half;
  Group at[];
};

struct Task {
  const Group* group;
  int64_t which;          // of the pointers
  int64_t from, to;       // tokens
  int64_t n0, n1;         // outputs
  bool dx, dw;            // which results of a backward
};

double work_of(const Group& g) { return double(g.m) * g.n * g.k; }

int threads_for(const Groups& all, double products) {
  double flops = 0, bytes = 0;
  for (int64_t i = 0; i < all.count; ++i) {
    const Group& g = all.at[i];
    flops += 2 * products * work_of(g);
    bytes += 4.0 * (double(g.k) * g.n + double(g.m) * (g.k + g.n));
  }
  return threads_worth((flops / (all.half ? kHalfRate : 1) + 4 * bytes) / kFlopsAThread);
}

// Products of a task at most.
double share_of(const Groups& all, int threads) {
  double total = 0;
  for (int64_t i = 0; i < all.count; ++i) total += work_of(all.at[i]);
  return threads == 1 ? total + 1 : std::max(kLeastWork, total / (kTasksAThread * threads));
}

// y_pitch: of y forward, of dy backward.
Call call_of(const Groups& all, const Group& g, int64_t outputs, int64_t y_pitch) {
  const Strides x{0, g.x_pitch, 0, 1}, y{0, y_pitch, 0, 1}, saved{0, g.n, 0, 1}, dx{0, g.k, 0, 1};
  return {1, g.m, 1, g.k, outputs, all.act, all.half, x, y, saved, dx, 0, g.k, 1};
}

// [0, size) in `parts` ranges, of multiples of `unit` but for the last.
template <class Add>
void split(int64_t size, int64_t parts, int64_t unit, Add add) {
  const int64_t units = (size + unit - 1) / unit;
  parts = std::clamp<int64_t>(parts, 1, std::max<int64_t>(1, units));
  for (int64_t i = 0; i < parts; ++i)
    add(units * i / parts * unit, std::min(size, units * (i + 1) / parts * unit));
}

template <class Run>
void run_all(const std::vector<Task>& tasks, int threads, Run run) {
  in_team(threads, [&] {
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < tasks.size(); ++i) run(tasks[i]);
  });
}

template <class T>
const T* numbers(const void* const* list, int64_t which) {
  return list ? static_cast<const T*>(list[which]) : nullptr;
}

template <class T>
T* place(T* buffer, int64_t at) {
  return buffer && at >= 0 ? buffer + at : nullptr;
}

// Tokens [from, to) of a group, in float32.
void sum_part(const Call& c, const float* x, const float* w, const float* bias, float* y, float* pre,
              int64_t from, int64_t to) {
  const int64_t rows = to - from;
  y += from * c.y.token;
  if (pre) pre += from * c.y.token;
  sum_block(c, x + from * c.x.token, w, bias, pre ? pre : y, rows);
  if (pre) gather(pre, c.y.token, 1, rows, c.n, y, c.y.token);
  activate(c.act, y, c.y.token, rows, c.n);
}

template <class T>
void forward(const Groups& all, const void* const* xs, const void* const* ws,
             const void* const* biases, T* y, T* pre) {
  using Weight = typename Own<T>::Weight;
  const int threads = threads_for(all, 1);
  const double share = share_of(all, threads);
  std::vector<Task> tasks;
  for (int64_t i = 0; i < all.count; ++i) {
    const Group& g = all.at[i];
    if (!g.m || !g.n) continue;
    const auto parts = static_cast<int64_t>(work_of(g) / share) + 1;
    const int64_t by_rows = std::clamp<int64_t>(parts, 1, std::max<int64_t>(1, g.m / kBlock));
    split(g.m, by_rows, kBlock, [&](int64_t from, int64_t to) {
      split(g.n, (parts + by_rows - 1) / by_rows, kNarrow, [&](int64_t n0, int64_t n1) {
        tasks.push_back({&g, i, from, to, n0, n1, false, false});
      });
    });
  }
  run_all(tasks, threads, [&](const Task& t) {
    [[maybe_unused]] const Tiles<T> tiles;
    const Group& g = *t.group;
    const int64_t width = t.n1 - t.n0;
    const Call c = call_of(all, g, width, g.n);
    const bool sums = !all.half && by_sums(c), dots = sums || by_dots(c);
    const T *x = numbers<T>(xs, t.which), *w = numbers<T>(ws, t.which) + t.n0 * g.k;
    const T* bias = numbers<T>(biases, t.which);
    if (bias) bias += t.n0;
    float* room = weights_of.at_least(dots ? 0 : Weight::room(g.k, width));
    const Weight weight(w, 1, dots ? 1 : g.k, dots ? 0 : g.k, dots ? 0 : width, room);
    T *out = y + g.y + t.n0, *kept = pre ? pre + g.y + t.n0 : nullptr;
    if constexpr (std::is_same_v<T, float>)
      if (sums) return sum_part(c, x, w, bias, out, kept, t.from, t.to);
    for (int64_t from = t.from; from < t.to; from += kBlock)
      forward_block(c, x, w, bias, out, kept, 0, 0, from, std::min(kBlock, t.to - from), weight);
  });
}

template <class T>
struct Gradients {
  T *dx, *dw, *db;
};

template <class T>
void backward(const Groups& all, const void* const* dys, const void* const* saved, const T* pre,
              const void* const* xs, const void* const* ws, const Gradients<T>& to) {
  using Weight = typename Own<T>::Weight;
  using Total = typename Own<T>::Total;
  const int threads = threads_for(all, 2);
  const double share = share_of(all, threads);
  std::vector<Task> tasks;
  for (int64_t i = 0; i < all.count; ++i) {
    const Group& g = all.at[i];
    const bool dx = to.dx && g.dx >= 0, dw = (to.dw && g.dw >= 0) || (to.db && g.db >= 0);
    const auto parts = static_cast<int64_t>(work_of(g) / share) + 1;
    if (parts == 1 && (dx || dw)) {
      tasks.push_back({&g, i, 0, g.m, 0, g.n, dx, dw});
      continue;
    }
    if (dx)
      split(g.m, parts, kChunk, [&](int64_t from, int64_t until) {
        tasks.push_back({&g, i, from, until, 0, g.n, true, false});
      });
    if (dw)
      split(g.n, parts, kNarrow, [&](int64_t n0, int64_t n1) {
        tasks.push_back({&g, i, 0, g.m, n0, n1, false, true});
      });
  }
  run_all(tasks, threads, [&](const Task& t) {
    [[maybe_unused]] const Tiles<T> tiles;
    const Group& g = *t.group;
    const Call c = call_of(all, g, g.n, g.dy_pitch);
    const int64_t width = t.n1 - t.n0;
    T* dx = t.dx ? place(to.dx, g.dx) : nullptr;
    T *dw = t.dw ? place(to.dw, g.dw) : nullptr, *db = t.dw ? place(to.db, g.db) : nullptr;
    if (!g.m) {
      if (dw) std::fill(dw + t.n0 * g.k, dw + t.n1 * g.k, T{0});
      if (db) std::fill(db + t.n0, db + t.n1, T{0});
      return;
    }
    const T* held = pre ? pre + g.y : numbers<T>(saved, t.which);
    const int64_t room = dx ? Weight::room(g.n, g.k) : 0;
    float* memory = weights_of.at_least(room + Total::room(c, width));
    const Weight weight(numbers<T>(ws, t.which), g.k, 1, dx ? g.n : 0, dx ? g.k : 0, memory);
    Total total(c, width, memory + room);
    for (int64_t from = t.from; from < t.to; from += kChunk) {
      const int64_t rows = std::min(kChunk, t.to - from);
      const Part part{0, from, rows, t.n0, t.n1, from == 0, from + rows == g.m};
      backward_block(c, numbers<T>(dys, t.which), held, numbers<T>(xs, t.which), dx, dw, db, 0, part,
                     dx ? &weight : nullptr, total);
    }
  });
}

}  // namespace

// Whether bfloat16 is served.
extern "C" int fastlinear_unequal_half() { return serves_half(); }

// xs, ws and biases: an address a group, of biases null for none. y and pre: buffers; pre may be null.
extern "C" void fastlinear_unequal_forward(const int64_t* groups, const void* const* xs,
                                           const void* const* ws, const void* const* biases, void* y,
                                           void* pre) {
  const Groups& all = *reinterpret_cast<const Groups*>(groups);
  if (all.half)
    forward(all, xs, ws, biases, static_cast<Bf16*>(y), static_cast<Bf16*>(pre));
  else
    forward(all, xs, ws, biases, static_cast<float*>(y), static_cast<float*>(pre));
}

// saved: an address of each output, or null; pre: the buffer of the pre-activations, or null. dx, dw
// and db: buffers, null for none.
extern "C" void fastlinear_unequal_backward(const int64_t* groups, const void* const* dys,
                                            const void* const* saved, const void* pre,
                                            const void* const* xs, const void* const* ws, void* dx,
                                            void* dw, void* db) {
  const Groups& all = *reinterpret_cast<const Groups*>(groups);
#define RUN(T)                                              \
  backward(all, dys, saved, static_cast<const T*>(pre), xs, ws, \
           Gradients<T>{static_cast<T*>(dx), static_cast<T*>(dw), static_cast<T*>(db)})
  all.half ? RUN(Bf16) : RUN(float);
#undef RUN
}
