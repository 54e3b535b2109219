// Nets of bfloat16 or float16 numbers, which stay float32 from the first layer to the last: what comes in
// is widened, and results are rounded once. Behind the functions of float32 in mlp.cpp.

#pragma once

#include <vector>

#include "../../../kernels/cpu/numbers.h"

namespace {

constexpr int64_t kNumbersAtOnce = 1 << 18;  // of rows that go through together: the second cache's
constexpr int64_t kRowsAtOnce = 512;         // at least: weights are read anew for each part of the rows
constexpr int64_t kStretch = 1 << 12;        // numbers that a thread converts at a time
constexpr double kNumbersAThread = 1 << 16;  // below so many a second thread does not pay

// Up to so many rows, and weights that one second cache holds, a thread computes alone: others would fetch
// each weight from the cache of the one that widened it, which takes longer than the products of these rows.
constexpr int64_t kRowsAlone = 64;

thread_local Scratch widened_of;

// convert(first, count) of stretches of n numbers, shared out among threads.
template <class Convert>
void in_stretches(int64_t n, const Convert& convert) {
  for_each((n + kStretch - 1) / kStretch, threads_worth(n / kNumbersAThread), [&](int64_t i) {
    convert(i * kStretch, n - i * kStretch < kStretch ? n - i * kStretch : kStretch);
  });
}

// Float32 numbers that lie behind each other in a thread's scratch.
struct Widened {
  float* next;

  float* room(int64_t n) {
    float* const found = next;
    next += (n + 15) / 16 * 16;
    return found;
  }

  template <class T>
  float* of(const T* from, int64_t n) {
    if (!from) return nullptr;
    float* const to = room(n);
    in_stretches(n, [=](int64_t at, int64_t count) { widen(from + at, to + at, count); });
    return to;
  }
};

template <class T>
void round_to(const float* from, T* to, int64_t n) {
  in_stretches(n, [=](int64_t at, int64_t count) { narrow_all(from + at, to + at, count); });
}

// Room for that many numbers, of tensors that begin at multiples of 16.
inline Widened widened(int64_t numbers, int64_t tensors) {
  return {widened_of.at_least(numbers + 16 * tensors)};
}

inline int64_t numbers_of_weights(int64_t layers, const int64_t* widths) {
  int64_t found = 0;
  for (int64_t l = 0; l < layers; ++l) found += (widths[l] + 1) * widths[l + 1];
  return found;
}

inline bool is_alone(int64_t layers, const int64_t* widths, int64_t m) {
  return m <= kRowsAlone && numbers_of_weights(layers, widths) <= kNumbersAtOnce;
}

template <class T>
void forward_widened(int64_t layers, const int64_t* widths, const int32_t* acts, const T* const* weights,
                     const T* const* biases, const T* x, T* y, T* const* saved, int64_t m) {
  int64_t row = widths[0] + widths[layers];
  for (int64_t l = 0; saved && l < layers; ++l) row += widths[l + 1];
  int64_t parts = (m * row + kNumbersAtOnce - 1) / kNumbersAtOnce;
  parts = parts > m / kRowsAtOnce ? m / kRowsAtOnce : parts;
  const int64_t rows = parts < 2 ? m : padded((m + parts - 1) / parts);
  Widened all = widened(numbers_of_weights(layers, widths) + rows * row, 3 * layers + 2);
  std::vector<const float*> ws, bs;
  for (int64_t l = 0; l < layers; ++l) {
    ws.push_back(all.of(weights[l], widths[l] * widths[l + 1]));
    bs.push_back(all.of(biases[l], widths[l + 1]));
  }
  const Widened behind = all;
  for (int64_t from = 0; from < m; from += rows) {
    const int64_t count = m - from < rows ? m - from : rows;
    Widened some = behind;
    const float* const in = some.of(x + from * widths[0], count * widths[0]);
    float* const out = some.room(count * widths[layers]);
    std::vector<float*> kept;
    for (int64_t l = 0; saved && l < layers; ++l)
      kept.push_back(saved[l] == y ? out : some.room(count * widths[l + 1]));
    fastlinear_mlp_forward(layers, widths, acts, ws.data(), bs.data(), in, out,
                           saved ? kept.data() : nullptr, count);
    round_to(out, y + from * widths[layers], count * widths[layers]);
    for (int64_t l = 0; saved && l < layers; ++l)
      if (saved[l] != y) round_to(kept[l], saved[l] + from * widths[l + 1], count * widths[l + 1]);
  }
}

template <class T>
void backward_widened(int64_t layers, const int64_t* widths, const int32_t* acts,
                      const T* const* weights, const T* x, const T* const* saved, const T* dy, T* dx,
                      T* const* dws, T* const* dbs, int64_t first, int64_t m) {
  int64_t row = 2 * widths[0];
  for (int64_t l = 0; l < layers; ++l) row += 2 * widths[l + 1];
  Widened all = widened(2 * numbers_of_weights(layers, widths) + m * row, 5 * layers + 3);
  std::vector<const float*> ws, kept;
  std::vector<float*> grads, sums;
  for (int64_t l = 0; l < layers; ++l) {
    const int64_t numbers = widths[l] * widths[l + 1];
    ws.push_back(all.of(weights[l], numbers));
    kept.push_back(all.of(saved[l], m * widths[l + 1]));
    grads.push_back(dws[l] ? all.room(numbers) : nullptr);
    sums.push_back(dbs[l] ? all.room(widths[l + 1]) : nullptr);
  }
  float* const found = dx ? all.room(m * widths[0]) : nullptr;
  const float* const given = all.of(dy, m * widths[layers]);
  fastlinear_mlp_backward(layers, widths, acts, ws.data(), all.of(x, m * widths[0]), kept.data(), given,
                          found, grads.data(), sums.data(), first, m);
  if (dx) round_to(found, dx, m * widths[0]);
  for (int64_t l = first; l < layers; ++l) {
    if (dws[l]) round_to(grads[l], dws[l], widths[l] * widths[l + 1]);
    if (dbs[l]) round_to(sums[l], dbs[l], widths[l + 1]);
  }
}

}  // namespace

