// The passes of experts between their products, on the CPU, in float32, bfloat16 or float16.
//
//   fastlinear_experts_sort            slots sorted by expert, stably: order, place and sizes
//   fastlinear_experts_gather          the row of its token at each place
//   fastlinear_experts_combine         y: the rows of each token's slots, in their order
//   fastlinear_experts_gate_forward    h = act(a g) / a (u + offset), g and u clamped
//   fastlinear_experts_gate_backward   dgate, dup, w h and the routing weights' gradients
//
// A slot is a token and one of its choices. Sorted by expert, slots have places; those whose expert has
// no weight here have place -1 and lie behind all others. Each row is computed by one thread, in one
// order, so that results do not depend on the number of threads.

#include "../../../activations/cpp.h"
#include "../../../kernels/cpu/numbers.h"
#include "../../../kernels/cpu/threads.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

// As passes.py writes it.
struct Call {
  int64_t slots, top, features, hidden, experts, first;
  int64_t kind, weight_kind, wide;  // of the numbers, of the routing weights; whether indices are int64
  int64_t x_row, row, step;         // strides: rows of x; rows of g and u, and their features
  int64_t act;
  double limit, alpha, offset;
};

constexpr int64_t kBlock = 512;   // numbers at a time: they stay in L1
constexpr int64_t kLanes16 = 16;  // sums that run side by side
constexpr int64_t kAlone = 8192;  // numbers below which one thread is faster than waking more

int threads_for(int64_t n) { return n > kAlone ? threads_worth(double(n)) : 1; }

int64_t expert_of(const Call& c, const void* index, int64_t slot) {
  const int64_t found = c.wide ? static_cast<const int64_t*>(index)[slot]
                               : static_cast<const int32_t*>(index)[slot];
  // compared before it is subtracted: that could overflow
  return found < c.first || found >= c.first + c.experts ? c.experts : found - c.first;
}

// f(T{}) for the numbers of a kind.
template <class F>
void of_kind(int64_t kind, const F& f) {
  if (kind == 0) f(float{});
  else if (kind == 1) f(Bf16{});
  else f(Half{});
}

float weight_at(const Call& c, const void* weight, int64_t slot) {
  float found = 0;
  of_kind(c.weight_kind, [&](auto t) { found = wide(static_cast<const decltype(t)*>(weight)[slot]); });
  return found;
}

float sum_of(const float* x, int64_t n) {
  float lanes[kLanes16] = {};
  int64_t i = 0;
  for (; i + kLanes16 <= n; i += kLanes16)
    for (int64_t l = 0; l < kLanes16; ++l) lanes[l] += x[i + l];
  float sum = 0;
  for (; i < n; ++i) sum += x[i];
  for (int64_t l = 0; l < kLanes16; ++l) sum += lanes[l];
  return sum;
}

// The numbers of a gate as a loop reads them.
struct Numbers {
  float limit, alpha, inverse, offset;
  bool clamps;
  explicit Numbers(const Call& c)
      : limit(float(c.limit)), alpha(float(c.alpha)), inverse(1.0f / float(c.alpha)),
        offset(float(c.offset)), clamps(std::isfinite(c.limit)) {}
  float below(float g) const { return g > limit ? limit : g; }  // NaN stays NaN
  float within(float u) const { return u > limit ? limit : (u < -limit ? -limit : u); }
};

// Numbers of a row that lie `step` apart, from float32 and to it.
template <class T>
void load(const T* __restrict from, int64_t step, float* __restrict to, int64_t n) {
  if (step == 1)
    for (int64_t j = 0; j < n; ++j) to[j] = wide(from[j]);
  else
    for (int64_t j = 0; j < n; ++j) to[j] = wide(from[2 * j]);
}

template <class T>
void store(const float* __restrict from, T* __restrict to, int64_t step, int64_t n) {
  if (step == 1)
    for (int64_t j = 0; j < n; ++j) to[j] = narrow<T>(from[j]);
  else
    for (int64_t j = 0; j < n; ++j) to[2 * j] = narrow<T>(from[j]);
}

