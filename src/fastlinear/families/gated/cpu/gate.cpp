// The elementwise pieces of a gated MLP on the CPU, float32 and bfloat16, one pass over memory.
//
//   fastlinear_gate_forward    h = act(gate) up
//   fastlinear_gate_backward   dgate = dh up act'(gate), dup = dh act(gate), h = act(gate) up, and the
//                              column sums of dgate and dup in the same pass
//
// gate, up, dgate and dup share a row stride and a column stride (1, or 2 where they are interleaved);
// dh and h are dense. Results may lie over what they are made of: h over gate in the forward; in the
// backward h over dh, dgate and dup over gate and up. Sums: kRows rows in float32, then into float64, over chunks
// of rows that depend on the sizes alone, so that results do not depend on the number of threads.

#include "../../../activations/cpp.h"

#include "../../../kernels/cpu/threads.h"

#include <vector>

namespace {

constexpr int64_t kBlock = 512;   // columns at a time: their numbers and sums stay in L1
constexpr int64_t kRows = 8;      // rows summed in float32 before going to float64
constexpr int64_t kAlone = 8192;  // numbers below which one thread is faster than waking more

int threads_for(int64_t n) { return n > kAlone ? threads_worth(n) : 1; }

using Bf16 = uint16_t;

inline float wide(float x) { return x; }
inline float wide(Bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
template <class T>
inline T narrow(float x);
template <>
inline float narrow<float>(float x) { return x; }
template <>
inline Bf16 narrow<Bf16>(float x) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return Bf16(x != x ? 0x7fc0u : rounded);
}

template <class A, class T, int kStep>
void forward_all(const T* gate, const T* up, T* h, int64_t m, int64_t n, int64_t row) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  const int threads = threads_for(m * n);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < m * blocks; ++t) {
    const int64_t i = t / blocks, j0 = t % blocks * kBlock;
    const int64_t w = n - j0 < kBlock ? n - j0 : kBlock;
    const T* g = gate + i * row + j0 * kStep;
    const T* u = up + i * row + j0 * kStep;
    T* o = h + i * n + j0;
    // as in the backward: g may be o
#pragma GCC ivdep
    for (int64_t j = 0; j < w; ++j) o[j] = narrow<T>(A::f(wide(g[j * kStep])) * wide(u[j * kStep]));
  }
}

template <class A, class T, int kStep>
inline void backward_row(const T* dh, const T* gate, const T* up, T* dgate, T* dup, T* h,
                         float* __restrict sum_g, float* __restrict sum_u, int64_t w) {
  // What is written may be what is read, at the same place: each number is read before it is
  // written, so the loop has no dependence
#pragma GCC ivdep
  for (int64_t j = 0; j < w; ++j) {
    const float d = wide(dh[j]), g = wide(gate[j * kStep]), u = wide(up[j * kStep]);
    const float a = A::f(g), to_gate = A::d(d * u, g), to_up = d * a;
    dgate[j * kStep] = narrow<T>(to_gate);
    dup[j * kStep] = narrow<T>(to_up);
    h[j] = narrow<T>(a * u);
    sum_g[j] += to_gate;
    sum_u[j] += to_up;
  }
}

template <class A, class T, int kStep>
void backward_all(const T* dh, const T* gate, const T* up, T* dgate, T* dup, T* h, T* sum_gate,
                  T* sum_up, int64_t m, int64_t n, int64_t row, int64_t most_chunks) {
  int64_t chunks = 1 + m * n / kAlone;
  if (chunks > most_chunks) chunks = most_chunks;
  if (chunks > m) chunks = m;
  const bool sums = sum_gate || sum_up;
  std::vector<double> partials(sums ? 2 * chunks * n : 0);
  const int threads = threads_for(m * n);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t r0 = m * c / chunks, r1 = m * (c + 1) / chunks;
    double* total_g = partials.data() + 2 * c * n;
    double* total_u = total_g + n;
    float in_g[kBlock], in_u[kBlock];
    for (int64_t r = r0; r < r1; r += kRows) {
      const int64_t stop = r + kRows < r1 ? r + kRows : r1;
      for (int64_t j = 0; j < n; j += kBlock) {
        const int64_t w = n - j < kBlock ? n - j : kBlock;
        for (int64_t i = 0; i < w; ++i) in_g[i] = in_u[i] = 0.0f;
        for (int64_t i = r; i < stop; ++i) {
          const int64_t dense = i * n + j, apart = i * row + j * kStep;
          backward_row<A, T, kStep>(dh + dense, gate + apart, up + apart, dgate + apart,
                                    dup + apart, h + dense, in_g, in_u, w);
        }
        if (!sums) continue;
        for (int64_t i = 0; i < w; ++i) total_g[j + i] += in_g[i], total_u[j + i] += in_u[i];
      }
    }
  }
  if (!sums) return;
  for (int64_t j = 0; j < n; ++j) {
    double g = 0.0, u = 0.0;
    for (int64_t c = 0; c < chunks; ++c) {
      g += partials[2 * c * n + j];
      u += partials[2 * c * n + n + j];
    }
    if (sum_gate) sum_gate[j * kStep] = narrow<T>(static_cast<float>(g));
    if (sum_up) sum_up[j * kStep] = narrow<T>(static_cast<float>(u));
  }
}

template <class T>
int forward(int which, const T* gate, const T* up, T* h, int64_t m, int64_t n, int64_t row,
            int64_t step) {
#define REST gate, up, h, m, n, row
  return !with(which, [&](auto a) {
    using A = decltype(a);
    step == 1 ? forward_all<A, T, 1>(REST) : forward_all<A, T, 2>(REST);
  });
#undef REST
}

template <class T>
int backward(int which, const T* dh, const T* gate, const T* up, T* dgate, T* dup, T* h,
             T* sum_gate, T* sum_up, int64_t m, int64_t n, int64_t row, int64_t step,
             int64_t chunks) {
#define REST dh, gate, up, dgate, dup, h, sum_gate, sum_up, m, n, row, chunks
  return !with(which, [&](auto a) {
    using A = decltype(a);
    step == 1 ? backward_all<A, T, 1>(REST) : backward_all<A, T, 2>(REST);
  });
#undef REST
}

}  // namespace

// `half`: the numbers are bfloat16, else float32. step: 1 or 2.
extern "C" int fastlinear_gate_forward(int which, int half, const void* gate, const void* up,
                                       void* h, int64_t m, int64_t n, int64_t row, int64_t step) {
#define CALL(T)                                                                              \
  forward<T>(which, static_cast<const T*>(gate), static_cast<const T*>(up),                  \
             static_cast<T*>(h), m, n, row, step)
  return half ? CALL(Bf16) : CALL(float);
#undef CALL
}

// sum_gate and sum_up may be null; their numbers lie `step` apart.
extern "C" int fastlinear_gate_backward(int which, int half, const void* dh, const void* gate,
                                        const void* up, void* dgate, void* dup, void* h,
                                        void* sum_gate, void* sum_up, int64_t m, int64_t n,
                                        int64_t row, int64_t step, int64_t chunks) {
#define CALL(T)                                                                                \
  backward<T>(which, static_cast<const T*>(dh), static_cast<const T*>(gate),                   \
              static_cast<const T*>(up), static_cast<T*>(dgate), static_cast<T*>(dup),         \
              static_cast<T*>(h), static_cast<T*>(sum_gate), static_cast<T*>(sum_up), m, n, row, \
              step, chunks)
  return half ? CALL(Bf16) : CALL(float);
#undef CALL
}