// As the functions of float32, of bfloat16 numbers where `bf16`, else of float16.
extern "C" void fastlinear_mlp_forward_half(int bf16, int64_t layers, const int64_t* widths,
                                            const int32_t* acts, const void* const* weights,
                                            const void* const* biases, const void* x, void* y,
                                            void* const* saved, int64_t m) {
  const Alone alone(is_alone(layers, widths, m));
  const auto run = [=](auto number) {
    using T = decltype(number);
    forward_widened(layers, widths, acts, reinterpret_cast<const T* const*>(weights),
                    reinterpret_cast<const T* const*>(biases), static_cast<const T*>(x),
                    static_cast<T*>(y), reinterpret_cast<T* const*>(saved), m);
  };
  bf16 ? run(Bf16{}) : run(Half{});
}

extern "C" void fastlinear_mlp_backward_half(int bf16, int64_t layers, const int64_t* widths,
                                             const int32_t* acts, const void* const* weights,
                                             const void* x, const void* const* saved, const void* dy,
                                             void* dx, void* const* dws, void* const* dbs,
                                             int64_t first, int64_t m) {
  const Alone alone(is_alone(layers, widths, m));
  const auto run = [=](auto number) {
    using T = decltype(number);
    backward_widened(layers, widths, acts, reinterpret_cast<const T* const*>(weights),
                     static_cast<const T*>(x), reinterpret_cast<const T* const*>(saved),
                     static_cast<const T*>(dy), static_cast<T*>(dx), reinterpret_cast<T* const*>(dws),
                     reinterpret_cast<T* const*>(dbs), first, m);
  };
  bf16 ? run(Bf16{}) : run(Half{});
}
