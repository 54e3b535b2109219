// A net's forward: by dot products for a few rows, else by blocks of rows that go through all layers.

#pragma once

#include "mlp_dots.h"
#include "mlp_product.h"

namespace {

constexpr int64_t kDotRows = 16;        // up to here rows take dot products along W's rows
constexpr int64_t kReadByAll = 256;     // up to this width each thread may read all weights
constexpr int64_t kTurned = 128;         // up to this width weights may be turned instead of x,
constexpr int64_t kTurnedAlone = 512;   // up to this one that of a single layer
constexpr int64_t kTurnedRows = 20 * kRowsOf[kMaxVectors];  // rows that then go through together
constexpr double kFlopsABarrier = 6e4;  // what could be computed while threads wait

thread_local Scratch scratch, weights_of;

struct Net {
  int64_t layers;
  const int64_t* widths;  // layers + 1
  const int32_t* acts;
  const float* const* weights;  // (n_{i+1}, n_i), contiguous
  const float* const* biases;   // null entries where there is none
};

int64_t widest(const Net& net) {
  int64_t w = 0;
  for (int64_t i = 0; i <= net.layers; ++i) w = net.widths[i] > w ? net.widths[i] : w;
  return w;
}

// A few rows through all layers, the features of every layer shared out among threads: each weight
// is read by one of them only, once for all rows that its dot products take together.
void forward_rows(const Net& net, const float* x, float* y, float* const* saved, int64_t m,
                  int threads) {
  const int64_t wide = widest(net), last = net.layers - 1;
  float* const space = scratch.at_least(2 * wide * m);
  auto work = [&](int64_t t, int64_t team) {
    const float* h = x;
    V sum[kDotRows * kLanes];  // [row][feature]
    for (int64_t l = 0; l <= last; ++l) {
      const int64_t k = net.widths[l], n = net.widths[l + 1], groups = (n + kLanes - 1) / kLanes;
      const int which = net.acts[l];
      float* keep = saved ? saved[l] : nullptr;
      const bool keep_pre = keep && saves_pre(which);
      float* out = l == last ? y : keep && !keep_pre ? keep : space + (l % 2) * wide * m;
      const float* w = net.weights[l];
      const float* bias = net.biases[l];
      const int64_t end = groups * (t + 1) / team;
      for (int64_t g = groups * t / team; g < end; ++g) {
        const int64_t j = g * kLanes, count = n - j < kLanes ? n - j : kLanes;
        const V b = bias ? get(bias + j, count) : V{};
        if (count < kLanes) std::memset(sum, 0, sizeof(sum));
        dots_all(w + j * k, h, m, k, count, sum);
        for (int64_t r = 0; r < m; ++r) {
          const V v = b + sums(sum + r * kLanes);
          if (keep_pre) put(keep + r * n + j, v, count);
          put(out + r * n + j, act(which, v), count);
        }
      }
      h = out;
      if (l < last && team > 1) {
#pragma omp barrier
      }
    }
  };
  if (threads <= 1) return work(0, 1);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num(), omp_get_num_threads());
#endif
}

// `rows` <= kBlock rows of x through all layers, held transposed: (width, columns).
void forward_block(const Net& net, const float* x, float* y, float* const* saved, int64_t from,
                   int64_t rows) {
  const int64_t columns = padded(rows), wide = widest(net), last = net.layers - 1;
  float* space = scratch.at_least(3 * wide * kBlock);
  float* h = space;
  float* next = space + wide * kBlock;
  float* pre = space + 2 * wide * kBlock;
  const int64_t n0 = net.widths[0];
  transpose<true>(x + from * n0, n0, h, columns, rows, n0);
  for (int64_t l = 0; l <= last; ++l) {
    const int64_t k = net.widths[l], n = net.widths[l + 1];
    const bool keep_pre = saved && saves_pre(net.acts[l]);
    const Product g{net.weights[l], k, 1, h, columns, next, columns, k, net.biases[l],
                    keep_pre ? pre : nullptr, net.acts[l]};
    product(g, n, columns);
    if (l == last) transpose<false>(next, columns, y + from * n, n, n, rows);
    if (saved && (keep_pre || l < last))
      transpose<false>(keep_pre ? pre : next, columns, saved[l] + from * n, n, n, rows);
    float* t = h;
    h = next;
    next = t;
  }
}