void values(int64_t act, const Numbers& n, const float* __restrict g, const float* __restrict u,
            float* __restrict h, int64_t w) {
  with(act, [&](auto a) {
    for (int64_t j = 0; j < w; ++j)
      h[j] = decltype(a)::f(n.below(g[j]) * n.alpha) * n.inverse * (n.within(u[j]) + n.offset);
  });
}

// A block of a place's row: its numbers, and what becomes of them.
struct Block {
  float dh[kBlock], gate[kBlock], up[kBlock], dgate[kBlock], dup[kBlock], h[kBlock], sums[kBlock];
};

void derivatives(int64_t act, const Numbers& n, float weight, Block& b, int64_t w) {
  with(act, [&](auto a) {
    using A = decltype(a);
    for (int64_t j = 0; j < w; ++j) {
      const float d = b.dh[j] * weight, at = n.below(b.gate[j]) * n.alpha;
      const float through = A::f(at) * n.inverse, up = n.within(b.up[j]) + n.offset;
      b.dgate[j] = A::d(d * up, at);
      b.dup[j] = d * through;
      b.h[j] = weight * (through * up);
      b.sums[j] = b.dh[j] * (through * up);
    }
  });
  if (!n.clamps) return;
  for (int64_t j = 0; j < w; ++j) {  // none where a number is NaN, as PyTorch's clamp has it
    b.dgate[j] = b.gate[j] <= n.limit ? b.dgate[j] : 0.0f;
    b.dup[j] = (b.up[j] >= -n.limit) & (b.up[j] <= n.limit) ? b.dup[j] : 0.0f;
  }
}

template <class T>
void gate_forward(const Call& c, const T* gate, const T* up, T* h) {
  const Numbers n(c);
  const int64_t blocks = (c.hidden + kBlock - 1) / kBlock;
  for_each(c.slots * blocks, threads_for(c.slots * c.hidden), [&](int64_t t) {
    const int64_t i = t / blocks, j = t % blocks * kBlock, w = std::min(kBlock, c.hidden - j);
    float g[kBlock], u[kBlock], found[kBlock];
    load(gate + i * c.row + j * c.step, c.step, g, w);
    load(up + i * c.row + j * c.step, c.step, u, w);
    values(c.act, n, g, u, found, w);
    store(found, h + i * c.hidden + j, 1, w);
  });
}

template <class T>
float dot(const T* a, const T* b, int64_t n) {
  float products[kBlock], sum = 0;
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t w = std::min(kBlock, n - i);
    for (int64_t j = 0; j < w; ++j) products[j] = wide(a[i + j]) * wide(b[i + j]);
    sum += sum_of(products, w);
  }
  return sum;
}

template <class T>
void gate_backward(const Call& c, const T* dh, const T* gate, const T* up, T* dgate, T* dup, T* h,
                   const int32_t* order, const void* index, const void* weight, void* dweight,
                   const T* dy, const T* bias) {
  const Numbers n(c);
  for_each(c.slots, threads_for(c.slots * c.hidden), [&](int64_t i) {
    const int64_t slot = order[i], expert = expert_of(c, index, slot);
    const bool here = expert < c.experts;
    const float w = here ? weight_at(c, weight, slot) : 0.0f;
    float total = 0;
    Block b;
    if (!here) std::memset(&b, 0, sizeof b);
    for (int64_t j = 0; j < c.hidden; j += kBlock) {
      const int64_t size = std::min(kBlock, c.hidden - j);
      const int64_t dense = i * c.hidden + j, row = i * c.row + j * c.step;
      if (here) {
        load(dh + dense, 1, b.dh, size);
        load(gate + row, c.step, b.gate, size);
        load(up + row, c.step, b.up, size);
        derivatives(c.act, n, w, b, size);
        total += sum_of(b.sums, size);
      }
      if (h) store(b.h, h + dense, 1, size);
      if (dgate) {
        store(b.dgate, dgate + row, c.step, size);
        store(b.dup, dup + row, c.step, size);
      }
    }
    if (here && dweight && bias)
      total += dot(dy + i * c.features, bias + expert * c.features, c.features);
    if (dweight)
      of_kind(c.weight_kind, [&](auto t) {
        static_cast<decltype(t)*>(dweight)[slot] = narrow<decltype(t)>(total);
      });
  });
}

