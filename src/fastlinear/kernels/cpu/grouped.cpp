// Linear layers of many small groups on the CPU, one call forward and one backward.
//
//   fastlinear_grouped_forward    y_g = act(x_g W_g^T + b_g), and the pre-activation where asked for
//   fastlinear_grouped_backward   dx, dW and db
//
// Tensors are read and written where they lie, by strides. Weights are laid out anew at every call,
// a group at a time; nothing of them is kept. Sums run in float32 in an order that depends on the
// sizes alone, so that results do not depend on the number of threads.
//
//   grouped_product.h  products of float32        grouped_single.h  a block forward and backward
//   grouped_rows.h     layouts and activations    grouped_half.h    the same in bfloat16
//   grouped_tiles.h    products of bfloat16, by AMX or in vectors

#include "large_pages.h"
#include "grouped_half.h"
#include "grouped_single.h"

#include <vector>

namespace {

thread_local Scratch weights_of;


constexpr int64_t kBlock = 256;       // tokens of one task
constexpr int64_t kLeastBlock = 32;
constexpr int64_t kTogether = 8;        // groups of one task at most
constexpr int64_t kNumbers = 1 << 17;   // of their weights together
constexpr int64_t kLeastTogether = 64;  // tokens from which that pays
constexpr int64_t kOutputs = 32;      // of a task for dW where groups are few
constexpr size_t kLarge = 4 << 20;    // bytes of a result from which large pages pay

int threads_for(const Call& c, double products) {
  const double flops = 2.0 * products * c.batch * c.length * c.groups * c.k * c.n;
  const double bytes = 4.0 * c.groups * (c.k * c.n + double(c.batch) * c.length * (c.k + c.n));
  return threads_worth((flops / (c.half ? kHalfRate : 1) + 4 * bytes) / kFlopsAThread);
}

// Tasks that a thread takes at a time, so that one that is held up leaves work to the others.
int64_t grain_of(int64_t tasks, int threads) { return std::max<int64_t>(1, tasks / (8 * threads)); }

template <class T>
void whole_pages(const Call& c, T* p, int64_t columns) {
  const size_t bytes = sizeof(T) * c.batch * c.length * c.groups * columns;
  if (p && bytes >= kLarge) large_pages(p, bytes);
}

// Groups that a thread takes together. Where their tokens lie side by side they share pages and
// lines, so that a block of tokens of one is followed by the same tokens of the next.
struct Bundles {
  int64_t groups, count;

  Bundles(const Call& c, int threads) : groups(c.groups), count(c.groups) {
    const int64_t most = std::clamp<int64_t>(kNumbers / (c.k * c.n), 1, kTogether);
    if (c.x.token <= c.x.group || c.length < kLeastTogether || c.groups < 2 * threads) return;
    count = (c.groups + most * threads - 1) / (most * threads) * threads;
    count = std::min(count, c.groups);
  }
  int64_t begin(int64_t bundle) const { return groups * bundle / count; }
};

template <class T>
void forward(const Call& c, const T* x, const T* w, const T* bias, T* y, T* pre) {
  using Weight = typename Own<T>::Weight;
  const int threads = threads_for(c, 1);
  whole_pages(c, y, c.n);
  whole_pages(c, pre, c.n);
  const Bundles bundles(c, threads);
  int64_t size = kBlock;
  while (size > kLeastBlock && bundles.count * c.batch * ((c.length + size - 1) / size) < 4 * threads)
    size /= 2;
  const int64_t blocks = (c.length + size - 1) / size, tasks = bundles.count * c.batch * blocks;
  const int64_t room = by_dots(c) ? 0 : Weight::room(c.k, c.n), grain = grain_of(tasks, threads);
  in_team(threads, [&] {
    [[maybe_unused]] const Tiles<T> tiles;
    std::vector<Weight> weights;
    int64_t held = -1;
#pragma omp for schedule(dynamic, grain)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t bundle = task / (c.batch * blocks), b = task / blocks % c.batch;
      const int64_t from = task % blocks * size, g0 = bundles.begin(bundle);
      const int64_t g1 = bundles.begin(bundle + 1);
      if (bundle != held) {
        held = bundle;
        weights.clear();
        float* memory = weights_of.at_least(room * (g1 - g0));
        for (int64_t g = g0; g < g1; ++g)
          if (by_dots(c))
            weights.emplace_back(w, 1, 1, 0, 0, memory);
          else
            weights.push_back(weight_of(c, w + g * c.w_group, memory + (g - g0) * room));
      }
      for (int64_t g = g0; g < g1; ++g)
        forward_block(c, x, w, bias, y, pre, g, b, from, std::min(size, c.length - from),
                      weights[g - g0]);
    }
  });
}

template <class T>
struct Gradients {
  T *dx, *dw, *db;
};

