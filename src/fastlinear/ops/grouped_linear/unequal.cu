// Products of many groups of unequal sizes in one launch, for sm_80 and later.
//
// MODE 0: c = act(a b^T + bias), with the pre-activation where SAVE_PRE; a is x, b is W
// MODE 1: c = d b, d = dy act'(saved); a is dy, b is W: dx
// MODE 2: c = d^T b, d as above, and its sums over tokens; a is dy, b is x: dW and db
//
// All matrices are dense. A block computes one tile of 64 x 64 of one group; tiles are numbered
// through all groups, and a launch carries the groups' pointers and sizes among its arguments. Words
// are 4 bytes: two 16-bit numbers or one float32. 16-bit products go through the matrix units with
// float32 sums, float32 ones are plain float32 arithmetic, all in a fixed order.
//
// Macros from the host: MODE KIND (0 float16, 1 bfloat16, 2 float32) ACT (a number below) SAVE_PRE
// GROUPS (most groups of a launch).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

enum { NONE, RELU, RELU2, SILU, GELU, GELU_TANH, SIGMOID, TANH, QUICK_GELU, LEAKY_RELU };

constexpr bool WIDE = KIND == 2;
constexpr int PER = WIDE ? 1 : 2;  // numbers of a word
constexpr int TILE = 64, WORDS = 16, PITCH = WORDS + 4;  // pitch: 8 rows share no bank
constexpr int THREADS = 128, EACH = TILE * WORDS / THREADS;
constexpr bool A_TURNED = MODE == 2, B_TURNED = MODE != 0;

#if KIND == 2
typedef float Number;
#else
typedef u16 Number;
#endif

struct Group {
  const Number* a;
  const Number* saved;
  const Number* b;
  const Number* bias;
  Number* c;
  Number* more;  // the pre-activation, or db
  int rows, cols, depth;
  int first;  // tile
};

struct Groups {
  Group at[GROUPS];
};

__device__ __forceinline__ float wide(float v) { return v; }

__device__ __forceinline__ float wide(u16 v) {
  float out;
  if (KIND == 1)
    out = __uint_as_float(static_cast<u32>(v) << 16);
  else
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(v));
  return out;
}

__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 out;
  if (WIDE)
    out = __float_as_uint(lo);
  else if (KIND == 1)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
  return out;
}

__device__ __forceinline__ void put(float* to, float v) { *to = v; }

__device__ __forceinline__ void put(u16* to, float v) { *to = static_cast<u16>(pack(v, 0.0f)); }

__device__ __forceinline__ float logistic(float v) { return 1.0f / (1.0f + expf(-v)); }

__device__ __forceinline__ float activated(float v) {
  if (ACT == RELU) return v < 0.0f ? 0.0f : v;
  if (ACT == RELU2) return v < 0.0f ? 0.0f : v * v;
  if (ACT == SILU) return v / (1.0f + expf(-v));
  if (ACT == QUICK_GELU) return v / (1.0f + expf(-1.702f * v));
  if (ACT == GELU) return 0.5f * v * erfcf(-0.7071067811865476f * v);
  if (ACT == GELU_TANH) {
    const float twice = v * (1.5957691216057308f + 0.07135481627260025f * v * v);
    return v / (1.0f + expf(-twice));
  }
  if (ACT == SIGMOID) return logistic(v);
  if (ACT == TANH) return tanhf(v);
  if (ACT == LEAKY_RELU) return v < 0.0f ? 0.01f * v : v;
  return v;
}

