// y = act(x W^T + b) of many narrow groups, for Hopper: strips of groups side by side.
//
// A strip is P groups whose columns lie together in memory, so that its part of a row of x, and of y,
// begins and ends at 16 bytes though that of one group may not. A block holds the weights of its strip
// in registers and walks tiles of ROWS tokens: one warp brings x in and one takes y out, a row a lane,
// through the copy engine, while the others multiply. Warp p of P * PARTS computes NT tiles of 8
// outputs of one group. A word is 4 bytes: two 16-bit numbers. Sums are float32, in a fixed order.
//
// Macros from the host: IS_BF16 K N P PARTS NT STAGES Y_STAGES BLOCKS
// X_PITCH Y_PITCH (bytes between rows in shared memory) ACT (a number below) HAS_BIAS SAVE_PRE.

typedef unsigned int u32;
typedef unsigned long long u64;

enum { NONE, RELU, RELU2, SILU, GELU, GELU_TANH, SIGMOID, TANH, QUICK_GELU, LEAKY_RELU };

constexpr int SIZE = 2;
constexpr int ROWS = 32;
constexpr int KW = K * SIZE / 4;              // words of a group's row of x
constexpr int NW = N * SIZE / 4;              // words of a group's row of y
constexpr int STEPS = KW / 8;                 // whole steps of 8 words
constexpr int REST = KW % 8;                  // words of the last step, 0 where there is none
constexpr int ALL = STEPS + (REST ? 1 : 0);
constexpr int WARPS = P * PARTS;
constexpr int THREADS = 32 * (WARPS + 2);
constexpr int X_STAGE = ROWS * X_PITCH, Y_STAGE = ROWS * Y_PITCH;
constexpr u32 X_ROW = P * K * SIZE, Y_ROW = P * N * SIZE;
constexpr int OUTPUTS = SAVE_PRE ? 2 : 1;

static_assert(X_ROW % 16 == 0 && Y_ROW % 16 == 0, "strips of whole 16 bytes");
static_assert(K * SIZE % 4 == 0 && N * SIZE % 4 == 0 && N % 2 == 0, "whole words, columns in pairs");
static_assert(8 * NT * PARTS >= N, "every output has a warp");

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void bar_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bar_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(bar)
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ u32 load_word(u32 from) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
  return v;
}

__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 out;
  if (IS_BF16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
  return out;
}

__device__ __forceinline__ float unpacked(unsigned short half) {
  float out;
  if (IS_BF16)
    out = __uint_as_float(static_cast<u32>(half) << 16);
  else
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(half));
  return out;
}

// c += a b, a of 16 rows and 8 words (4 where HALF), b of 8 columns.
template <bool HALF>
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#define FOUR "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#define FULL(shape, type)                                                                       \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type                          \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                     \
               : FOUR                                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#define LEFT(shape, type)                                                                       \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type                          \
               ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"                              \
               : FOUR                                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(b0))
#if IS_BF16
  if (HALF) LEFT("m16n8k8", "bf16"); else FULL("m16n8k16", "bf16");
#else
  if (HALF) LEFT("m16n8k8", "f16"); else FULL("m16n8k16", "f16");
#endif
}

__device__ __forceinline__ float activated(float v) {
  if (ACT == RELU) return v < 0.0f ? 0.0f : v;
  if (ACT == RELU2) return v < 0.0f ? 0.0f : v * v;
  if (ACT == SILU) return __fdividef(v, 1.0f + __expf(-v));
  if (ACT == QUICK_GELU) return __fdividef(v, 1.0f + __expf(-1.702f * v));
  if (ACT == GELU) {  // Abramowitz & Stegun 7.1.26: absolute error 1.5e-7 of the distribution
    const float t = __fdividef(1.0f, 1.0f + 0.23164189f * fabsf(v));
    float p = 0.5307027145f * t - 0.7265760135f;
    p = p * t + 0.7107068705f;
    p = p * t - 0.142248368f;
    p = p * t + 0.127414796f;
    p = p * t * __expf(-0.5f * v * v);
    return v * (v < 0.0f ? p : 1.0f - p);
  }
  if (ACT == GELU_TANH) {
    const float twice = v * (1.5957691216057308f + 0.07135481627260025f * v * v);
    return __fdividef(v, 1.0f + __expf(-twice));
  }
  if (ACT == SIGMOID) return __fdividef(1.0f, 1.0f + __expf(-v));
  if (ACT == TANH) return tanhf(v);
  if (ACT == LEAKY_RELU) return v < 0.0f ? 0.01f * v : v;
  return v;
}

