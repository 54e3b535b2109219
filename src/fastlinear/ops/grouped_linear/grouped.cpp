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
//   grouped_rows.h     layouts and activations    grouped_half.h    the same in bfloat16, by AMX

#include "../common/large_pages.h"
#include "grouped_half.h"
#include "grouped_single.h"

namespace {

constexpr int64_t kBlock = 256;       // tokens of one task
constexpr int64_t kLeastBlock = 32;
constexpr int64_t kOutputs = 32;      // of a task for dW where groups are few
constexpr size_t kLarge = 4 << 20;    // bytes of a result from which large pages pay

int threads_for(const Call& c, double products) {
  const double flops = 2.0 * products * c.batch * c.length * c.groups * c.k * c.n;
  const double bytes = 4.0 * c.groups * (c.k * c.n + double(c.batch) * c.length * (c.k + c.n));
  return threads_worth((flops / (c.half ? 8 : 1) + 4 * bytes) / kFlopsAThread);
}

template <class T>
void whole_pages(const Call& c, T* p, int64_t columns) {
  const size_t bytes = sizeof(T) * c.batch * c.length * c.groups * columns;
  if (p && bytes >= kLarge) large_pages(p, bytes);
}

template <class T>
void forward(const Call& c, const T* x, const T* w, const T* bias, T* y, T* pre) {
  const int threads = threads_for(c, 1);
  whole_pages(c, y, c.n);
  whole_pages(c, pre, c.n);
  int64_t size = kBlock;
  while (size > kLeastBlock && c.groups * c.batch * ((c.length + size - 1) / size) < 4 * threads)
    size /= 2;
  const int64_t blocks = (c.length + size - 1) / size, tasks = c.groups * c.batch * blocks;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    [[maybe_unused]] const Tiles<T> tiles;
    RightOf<T> right;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t g = task / (c.batch * blocks), b = task / blocks % c.batch;
      const int64_t from = task % blocks * size;
      forward_block(c, x, w, bias, y, pre, g, b, from, std::min(size, c.length - from), right);
    }
  }
}

template <class T>
void backward(const Call& c, const T* dy, const T* saved, const T* x, const T* w, T* dx, T* dw,
              T* db) {
  const int threads = threads_for(c, (dx != nullptr) + (dw != nullptr));
  whole_pages(c, dx, c.k);
  const bool whole = c.groups >= threads && (c.groups % threads == 0 || c.groups >= 4 * threads);
  const bool parameters = dw || db;
  // dx by tokens, then dW and db by outputs; or all of a group at once
  const int64_t steps = (c.length + kChunk - 1) / kChunk;
  const int64_t by_rows = whole || !dx ? 0 : c.groups * c.batch * steps;
  const int64_t outputs = whole ? c.n : kOutputs, strips = (c.n + outputs - 1) / outputs;
  const int64_t tasks = by_rows + (whole || parameters ? c.groups * strips : 0);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    [[maybe_unused]] const Tiles<T> tiles;
    RightOf<T> right;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; ++task) {
      T* const none = nullptr;
      if (task < by_rows) {
        const int64_t g = task / (c.batch * steps), b = task / steps % c.batch;
        const int64_t from = task % steps * kChunk;
        const Part part{b, b + 1, from, std::min(c.length, from + kChunk), 0, c.n};
        backward_block(c, dy, saved, x, w, dx, none, none, g, part, right);
        continue;
      }
      const int64_t g = (task - by_rows) / strips, n0 = (task - by_rows) % strips * outputs;
      const Part part{0, c.batch, 0, c.length, n0, std::min(c.n, n0 + outputs)};
      backward_block(c, dy, saved, x, w, whole ? dx : none, dw, db, g, part, right);
    }
  }
}

}  // namespace

// For a library loaded after the fork: the thread that the process began with.
extern "C" void fastlinear_forked(uint64_t thread) { forking_thread = thread; }

// count: how many threads torch would take in the thread that calls it.
extern "C" void fastlinear_grouped_threads(int (*count)()) { threads_of_torch = count; }

// Whether bfloat16 is served.
extern "C" int fastlinear_grouped_half() { return has_tiles(); }

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
           static_cast<const T*>(w), static_cast<T*>(dx), static_cast<T*>(dw), static_cast<T*>(db))
  c.half ? RUN(Bf16) : RUN(float);
#undef RUN
}