// dy act'(pre), from the output of relu, leaky_relu, sigmoid and tanh, else the pre-activation.
__device__ __forceinline__ float derived(float dy, float s) {
  if (ACT == RELU) return s <= 0.0f ? 0.0f : dy;
  if (ACT == LEAKY_RELU) return s > 0.0f ? dy : 0.01f * dy;
  if (ACT == RELU2) return dy * (2.0f * (s < 0.0f ? 0.0f : s));
  if (ACT == SIGMOID) return dy * (s * (1.0f - s));
  if (ACT == TANH) return dy * (1.0f - s * s);
  if (ACT == SILU) {
    const float g = logistic(s);
    return dy * (g * (1.0f + s * (1.0f - g)));
  }
  if (ACT == QUICK_GELU) {
    const float g = logistic(1.702f * s);
    return dy * (g * (1.0f + 1.702f * s * (1.0f - g)));
  }
  if (ACT == GELU_TANH) {
    const float u = s * (0.7978845608028654f + 0.035677408136300125f * s * s);
    const float slope = 0.7978845608028654f + 0.10703222440890037f * s * s, t = tanhf(u);
    return dy * (0.5f * (1.0f + t) + 0.5f * s * (1.0f - t * t) * slope);
  }
  if (ACT == GELU) {
    const float density = 0.3989422804014327f * expf(-0.5f * s * s);
    return dy * (0.5f * erfcf(-0.7071067811865476f * s) + s * density);
  }
  return dy;
}

// The numbers of a word: row `row`, and along the depth from `k` on; 0 outside. A matrix is
// (rows, depth), or (depth, rows) where TURNED.
template <bool TURNED>
__device__ __forceinline__ void fetch(float (&v)[2], const Number* from, int rows, int depth,
                                      int row, int k) {
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const u64 at = TURNED ? static_cast<u64>(k + i) * rows + row
                          : static_cast<u64>(row) * depth + k + i;
    v[i] = row < rows && k + i < depth ? wide(from[at]) : 0.0f;
  }
}

// Where the i-th word of a thread lies in a tile: neighbours in memory by neighbouring threads.
template <bool TURNED>
__device__ __forceinline__ void placed(int i, int& row, int& word) {
  const int t = threadIdx.x;
  row = TURNED ? t % TILE : t / WORDS + i * (THREADS / WORDS);
  word = TURNED ? t / TILE + i * (THREADS / TILE) : t % WORDS;
}

struct Tile {
  u32 word[EACH];
};

template <bool TURNED, bool DERIVED>
__device__ __forceinline__ void fetch_tile(Tile& tile, const Number* from, const Number* saved,
                                           int rows, int depth, int row0, int k0, double* sum) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int row, word;
    placed<TURNED>(i, row, word);
    float v[2] = {0.0f, 0.0f};
    fetch<TURNED>(v, from, rows, depth, row0 + row, k0 + word * PER);
    if (DERIVED && ACT != NONE) {
      float s[2] = {0.0f, 0.0f};
      fetch<TURNED>(s, saved, rows, depth, row0 + row, k0 + word * PER);
      v[0] = derived(v[0], s[0]);
      v[1] = derived(v[1], s[1]);
    }
    tile.word[i] = pack(v[0], v[1]);
    if (DERIVED && MODE == 2) {  // the sums are over what the products see
      *sum += WIDE ? v[0]
                   : wide(static_cast<u16>(tile.word[i])) +
                         wide(static_cast<u16>(tile.word[i] >> 16));
    }
  }
}

template <bool TURNED>
__device__ __forceinline__ void store_tile(u32 (&to)[TILE][PITCH], const Tile& tile) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int row, word;
    placed<TURNED>(i, row, word);
    to[row][word] = tile.word[i];
  }
}

#if KIND != 2
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#define PRODUCT(type)                                                              \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type             \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"       \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#if KIND == 1
  PRODUCT("bf16");
