// Products of many small groups on the CPU, float32, for processors with 512-bit vectors.
//
//   fastlinear_grouped_product   c_g = a_g b_g + bias_g for every group g
//
// a_g is I x L, b_g is L x J, c_g is I x J, each by strides; columns of c lie side by side. Every
// operand whose rows or columns do not is packed first, a part of L at a time. Sums are float32, each
// part of L in order, so that results do not depend on the number of threads.

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kVector = 16;  // numbers of a vector
constexpr int64_t kPart = 256;   // of L at a time
constexpr int64_t kBlock = 256;  // rows of c that one thread takes at a time
constexpr int kRows = 6;         // rows of c in registers
constexpr int kVectors = 4;      // vectors of each

typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));

// In a forked process OpenMP still counts on the threads of the parent, and the thread that forked
// would wait for them for ever. It computes alone.
uint64_t forking_thread = 0;
bool forked() { return forking_thread && forking_thread == uint64_t(pthread_self()); }
[[maybe_unused]] const int fork_noticed =
    pthread_atfork(nullptr, nullptr, [] { forking_thread = uint64_t(pthread_self()); });

struct Matrix {
  const float* at;
  int64_t group, row, col;  // strides
};

inline Vector loaded(const float* from) { return *reinterpret_cast<const Vector*>(from); }

inline Vector loaded(const float* from, int64_t count) {
  float part[kVector] = {};
  std::memcpy(part, from, count * sizeof(float));
  return loaded(part);
}

// c (R x V vectors, the last of `tail` numbers) = start + a b, or c + a b; a by strides, b packed.
template <int R, int V>
void tile(const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t b_row, int64_t depth,
          const float* start, bool add, float* c, int64_t c_row, int64_t tail) {
  Vector sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const float* from = c + r * c_row + v * kVector;
      const bool cut = v == V - 1 && tail < kVector;
      sum[r][v] = !add ? loaded(start + v * kVector) : cut ? loaded(from, tail) : loaded(from);
    }
  }
  for (int64_t l = 0; l < depth; ++l) {
    Vector right[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) right[v] = loaded(b + l * b_row + v * kVector);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const float left = a[r * a_row + l * a_col];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] += left * right[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* to = c + r * c_row + v * kVector;
      const Vector done = sum[r][v];
      if (v == V - 1 && tail < kVector) {
        float part[kVector];
        *reinterpret_cast<Vector*>(part) = done;
        std::memcpy(to, part, tail * sizeof(float));
      } else {
        *reinterpret_cast<Vector*>(to) = done;
      }
    }
  }
}

template <int V>
void rows(int64_t count, const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t b_row,
          int64_t depth, const float* start, bool add, float* c, int64_t c_row, int64_t tail) {
  int64_t i = 0;
  for (; i + kRows <= count; i += kRows)
    tile<kRows, V>(a + i * a_row, a_row, a_col, b, b_row, depth, start, add, c + i * c_row, c_row,
                   tail);
  for (; i < count; ++i)
    tile<1, V>(a + i * a_row, a_row, a_col, b, b_row, depth, start, add, c + i * c_row, c_row, tail);
}

void columns(int vectors, int64_t count, const float* a, int64_t a_row, int64_t a_col,
             const float* b, int64_t b_row, int64_t depth, const float* start, bool add, float* c,
             int64_t c_row, int64_t tail) {
  switch (vectors) {
    case 1: return rows<1>(count, a, a_row, a_col, b, b_row, depth, start, add, c, c_row, tail);
    case 2: return rows<2>(count, a, a_row, a_col, b, b_row, depth, start, add, c, c_row, tail);
    case 3: return rows<3>(count, a, a_row, a_col, b, b_row, depth, start, add, c, c_row, tail);
    default: return rows<4>(count, a, a_row, a_col, b, b_row, depth, start, add, c, c_row, tail);
  }
}

// from (lines x width) by strides → to, width numbers side by side, lines `pitch` apart.
void pack(const float* from, int64_t line, int64_t col, int64_t lines, int64_t width, float* to,
          int64_t pitch) {
  if (col == 1) {
    for (int64_t l = 0; l < lines; ++l)
      std::memcpy(to + l * pitch, from + l * line, width * sizeof(float));
    return;
  }
  for (int64_t w0 = 0; w0 < width; w0 += kVector) {
    const int64_t most = std::min(width, w0 + kVector);
    for (int64_t l = 0; l < lines; ++l)
      for (int64_t w = w0; w < most; ++w) to[l * pitch + w] = from[l * line + w * col];
  }
}

void block(const Matrix& a, const Matrix& b, const float* bias, float* c, int64_t c_row, int64_t g,
           int64_t i0, int64_t count, int64_t L, int64_t J, std::vector<float>& memory) {
  const int64_t pitch = (J + kVector - 1) / kVector * kVector;
  const bool packs_a = a.col != 1;
  memory.resize(pitch + kPart * (pitch + (packs_a ? count : 0)));
  float *start = memory.data(), *right = start + pitch, *left = right + kPart * pitch;
  std::fill(start, start + pitch, 0.0f);
  if (bias) std::memcpy(start, bias + g * J, J * sizeof(float));
  for (int64_t l0 = 0; l0 == 0 || l0 < L; l0 += kPart) {
    const int64_t depth = std::min(kPart, L - l0);
    if (pitch > J)
      for (int64_t l = 0; l < depth; ++l)
        std::fill(right + l * pitch + J, right + (l + 1) * pitch, 0.0f);
    pack(b.at + g * b.group + l0 * b.row, b.row, b.col, depth, J, right, pitch);
    const float* from = a.at + g * a.group + i0 * a.row + l0 * a.col;
    int64_t a_row = a.row, a_col = a.col;
    if (packs_a) {
      pack(from, a.col, a.row, depth, count, left, count);
      from = left, a_row = 1, a_col = count;
    }
    for (int64_t j = 0; j < J; j += kVectors * kVector) {
      const int64_t width = std::min(J - j, kVectors * kVector);
      const int vectors = int((width + kVector - 1) / kVector);
      const int64_t tail = width - (vectors - 1) * kVector;
      columns(vectors, count, from, a_row, a_col, right + j, pitch, depth, start + j, l0 > 0, c + j,
              c_row, tail);
    }
  }
}

}  // namespace

extern "C" void fastlinear_forked(uint64_t thread) { forking_thread = thread; }

extern "C" int fastlinear_grouped_product(const float* a, int64_t a_group, int64_t a_row,
                                          int64_t a_col, const float* b, int64_t b_group,
                                          int64_t b_row, int64_t b_col, const float* bias, float* c,
                                          int64_t c_group, int64_t c_row, int64_t G, int64_t I,
                                          int64_t L, int64_t J, int threads) {
  const Matrix left{a, a_group, a_row, a_col}, right{b, b_group, b_row, b_col};
  const int64_t blocks = (I + kBlock - 1) / kBlock, tasks = G * blocks;
  const bool alone = tasks < 2 || G * I * L * J < 200000 || forked();
  bool failed = false;
#pragma omp parallel num_threads(threads) if (!alone)
  {
    std::vector<float> memory;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t g = task / blocks, i0 = task % blocks * kBlock;
      const int64_t count = std::min(kBlock, I - i0);
      try {
        block(left, right, bias, c + g * c_group + i0 * c_row, c_row, g, i0, count, L, J, memory);
      } catch (...) {
        failed = true;
      }
    }
  }
  return failed;
}
