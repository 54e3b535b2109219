// Linear layers of groups of one size whose numbers of rows differ, on the CPU.
//
//   fastlinear_ragged_forward    y_t = act(x_t W_g^T + b_g), and the pre-activation where asked for
//   fastlinear_ragged_backward   dx, dW and db
//
// Both read the sizes first and return 0, nothing written, where they do not fit. Groups are tasks of
// threads, cut where a few would hold up the others; each is computed by one thread.
//
//   ragged_call.h    a call, its bounds and tasks      ragged_half.h    tasks in bfloat16, by AMX
//   ragged_single.h  tasks in float32

#include "ragged_half.h"
#include "ragged_single.h"

namespace {

constexpr int64_t kColumns = 16;  // a cut falls between so many

// How tasks of a dtype are cut, and the rows' worth of work that each takes besides its rows.
template <class T>
struct Cuts {
  static constexpr int64_t kForwardColumns = kColumns, kForwardRows = kColumns;
  static constexpr int64_t kInputColumns = kColumns, kInputRows = 0, kOutputs = kColumns;
  static constexpr double kBesides = kFixed;
};
template <>
struct Cuts<Bf16> {  // dx's tasks read all outputs
  static constexpr int64_t kForwardColumns = 0, kForwardRows = kStripHalf;
  static constexpr int64_t kInputColumns = 0, kInputRows = kChunk, kOutputs = kStripHalf;
  static constexpr double kBesides = kFixedHalf;
};

template <class T>
void fill_zeros(T* p, const Task& t, int64_t columns) {
  if (p) std::fill(p + t.r0 * columns, p + t.r1 * columns, T{});
}

// The rows of no group.
void add_rest(Tasks& tasks, const Ragged& c, const Bounds& bounds) {
  const int64_t from = bounds.owned(), rows = c.rows - from;
  if (rows) tasks.add(kZeros, c.groups, from, c.rows, 0, double(rows) / kRowsOfZeros);
}

template <class T>
void forward(const Ragged& c, const Bounds& bounds, const T* x, const T* w, const T* bias, T* y,
             T* pre) {
  const int threads = threads_for(c, bounds, 1);
  Tasks tasks(threads);
  for (int64_t g = 0; g < c.groups; ++g)
    if (const auto size = bounds.size(g))
      tasks.add(kForward, g, bounds.begin[g], bounds.begin[g + 1], c.n, size + Cuts<T>::kBesides);
  add_rest(tasks, c, bounds);
  if (!tasks.even()) tasks.cut(Cuts<T>::kForwardColumns, Cuts<T>::kForwardRows);
  in_team(threads, [&] {
    [[maybe_unused]] const Tiles<T> tiles;
    tasks.run(this_thread(), false, [&](const Task& t) {
      if (t.kind == kForward) return forward_task(c, t, x, w, bias, y, pre);
      fill_zeros(y, t, c.n);
      fill_zeros(pre, t, c.n);
    });
  });
}

template <class T>
void backward(const Ragged& c, const Bounds& bounds, const T* dy, const T* saved, const T* x, const T* w,
              T* dx, T* dw, T* db, T* room) {
  using Cut = Cuts<T>;
  const int threads = threads_for(c, bounds, (dx != nullptr) + (dw != nullptr));
  Tasks tasks(threads);
  const auto add = [&](Tasks& to, Kind kind, int64_t columns, double share) {
    for (int64_t g = 0; g < c.groups; ++g)
      to.add(kind, g, bounds.begin[g], bounds.begin[g + 1], columns,
             share * (double(bounds.size(g)) + Cut::kBesides));
  };
  // all of a group at once; or dx, then dW and db by outputs, where that holds up some threads
  add(tasks, kBoth, c.n, 1.0);
  add_rest(tasks, c, bounds);
  const bool apart = !tasks.even();
  if (apart) {
    tasks.clear();
    Tasks weights(threads);
    if (dx) add(tasks, kInput, Cut::kInputColumns ? c.k : c.n, 1.0);
    if (dw || db) add(weights, kWeight, c.n, 1.0);
    add_rest(tasks, c, bounds);
    tasks.cut(Cut::kInputColumns, Cut::kInputRows);
    weights.cut(Cut::kOutputs, 0);
    tasks.take_over(weights);
  }
  constexpr int64_t kRows = 16;
  const int64_t first = apart && saved && room ? bounds.owned() : 0;  // rows derived by all threads
  in_team(threads, [&] {
    [[maybe_unused]] const Tiles<T> tiles;
    if (first > 0) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < first; r += kRows)
        derive_rows(c, dy, saved, room, r, std::min(first, r + kRows));
    }
    tasks.run(this_thread(), true, [&](const Task& t) {
      if (t.kind != kZeros) return backward_task(c, t, dy, saved, x, w, dx, dw, db, room);
      fill_zeros(dx, t, c.k);
    });
  });
}

}  // namespace

extern "C" void fastlinear_ragged_blas(Sgemm given) { sgemm = given; }

// Whether bfloat16 is served.
extern "C" int fastlinear_ragged_half() { return serves_half(); }

// bias and pre may be null; kept, which may be null too, gets the sizes as int64.
extern "C" int64_t fastlinear_ragged_forward(const int64_t* call, const void* sizes, const void* x,
                                             const void* w, const void* bias, void* y, void* pre,
                                             int64_t* kept) {
  const Ragged& c = *reinterpret_cast<const Ragged*>(call);
  Bounds bounds;
  if (!bounds.read(c, sizes)) return 0;
  for (int64_t g = 0; kept && g < c.groups; ++g) kept[g] = bounds.size(g);
#define RUN(T)                                                                               \
  forward(c, bounds, static_cast<const T*>(x), static_cast<const T*>(w),                     \
          static_cast<const T*>(bias), static_cast<T*>(y), static_cast<T*>(pre))
  c.half ? RUN(Bf16) : RUN(float);
#undef RUN
  return 1;
}

// saved, dx, dw and db may be null; dw (G, N, K) and db (G, N) are dense. room: of dy's shape, for
// float32 where saved is not null.
extern "C" int64_t fastlinear_ragged_backward(const int64_t* call, const void* sizes, const void* dy,
                                              const void* saved, const void* x, const void* w,
                                              void* dx, void* dw, void* db, void* room) {
  const Ragged& c = *reinterpret_cast<const Ragged*>(call);
  Bounds bounds;
  if (!bounds.read(c, sizes)) return 0;
#define RUN(T)                                                                                     \
  backward(c, bounds, static_cast<const T*>(dy), static_cast<const T*>(saved),                     \
           static_cast<const T*>(x), static_cast<const T*>(w), static_cast<T*>(dx),                \
           static_cast<T*>(dw), static_cast<T*>(db), static_cast<T*>(room))
  c.half ? RUN(Bf16) : RUN(float);
#undef RUN
  return 1;
}