#else
  PRODUCT("f16");
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2)
grouped_linear_unequal(const __grid_constant__ Groups groups, int count) {
  __shared__ __align__(16) u32 a_tile[TILE][PITCH];
  __shared__ __align__(16) u32 b_tile[TILE][PITCH];
  int low = 0, high = count;  // the last group whose first tile is not past this block's
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (groups.at[middle].first <= static_cast<int>(blockIdx.x))
      low = middle;
    else
      high = middle;
  }
  const Group& g = groups.at[low];
  const int rows = g.rows, cols = g.cols, depth = g.depth;
  const int across = (cols + TILE - 1) / TILE, tile = blockIdx.x - g.first;
  const int row0 = tile / across * TILE, col0 = tile % across * TILE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_w = warp / 2 * 32, col_w = warp % 2 * 32;

  float acc[32] = {};
  double sum = 0.0;  // many numbers, of which little may be left
  Tile a, b;
  const auto fetch_both = [&](int k) {
    fetch_tile<A_TURNED, MODE != 0>(a, g.a, g.saved, rows, depth, row0, k, &sum);
    fetch_tile<B_TURNED, false>(b, g.b, nullptr, cols, depth, col0, k, nullptr);
  };
  fetch_both(0);
  for (int k = 0; k < depth; k += WORDS * PER) {
    __syncthreads();
    store_tile<A_TURNED>(a_tile, a);
    store_tile<B_TURNED>(b_tile, b);
    __syncthreads();
    if (k + WORDS * PER < depth) fetch_both(k + WORDS * PER);
#if KIND == 2
    float part[32] = {};  // sums of sums: their error grows with fewer terms
#pragma unroll
    for (int w = 0; w < WORDS; w += 4) {
      float4 left[4], right[8];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        left[i] = *reinterpret_cast<const float4*>(&a_tile[row_w + lane / 4 + 8 * i][w]);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        right[j] = *reinterpret_cast<const float4*>(&b_tile[col_w + lane % 4 + 4 * j][w]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float& c = part[8 * i + j];
          c = fmaf(left[i].x, right[j].x, c);
          c = fmaf(left[i].y, right[j].y, c);
          c = fmaf(left[i].z, right[j].z, c);
          c = fmaf(left[i].w, right[j].w, c);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) acc[i] += part[i];
#else
#pragma unroll
    for (int w = 0; w < WORDS; w += 8) {
      u32 left[2][4], right[4][2];
      const int at = w + lane % 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = row_w + 16 * i + lane / 4;
        left[i][0] = a_tile[row][at];
        left[i][1] = a_tile[row + 8][at];
        left[i][2] = a_tile[row][at + 4];
        left[i][3] = a_tile[row + 8][at + 4];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        right[j][0] = b_tile[col_w + 8 * j + lane / 4][at];
        right[j][1] = b_tile[col_w + 8 * j + lane / 4][at + 4];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          multiply(*reinterpret_cast<float(*)[4]>(acc + 16 * i + 4 * j), left[i], right[j][0],
                   right[j][1]);
      }
    }
#endif
  }

#pragma unroll
  for (int i = 0; i < 32; ++i) {
#if KIND == 2
    const int row = row0 + row_w + lane / 4 + 8 * (i / 8);
    const int col = col0 + col_w + lane % 4 + 4 * (i % 8);
#else
    const int row = row0 + row_w + 16 * (i / 16) + lane / 4 + 8 * (i % 4 / 2);
    const int col = col0 + col_w + 8 * (i % 16 / 4) + lane % 4 * 2 + i % 2;
#endif
    if (row < rows && col < cols) {
      const u64 at = static_cast<u64>(row) * cols + col;
      float v = acc[i];
      if (MODE == 0) {
        if (g.bias) v += wide(g.bias[col]);
        if (SAVE_PRE) put(g.more + at, v);
        v = activated(v);
      }
      put(g.c + at, v);
    }
  }

  if (MODE == 2 && col0 == 0 && g.more) {  // two threads hold the sums of each row
    __syncthreads();
    double* sums = reinterpret_cast<double*>(a_tile);
    sums[threadIdx.x] = sum;
    __syncthreads();
    const int row = row0 + threadIdx.x;
    if (threadIdx.x < TILE && row < rows)
      put(g.more + row, static_cast<float>(sums[threadIdx.x] + sums[threadIdx.x + TILE]));
  }
}