// As forward_block, the features of every layer shared out among threads: each weight is read by
// one of them only. One barrier a layer.
void forward_shared(const Net& net, const float* x, float* y, float* const* saved, int64_t from,
                    int64_t rows, int threads) {
  const int64_t columns = padded(rows), wide = widest(net), last = net.layers - 1;
  float* const space = scratch.at_least(3 * wide * kBlock);
  float* const pre = space + 2 * wide * kBlock;
  const int64_t n0 = net.widths[0];
  transpose<true>(x + from * n0, n0, space, columns, rows, n0);
#pragma omp parallel num_threads(threads)
  {
#if defined(_OPENMP)
    const int64_t t = omp_get_thread_num(), team = omp_get_num_threads();
#else
    const int64_t t = 0, team = 1;
#endif
    for (int64_t l = 0; l <= last; ++l) {
      const int64_t k = net.widths[l], n = net.widths[l + 1];
      const int64_t f0 = n * t / team, f1 = n * (t + 1) / team;
      const float* h = space + (l % 2) * wide * kBlock;
      float* next = space + ((l + 1) % 2) * wide * kBlock;
      const bool keep_pre = saved && saves_pre(net.acts[l]);
      const float* bias = net.biases[l] ? net.biases[l] + f0 : nullptr;
      product({net.weights[l] + f0 * k, k, 1, h, columns, next + f0 * columns, columns, k, bias,
               keep_pre ? pre + f0 * columns : nullptr, net.acts[l]},
              f1 - f0, columns);
      if (l == last)
        transpose<false>(next + f0 * columns, columns, y + from * n + f0, n, f1 - f0, rows);
      if (saved && (keep_pre || l < last))
        transpose<false>((keep_pre ? pre : next) + f0 * columns, columns,
                         saved[l] + from * n + f0, n, f1 - f0, rows);
#pragma omp barrier
    }
  }
}

// Whether turning every weight in every thread costs less than turning the rows of x and y. Chains
// of wider layers lose by it between x and y.
bool many_rows(const Net& net, int64_t m, int threads) {
  int64_t weights = 0;
  for (int64_t l = 0; l <= net.layers; ++l) {
    if (net.widths[l] % kLanes) return false;
    if (l) weights += net.widths[l - 1] * net.widths[l];
  }
  return widest(net) <= (net.layers == 1 ? kTurnedAlone : kTurned) && m >= 8 * kBlock &&
         m * (net.widths[0] + net.widths[net.layers]) >= 2 * weights * threads;
}

// Many rows through narrow layers whose widths are multiples of kLanes: activations stay as they
// lie, weights are transposed, in panels of kBlock features. Rows are shared out; what a thread
// computes is, bit for bit, what forward_block does.
void forward_turned(const Net& net, const float* x, float* y, float* const* saved, int64_t m,
                    int threads) {
  const int64_t wide = widest(net), last = net.layers - 1;
  auto work = [&](int64_t t, int64_t team) {
    int64_t numbers = 0;
    for (int64_t l = 0; l <= last; ++l) numbers += net.widths[l] * net.widths[l + 1];
    float* const turned = weights_of.at_least(numbers);
    float* to = turned;
    for (int64_t l = 0; l <= last; ++l) {
      const int64_t k = net.widths[l], n = net.widths[l + 1];
      for (int64_t j = 0; j < n; j += kBlock) {
        const int64_t size = n - j < kBlock ? n - j : kBlock;
        transpose<true>(net.weights[l] + j * k, k, to, size, size, k);
        to += k * size;
      }
    }
    float* const space = scratch.at_least(2 * wide * kTurnedRows);
    const int64_t end = m * (t + 1) / team;
    for (int64_t from = m * t / team; from < end; from += kTurnedRows) {
      const int64_t rows = end - from < kTurnedRows ? end - from : kTurnedRows;
      const float* h = x + from * net.widths[0];
      const float* b = turned;
      for (int64_t l = 0; l <= last; ++l) {
        const int64_t k = net.widths[l], n = net.widths[l + 1];
        float* keep = saved ? saved[l] + from * n : nullptr;
        const bool keep_pre = keep && saves_pre(net.acts[l]);
        float* out = l == last            ? y + from * n
                     : keep && !keep_pre ? keep
                                         : space + (l % 2) * wide * kTurnedRows;
        const float* bias = net.biases[l];
        for (int64_t j = 0; j < n; j += kBlock) {
          const int64_t size = n - j < kBlock ? n - j : kBlock;
          product({h, k, 1, b, size, out + j, n, k, nullptr, keep_pre ? keep + j : nullptr,
                   net.acts[l], bias ? bias + j : nullptr},
                  rows, size);
          b += k * size;
        }
        h = out;
      }
    }
  };
  if (threads <= 1) return work(0, 1);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num(), omp_get_num_threads());
#endif
}

double flops_a_row(const Net& net) {
  double f = 0;
  for (int64_t l = 0; l < net.layers; ++l) f += 2.0 * net.widths[l] * net.widths[l + 1];
  return f;
}

int threads_for(const Net& net, int64_t m) {
  // a few rows take as long as five: the weights must come near
  const double flops = flops_a_row(net) * (m < 5 ? 5 : m);
  return threads_worth(flops / (kFlopsAThread + net.layers * kFlopsABarrier));
}

}  // namespace