// Groups [g0, g1), chunks [from, to) of all batches' tokens, outputs [n0, n1).
template <class T>
void backward_part(const Call& c, const T* dy, const T* saved, const T* x, const T* w,
                   const Gradients<T>& to, int64_t g0, int64_t g1, int64_t first, int64_t last,
                   int64_t n0, int64_t n1) {
  using Weight = typename Own<T>::Weight;
  using Total = typename Own<T>::Total;
  const int64_t room = to.dx ? Weight::room(c.n, c.k) : 0, more = Total::room(c, n1 - n0);
  const int64_t chunks = (c.length + kChunk - 1) / kChunk;
  float* memory = weights_of.at_least((room + more) * (g1 - g0));
  std::vector<Weight> weights;
  std::vector<Total> totals;
  for (int64_t g = g0; g < g1; ++g, memory += room + more) {
    if (to.dx)
      weights.push_back(turned_weight_of(c, w + g * c.w_group, memory + more,
                                         backward_by_features(c, saved)));
    totals.emplace_back(c, n1 - n0, memory);
  }
  for (int64_t chunk = first; chunk < last; ++chunk) {
    const int64_t from = chunk % chunks * kChunk, rows = std::min(kChunk, c.length - from);
    const Part part{chunk / chunks, from, rows, n0, n1, chunk == first, chunk + 1 == last};
    for (int64_t g = g0; g < g1; ++g)
      backward_block(c, dy, saved, x, to.dx, to.dw, to.db, g, part,
                     to.dx ? &weights[g - g0] : nullptr, totals[g - g0]);
  }
}

template <class T>
void backward(const Call& c, const T* dy, const T* saved, const T* x, const T* w,
              const Gradients<T>& to) {
  const int threads = threads_for(c, (to.dx != nullptr) + (to.dw != nullptr));
  whole_pages(c, to.dx, c.k);
  // all of a group at once; or dx by tokens, then dW and db by outputs, where groups are few
  const bool whole = c.groups % threads == 0 || c.groups >= 4 * threads;
  const Bundles bundles(c, threads);
  const int64_t chunks = c.batch * ((c.length + kChunk - 1) / kChunk);
  const int64_t by_rows = whole || !to.dx ? 0 : c.groups * chunks;
  const int64_t strips = whole ? 1 : (c.n + kOutputs - 1) / kOutputs;
  const int64_t rest = whole ? bundles.count : to.dw || to.db ? c.groups * strips : 0;
  const int64_t grain = grain_of(by_rows + rest, threads);
  in_team(threads, [&] {
    [[maybe_unused]] const Tiles<T> tiles;
#pragma omp for schedule(dynamic, grain)
    for (int64_t task = 0; task < by_rows + rest; ++task) {
      if (task < by_rows) {
        const int64_t g = task / chunks, at = task % chunks;
        backward_part<T>(c, dy, saved, x, w, {to.dx, nullptr, nullptr}, g, g + 1, at, at + 1, 0, c.n);
        continue;
      }
      const int64_t i = task - by_rows;
      if (whole) {
        const int64_t g0 = bundles.begin(i), g1 = bundles.begin(i + 1);
        backward_part(c, dy, saved, x, w, to, g0, g1, 0, chunks, 0, c.n);
        continue;
      }
      const int64_t g = i / strips, n0 = i % strips * kOutputs, n1 = std::min(c.n, n0 + kOutputs);
      backward_part<T>(c, dy, saved, x, w, {nullptr, to.dw, to.db}, g, g + 1, 0, chunks, n0, n1);
    }
  });
}

}  // namespace

// Whether bfloat16 is served.
extern "C" int fastlinear_grouped_half() { return serves_half(); }

// bias and pre may be null.
extern "C" void fastlinear_grouped_forward(const int64_t* call, const void* x, const void* w,
                                           const void* bias, void* y, void* pre) {
  const Call& c = *reinterpret_cast<const Call*>(call);
#define RUN(T)                                                                             \
  forward(c, static_cast<const T*>(x), static_cast<const T*>(w), static_cast<const T*>(bias), \
          static_cast<T*>(y), static_cast<T*>(pre))
  c.half ? RUN(Bf16) : RUN(float);
#undef RUN
}

// saved, dx, dw and db may be null; dw (G, N, K) and db (G, N) are dense.
extern "C" void fastlinear_grouped_backward(const int64_t* call, const void* dy, const void* saved,
                                            const void* x, const void* w, void* dx, void* dw,
                                            void* db) {
  const Call& c = *reinterpret_cast<const Call*>(call);
#define RUN(T)                                                                                   \
  backward(c, static_cast<const T*>(dy), static_cast<const T*>(saved), static_cast<const T*>(x), \
           static_cast<const T*>(w),                                                             \
           Gradients<T>{static_cast<T*>(dx), static_cast<T*>(dw), static_cast<T*>(db)})
  c.half ? RUN(Bf16) : RUN(float);
#undef RUN
}
