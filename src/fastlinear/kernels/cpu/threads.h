// What belongs to a thread, and how many threads a piece of work is worth.

#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace {

constexpr double kFlopsAThread = 4.5e5;  // below this much work a second thread does not pay

// Scratch of a thread: grows to the largest net seen (a forward takes a few hundred kilobytes; the
// backward of 512 rows through layers of 2048 features 32 megabytes).
struct Scratch {
  float* data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
  float* at_least(size_t floats) {
    if (floats > size) {
      std::free(data);
      size = (floats + 15) / 16 * 16;
      data = static_cast<float*>(std::aligned_alloc(64, size * 4));
      if (!data) { size = 0; std::abort(); }
    }
    return data;
  }
};

// How many threads torch would take in the calling one; null: ask OpenMP, which in a thread that
// torch has not used yet does not know what torch.set_num_threads said.
int (*threads_of_torch)() = nullptr;

// In a forked process OpenMP still counts on the threads of the parent, and the thread that forked
// would wait for them for ever. It computes alone.
uint64_t forking_thread = 0;
bool forked() { return forking_thread && forking_thread == uint64_t(pthread_self()); }
[[maybe_unused]] const int fork_noticed =
    pthread_atfork(nullptr, nullptr, [] { forking_thread = uint64_t(pthread_self()); });

// While one lives, its thread computes alone if it is told so.
struct Alone {
  static inline thread_local bool now = false;
  const bool before = now;
  explicit Alone(bool alone) { now = now || alone; }
  ~Alone() { now = before; }
  Alone(const Alone&) = delete;
};

// Threads for work that is worth `wanted` of them: one, or all, as PyTorch's own ops take them. GNU's
// OpenMP ends those that a smaller team leaves out, and starts them anew for the next larger one.
// One within somebody else's parallel region.
int threads_worth(double wanted) {
#if defined(_OPENMP)
  if (wanted < 2 || Alone::now || forked() || omp_in_parallel()) return 1;
  return threads_of_torch ? threads_of_torch() : omp_get_max_threads();
#else
  (void)wanted;
  return 1;
#endif
}

// work(i) for all i below count, by so many threads in equal stretches. One alone stays out of
// OpenMP, whose regions take it 0.35 us (AMD EPYC, GCC 12), as long as small work. For work that is
// a call: a loop written here is compiled apart from what it captures.
template <class Work>
void for_each(int64_t count, int threads, const Work& work) {
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) work(i);
}

// work() in each of so many threads. One alone stays out of OpenMP: inside a region of one thread, one
// of BLAS's is nested, and starts threads of its own every time.
template <class Work>
void in_team(int threads, const Work& work) {
  if (threads <= 1) return work();
#pragma omp parallel num_threads(threads)
  work();
}

}  // namespace

// For a library loaded after the fork: the thread that the process began with.
extern "C" void fastlinear_forked(uint64_t thread) { forking_thread = thread; }

// count: how many threads torch would take in the thread that calls it.
extern "C" void fastlinear_threads(int (*count)()) { threads_of_torch = count; }