template <class T>
void combine(const Call& c, const T* rows, const int32_t* place, const void* weight, T* y) {
  const int64_t blocks = (c.features + kBlock - 1) / kBlock, tokens = c.slots / c.top;
  for_each(tokens * blocks, threads_for(c.slots * c.features), [&](int64_t task) {
    const int64_t t = task / blocks, j0 = task % blocks * kBlock, n = std::min(kBlock, c.features - j0);
    float sums[kBlock] = {};
    for (int64_t slot = t * c.top; slot < (t + 1) * c.top; ++slot) {
      if (place[slot] < 0) continue;
      const float w = weight ? weight_at(c, weight, slot) : 1.0f;
      const T* row = rows + place[slot] * c.features + j0;
      for (int64_t j = 0; j < n; ++j) sums[j] += w * wide(row[j]);
    }
    for (int64_t j = 0; j < n; ++j) y[t * c.features + j0 + j] = narrow<T>(sums[j]);
  });
}

template <class T>
void gather(const Call& c, const T* x, const int32_t* order, const void* weight, T* out) {
  for_each(c.slots, threads_for(c.slots * c.features), [&](int64_t i) {
    const T* row = x + order[i] / c.top * c.x_row;
    T* to = out + i * c.features;
    if (!weight) return void(std::copy_n(row, c.features, to));
    const float w = weight_at(c, weight, order[i]);
    for (int64_t j = 0; j < c.features; ++j) to[j] = narrow<T>(w * wide(row[j]));
  });
}

}  // namespace

extern "C" void fastlinear_experts_sort(const Call* call, const void* index, int32_t* order,
                                        int32_t* place, int32_t* sizes) {
  const Call& c = *call;
  std::vector<int64_t> next(c.experts + 2);
  for (int64_t s = 0; s < c.slots; ++s) ++next[expert_of(c, index, s) + 1];
  for (int64_t e = 0; e < c.experts; ++e) sizes[e] = int32_t(next[e + 1]);
  for (int64_t e = 0; e < c.experts; ++e) next[e + 1] += next[e];
  for (int64_t s = 0; s < c.slots; ++s) {
    const int64_t e = expert_of(c, index, s), at = next[e]++;
    order[at] = int32_t(s);
    place[s] = e < c.experts ? int32_t(at) : -1;
  }
}

// weight may be null.
extern "C" void fastlinear_experts_gather(const Call* call, const void* x, const int32_t* order,
                                          const void* weight, void* out) {
  of_kind(call->kind, [&](auto t) {
    using T = decltype(t);
    gather(*call, static_cast<const T*>(x), order, weight, static_cast<T*>(out));
  });
}

// weight may be null.
extern "C" void fastlinear_experts_combine(const Call* call, const void* rows, const int32_t* place,
                                           const void* weight, void* y) {
  of_kind(call->kind, [&](auto t) {
    using T = decltype(t);
    combine(*call, static_cast<const T*>(rows), place, weight, static_cast<T*>(y));
  });
}

extern "C" void fastlinear_experts_gate_forward(const Call* call, const void* gate, const void* up,
                                                void* h) {
  of_kind(call->kind, [&](auto t) {
    using T = decltype(t);
    gate_forward(*call, static_cast<const T*>(gate), static_cast<const T*>(up), static_cast<T*>(h));
  });
}

// dgate and dup, h, dweight and bias may be null.
extern "C" void fastlinear_experts_gate_backward(
    const Call* call, const void* dh, const void* gate, const void* up, void* dgate, void* dup,
    void* h, const int32_t* order, const void* index, const void* weight, void* dweight,
    const void* dy, const void* bias) {
  of_kind(call->kind, [&](auto t) {
    using T = decltype(t);
    gate_backward(*call, static_cast<const T*>(dh), static_cast<const T*>(gate),
                  static_cast<const T*>(up), static_cast<T*>(dgate), static_cast<T*>(dup),
                  static_cast<T*>(h), order, index, weight, dweight, static_cast<const T*>(dy),
                  static_cast<const T*>(bias));
  });
}
