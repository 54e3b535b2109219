// Whole MLPs on the CPU, one call for all layers: h_{i+1} = act_i(h_i W_i^T + b_i).
//
//   fastlinear_mlp_forward    y, and what the backward reads where it is asked for
//   fastlinear_mlp_backward   dx, every dW and db
//   ..._half                  the same of bfloat16 or float16 numbers (mlp_half.h)
//
// Weights are read where they lie at every call; nothing of them is kept between calls. Scratch
// belongs to the thread. Vectors are those of the processor compiled for (kLanes floats).
//
//   vectors.h          loads, lanes turned and added       mlp_dots.h      products for a few rows
//   activations/cpp.h  activations, derivatives           mlp_product.h   products for many rows
//   threads.h          scratch, number of threads          mlp_forward.h, mlp_backward.h

#include "mlp_backward.h"
#include "mlp_forward.h"

// x (m, n_0) and y (m, n_L), both contiguous. saved: null, or one (m, n_{i+1}) buffer a layer; the
// last may be y itself where its activation keeps the output.
extern "C" void fastlinear_mlp_forward(int64_t layers, const int64_t* widths, const int32_t* acts,
                                       const float* const* weights, const float* const* biases,
                                       const float* x, float* y, float* const* saved, int64_t m) {
  const Net net{layers, widths, acts, weights, biases};
  const int threads = threads_for(net, m);
  if (m <= kDotRows) return forward_rows(net, x, y, saved, m, threads);
  if (many_rows(net, m, threads)) return forward_turned(net, x, y, saved, m, threads);
  int64_t blocks = (m + kBlock - 1) / kBlock;
  // rows are shared out where there are blocks for all, or few weights for each thread to read
  if (threads > 1 && blocks < threads && (widest(net) > kReadByAll || m < threads * kLanes)) {
    for (int64_t b = 0; b < m; b += kBlock)
      forward_shared(net, x, y, saved, b, m - b < kBlock ? m - b : kBlock, threads);
    return;
  }
  blocks = (blocks + threads - 1) / threads * threads;
  const int64_t size = padded((m + blocks - 1) / blocks);
  auto work = [&](int64_t from) {
    forward_block(net, x, y, saved, from, m - from < size ? m - from : size);
  };
  if (threads <= 1) {
    for (int64_t from = 0; from < m; from += size) work(from);
    return;
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t from = 0; from < m; from += size) work(from);
}

// dy (m, n_L), x (m, n_0), saved as the forward wrote it; dx, and each entry of dws and dbs, may be
// null where not needed. Layers before `first` are not reached.
extern "C" void fastlinear_mlp_backward(int64_t layers, const int64_t* widths, const int32_t* acts,
                                        const float* const* weights, const float* x,
                                        const float* const* saved, const float* dy, float* dx,
                                        float* const* dws, float* const* dbs, int64_t first,
                                        int64_t m) {
  const Net net{layers, widths, acts, weights, nullptr};
  const int64_t wide = padded(widest(net)), mp = padded(m);
  bool narrow = false;  // whether a layer's inputs do not fill their vectors
  for (int64_t l = 0; l < layers; ++l) narrow = narrow || widths[l] % kLanes;
  float* d = scratch.at_least(3 * m * wide + mp * wide + (narrow ? wide * wide : 0));
  float* next = d + m * wide;
  float* input = next + m * wide;   // layer l's input where it must be recomputed or widened
  float* turned = input + m * wide;  // d, transposed
  float* square = turned + mp * wide;  // a weight widened, or its gradient before it is narrowed
  widen(dy, widths[layers], d, wide, m, widths[layers]);
  for (int64_t l = layers - 1; l >= first; --l) {
    const int64_t k = widths[l], n = widths[l + 1], kp = padded(k);
    derive(acts[l], d, wide, saved[l], dbs[l], m, n);
    if (dws[l]) {
      const float* h = l ? saved[l - 1] : x;
      int64_t h_row = k;
      if (l && saves_pre(acts[l - 1])) {
        for (int64_t r = 0; r < m; ++r)
          for (int64_t j = 0; j < k; j += kLanes)
            store(input + r * kp + j,
                  act(acts[l - 1], get(h + r * k + j, k - j < kLanes ? k - j : kLanes)));
        h = input, h_row = kp;
      } else if (k != kp) {
        widen(h, k, input, kp, m, k);
        h = input, h_row = kp;
      }
      float* c = k == kp ? dws[l] : square;
      transpose<true>(d, wide, turned, mp, m, n);
      shared_product({turned, mp, 1, h, h_row, c, kp, m, nullptr, nullptr, kNone}, n, kp);
      if (c == square)
        for (int64_t r = 0; r < n; ++r) std::memcpy(dws[l] + r * k, square + r * kp, k * 4);
    }
    if (l == first && !(l == 0 && dx)) break;
    const float* w = weights[l];
    if (k != kp) {
      widen(w, k, square, kp, n, k);
      w = square;
    }
    shared_product({d, wide, 1, w, kp, next, wide, n, nullptr, nullptr, kNone}, m, kp);
    float* t = d;
    d = next;
    next = t;
  }
  if (dx)
    for (int64_t r = 0; r < m; ++r) std::memcpy(dx + r * widths[0], d + r * wide, widths[0] * 4);
}

#include "mlp_half.h"