// Weights of one warp, as the multiplier takes them: B of NT tiles and all steps.
struct Weights {
  u32 word[NT][ALL][2];
};

__device__ __forceinline__ void load_weights(Weights& w, const u32* group, int first, int lane) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int n = first + 8 * j + lane / 4;
#pragma unroll
    for (int s = 0; s < ALL; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = 8 * s + 4 * half + lane % 4;
        w.word[j][s][half] = n < N && k < KW ? group[n * KW + k] : 0u;
      }
    }
  }
}

// The two outputs' biases a lane needs of each tile, as they are in memory.
struct Biases {
  u32 word[NT];
};

__device__ __forceinline__ void load_biases(Biases& add, const char* bias, u64 group, int first,
                                            int lane) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int n = first + 8 * j + lane % 4 * 2;
    add.word[j] = 0u;
    if (HAS_BIAS && n < N) add.word[j] = reinterpret_cast<const u32*>(bias)[(group * N + n) / 2];
  }
}

__device__ __forceinline__ float bias_of(const Biases& add, int j, int c) {
  if (!HAS_BIAS) return 0.0f;
  return unpacked(static_cast<unsigned short>(add.word[j] >> (16 * c)));
}

template <bool HALF>
__device__ __forceinline__ void step(float (&acc)[NT][4], const Weights& w, int s, u32 from,
                                     int lane) {
  u32 a[4] = {0u, 0u, 0u, 0u};
  const int word = 8 * s + lane % 4;
#pragma unroll
  for (int half = 0; half < (HALF ? 1 : 2); ++half) {
    if (8 * s + 4 * half + 4 <= KW || word + 4 * half < KW) {
      a[2 * half] = load_word(from + 16 * half + 32 * s);
      a[2 * half + 1] = load_word(from + 16 * half + 32 * s + 8 * X_PITCH);
    }
  }
#pragma unroll
  for (int j = 0; j < NT; ++j) multiply<HALF>(acc[j], a, w.word[j][s][0], w.word[j][s][1]);
}

__device__ __forceinline__ void store_pair(u32 to, int column, float a, float b) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + 2 * column), "r"(pack(a, b)) : "memory");
}

// x (M, G, K), its rows x_pitch bytes apart; W (G, N, K); bias (G, N); y and pre (M, G, N), dense.
// The grid is strips * chunks blocks; block (strip, chunk) takes tiles chunk, chunk + chunks, ...
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
grouped_linear_strips(const char* __restrict__ x, const char* __restrict__ weight,
                      const char* __restrict__ bias, char* __restrict__ y, char* __restrict__ pre,
                      int M, u64 x_pitch, int strips, int chunks) {
  extern __shared__ __align__(128) char memory[];
  __shared__ __align__(8) u64 bars[2 * STAGES + 2 * Y_STAGES];
  const u32 x_memory = shared_address(memory), y_memory = x_memory + STAGES * X_STAGE;
  const u32 full = shared_address(bars), empty = full + 8 * STAGES;
  const u32 done = empty + 8 * STAGES, taken = done + 8 * Y_STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int strip = blockIdx.x % strips, chunk = blockIdx.x / strips;
  const int tiles = (M + ROWS - 1) / ROWS;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      bar_init(full + 8 * s, 1);
      bar_init(empty + 8 * s, WARPS);
    }
    for (int s = 0; s < Y_STAGES; ++s) {
      bar_init(done + 8 * s, WARPS);
      bar_init(taken + 8 * s, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp == WARPS) {  // brings x in
    const char* from = x + static_cast<u64>(strip) * X_ROW;
    int i = 0;
    for (int tile = chunk; tile < tiles; tile += chunks, ++i) {
      const int stage = i % STAGES;
      if (i >= STAGES) bar_wait(empty + 8 * stage, (i / STAGES - 1) & 1);
      const int row = tile * ROWS + lane, rows = min(ROWS, M - tile * ROWS);
      if (lane == 0) bar_expect(full + 8 * stage, rows * X_ROW);
      __syncwarp();
      if (row < M)
        bulk_load(x_memory + stage * X_STAGE + lane * X_PITCH, from + row * x_pitch, X_ROW,
                  full + 8 * stage);
    }
  } else if (warp == WARPS + 1) {  // takes y out
    const u64 y_pitch = static_cast<u64>(strips) * Y_ROW;
    int i = 0;
    for (int tile = chunk; tile < tiles; tile += chunks, ++i) {
      const int stage = i % Y_STAGES;
      bar_wait(done + 8 * stage, (i / Y_STAGES) & 1);
      const int row = tile * ROWS + lane;
      const u64 place = row * y_pitch + static_cast<u64>(strip) * Y_ROW;
      const u32 from = y_memory + stage * OUTPUTS * Y_STAGE + lane * Y_PITCH;
      if (row < M) {
        bulk_store(y + place, from, Y_ROW);
        if (SAVE_PRE) bulk_store(pre + place, from + Y_STAGE, Y_ROW);
      }
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Y_STAGES - 1) : "memory");
      __syncwarp();
      if (i >= Y_STAGES - 1 && lane == 0) bar_arrive(taken + 8 * ((i + 1) % Y_STAGES));
    }
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  } else {
    const int part = warp / P, p = warp % P, first = 8 * NT * part;
    const u64 group = static_cast<u64>(strip) * P + p;
    Weights w;
    load_weights(w, reinterpret_cast<const u32*>(weight) + group * (N * KW), first, lane);
    Biases add;
    load_biases(add, bias, group, first, lane);
    const u32 x_mine = x_memory + lane / 4 * X_PITCH + p * (K * SIZE) + lane % 4 * 4;
    const u32 y_mine = y_memory + lane / 4 * Y_PITCH + p * (N * SIZE);
    int i = 0;
    for (int tile = chunk; tile < tiles; tile += chunks, ++i) {
      const int stage = i % STAGES, out = i % Y_STAGES;
      bar_wait(full + 8 * stage, (i / STAGES) & 1);
#pragma unroll 1
      for (int block = 0; block < ROWS / 16; ++block) {
        float acc[NT][4];
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          acc[j][0] = acc[j][2] = bias_of(add, j, 0);
          acc[j][1] = acc[j][3] = bias_of(add, j, 1);
        }
        const u32 from = x_mine + stage * X_STAGE + block * 16 * X_PITCH;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) step<false>(acc, w, s, from, lane);
        if (REST) step<(REST <= 4)>(acc, w, ALL - 1, from, lane);
        if (block == ROWS / 16 - 1) {
          __syncwarp();
          if (lane == 0) bar_arrive(empty + 8 * stage);
        }
        if (block == 0 && i >= Y_STAGES) bar_wait(taken + 8 * out, (i / Y_STAGES - 1) & 1);
        const u32 to = y_mine + out * OUTPUTS * Y_STAGE + block * 16 * Y_PITCH;
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          const int column = first + 8 * j + lane % 4 * 2;
          if (column < N) {
            if (SAVE_PRE) {
              store_pair(to + Y_STAGE, column, acc[j][0], acc[j][1]);
              store_pair(to + Y_STAGE + 8 * Y_PITCH, column, acc[j][2], acc[j][3]);
            }
            store_pair(to, column, activated(acc[j][0]), activated(acc[j][1]));
            store_pair(to + 8 * Y_PITCH, column, activated(acc[j][2]), activated(acc[j][3]));
          }
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) bar_arrive(done + 8 * out);
    }
  }
}
