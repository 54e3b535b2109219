// y = act(x W^T + b) of many narrow groups in float32, for Hopper. The texts of packed_groups_instructions.h,
// packed_groups_tiles.h, activations/cuda.h and packed_groups_float32.h stand before this one.
//
// A strip is one group, whose rows begin and end at 16 bytes by themselves. One warp has tiles of ROWS
// tokens brought in by the copy engine, another has y taken out, two more only lend registers. PARTS
// warps are a team, which computes one tile; teams take turns. The group's weights lie in shared
// memory, cut into two numbers of 11 bits each, as the multiplier takes them; x is cut in registers.
// Every block takes the same number of tiles, of one strip and then the next.
//
// A product is three of TF32: high * high, high * low and low * high. The multiplier cuts off what does
// not fit its sums, so that of the first each 8 * DEPTH columns are summed by themselves and added in float32;
// the others are far smaller, and stay in it. Sums are in a fixed order.
//
// Macros from the host: IS_BF16 (0) SIZE (4) SHARED K N P (1) TEAMS PARTS STAGES OUTS ACT, ACT_<NAME>
// for every activation, HAS_BIAS SAVE_PRE; DEPTH, steps of 8 columns that are
// summed by themselves, UNROLL, how many of these at once; REGISTERS SERVICE_REGISTERS, of a thread that
// computes and of others.

constexpr int WARPS = TEAMS * PARTS, THREADS = 32 * (WARPS + 4);
constexpr int BARRIERS = 1024;  // bytes in front of the weights
constexpr int OUTPUTS = SAVE_PRE ? 2 : 1;

using X = Tile<K>;
using Y = Tile<N>;

constexpr int OUT = OUTPUTS * Y::ROOM;                                // y, then pre
constexpr int TILES = (N + 7) / 8, NT = (TILES + PARTS - 1) / PARTS;  // of 8 outputs
constexpr int STEPS = X::STEPS;                                       // of 8 columns
constexpr int PIECE = 512;                                            // bytes of 8 outputs' weights of a step
constexpr int BIAS_AT = TILES * STEPS * PIECE;
constexpr int HELD = (BIAS_AT + 32 * TILES + 1023) / 1024 * 1024;

static_assert(P == 1 && SIZE == 4, "one group, float32");
static_assert(K % 4 == 0 && N % 4 == 0, "rows of whole 16 bytes");
static_assert(PARTS <= TILES, "every warp has work");
static_assert(WARPS % 4 == 0, "registers go to four warps at a time");
static_assert(STAGES >= TEAMS && OUTS >= TEAMS, "no barrier two turns behind a team");

// Weights and biases of a group into shared memory, by all warps that compute: of 8 outputs and 8
// columns what a lane multiplies, both high halves and both low ones, in 16 bytes.
__device__ __forceinline__ void place_weights(u32 to, const float* weight, const float* bias, int strip,
                                              int thread) {
  const float* from = weight + static_cast<u64>(strip) * (N * K);
#pragma unroll 4
  for (int i = thread; i < TILES * STEPS * 32; i += 32 * WARPS) {
    const int lane = i % 32, n = i / 32 / STEPS * 8 + lane / 4, k = i / 32 % STEPS * 8 + lane % 4;
    u32 word[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = n < N && k + 4 * half < K;
      cut(inside ? __float_as_uint(from[n * K + k + 4 * half]) : 0u, word[half], word[2 + half]);
    }
    store_words<4>(to + 16 * i, word);
  }
  for (int n = thread; HAS_BIAS && n < N; n += 32 * WARPS) {
    const u32 word[1] = {__float_as_uint(bias[static_cast<u64>(strip) * N + n])};
    store_words<1>(to + BIAS_AT + 4 * n, word);
  }
}

// COUNT tiles of 8 outputs of both halves of a tile's tokens.
template <int COUNT, int MANY, bool SHORT>
__device__ __forceinline__ void step(float (&sum)[2][NT][4], float (&rest)[2][NT][4], u32 weights, u32 x,
                                     int s, int part, int lane) {
  u32 high[2][MANY][4], low[2][MANY][4];
#pragma unroll
  for (int b = 0; b < 2; ++b)
#pragma unroll
    for (int d = 0; d < MANY; ++d)
      load_split<X, SHORT>(high[b][d], low[b][d], x, 16 * b, s + d, d == MANY - 1, lane);
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    u32 w[MANY][4];
#pragma unroll
    for (int d = 0; d < MANY; ++d)
      load_words<4>(w[d], weights + ((part + PARTS * j) * STEPS + s + d) * PIECE + 16 * lane);
#pragma unroll
    for (int b = 0; b < 2; ++b)
      multiply_split<MANY, SHORT>(sum[b][j], rest[b][j], high[b], low[b], w);
  }
}

template <int COUNT>
__device__ __forceinline__ void compute(float (&sum)[2][NT][4], u32 weights, u32 x, int part, int lane) {
  float rest[2][NT][4];
#pragma unroll
  for (int b = 0; b < 2; ++b)
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[b][j][e] = rest[b][j][e] = 0.0f;
#pragma unroll UNROLL
  for (int s = 0; s < Rest<X>::BEGIN; s += DEPTH)
    step<COUNT, DEPTH, false>(sum, rest, weights, x, s, part, lane);
  if constexpr (Rest<X>::MANY > 0)
    step<COUNT, Rest<X>::MANY, X::HALF>(sum, rest, weights, x, Rest<X>::BEGIN, part, lane);
#pragma unroll
  for (int b = 0; b < 2; ++b)
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[b][j][e] = together(sum[b][j][e], rest[b][j][e]);
}

template <int COUNT>
__device__ __forceinline__ void store_out(u32 out, const float (&sum)[2][NT][4], u32 biases, int part,
                                          int lane) {
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    const int column = 8 * (part + PARTS * j) + lane % 4 * 2;
    if (column < N) {
      u32 bias[2] = {0u, 0u};
      if (HAS_BIAS) load_words<2>(bias, biases + 4 * column);
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const u32 at = out + Y::at(8 * h + lane / 4, 4 * column);
        float pre[2];
#pragma unroll
        for (int e = 0; e < 2; ++e)
          pre[e] = sum[h / 2][j][h % 2 * 2 + e] + (HAS_BIAS ? __uint_as_float(bias[e]) : 0.0f);
        const u32 y[2] = {__float_as_uint(act(pre[0])), __float_as_uint(act(pre[1]))};
        store_words<2>(at, y);
        if (SAVE_PRE) {
          const u32 kept[2] = {__float_as_uint(pre[0]), __float_as_uint(pre[1])};
          store_words<2>(at + Y::ROOM, kept);
        }
      }
    }
  }
}

// x (M, G, K), y and pre (M, G, N) by their maps, whose boxes are a Tile's, or SHARED (G, M, K) and
// (G, M, N), also by address; W (G, N, K), bias (G, N).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
grouped_linear_strips_float32(const __grid_constant__ TensorMap x_map,
                              const __grid_constant__ TensorMap y_map,
                              const __grid_constant__ TensorMap pre_map,
                              const float* __restrict__ weight, const float* __restrict__ bias,
                              char* x_begin, char* y_begin, char* pre_begin, int rows, int tiles,
                              int each, int more) {
  extern __shared__ __align__(1024) char memory[];
  const u32 bars = (smem_addr(memory) + 1023u) & ~1023u;
  const u32 full = bars, empty = full + 8 * STAGES;
  const u32 done = empty + 8 * STAGES, taken = done + 8 * OUTS;
  const u32 weights = bars + BARRIERS, stages = weights + HELD, outs = stages + STAGES * X::ROOM;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Work work = {tiles, each, more};
  const int block = blockIdx.x, begin = work.begin(block), count = work.begin(block + 1) - begin;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      bar_init(full + 8 * s, 1);
      bar_init(empty + 8 * s, PARTS);
    }
    for (int s = 0; s < OUTS; ++s) {
      bar_init(done + 8 * s, PARTS);
      bar_init(taken + 8 * s, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_start();
  wait_for_previous();

  if (warp >= WARPS) {
#if REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(SERVICE_REGISTERS));
#endif
    Walk walk = {work, block, lane};
    walk.enter(begin / tiles);
    if (warp == WARPS) {  // brings x in
      const Moved<X> x = {&x_map, x_begin, rows};
      for (int i = 0; i < count; ++i) {
        const int stage = i % STAGES, row = ROWS * walk.tokens(i);
        if (i >= STAGES) bar_wait(empty + 8 * stage, (i / STAGES - 1) & 1);
        if (lane == 0) {
          bar_expect(full + 8 * stage, X::BYTES);
          x.load(stages + stage * X::ROOM, full + 8 * stage, walk.strip, row);
        }
        __syncwarp();
      }
    } else if (warp == WARPS + 1) {  // takes y out
      const Moved<Y> y = {&y_map, y_begin, rows}, pre = {&pre_map, pre_begin, rows};
      for (int i = 0; i < count; ++i) {
        const int out = i % OUTS, row = ROWS * walk.tokens(i);
        bar_wait(done + 8 * out, (i / OUTS) & 1);
        if (lane == 0) {
          y.store(outs + out * OUT, walk.strip, row);
          if (SAVE_PRE) pre.store(outs + out * OUT + Y::ROOM, walk.strip, row);
          constexpr int KEPT = OUTS > 1 ? 1 : 0;  // tiles whose room is not free yet
          wait_stores<KEPT * OUTPUTS>();
          if (i >= KEPT) bar_arrive(taken + 8 * ((i - KEPT) % OUTS));
        }
        __syncwarp();
      }
      if (lane == 0) wait_stores<0>();
    }
  } else {
#if REGISTERS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
    // of the warps that share a part of the multiprocessor, not all have the first tiles
    const int team = warp / PARTS, part = (warp + team * PARTS / 4) % PARTS;
    const bool all = part + PARTS * (NT - 1) < TILES;
    int i = team, from = 0;
    while (from < count) {
      const int strip = (begin + from) / tiles, stop = min(count, (strip + 1) * tiles - begin);
      if (from > 0) asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
      place_weights(weights, weight, bias, strip, 32 * warp + lane);
      asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
      for (; i < stop; i += TEAMS) {
        const int stage = i % STAGES, slot = i % OUTS;
        const u32 x = stages + stage * X::ROOM, out = outs + slot * OUT;
        float sum[2][NT][4];
        // The stage's last tile may be another team's, who may not have seen it come: without the first
        // wait the second could take that one for this.
        if (i >= STAGES) bar_wait(empty + 8 * stage, (i / STAGES - 1) & 1);
        bar_wait(full + 8 * stage, (i / STAGES) & 1);
        if (all)
          compute<NT>(sum, weights, x, part, lane);
        else
          compute<NT - 1>(sum, weights, x, part, lane);
        __syncwarp();
        if (lane == 0) bar_arrive(empty + 8 * stage);
        if (i >= OUTS) bar_wait(taken + 8 * slot, (i / OUTS - 1) & 1);
        if (all)
          store_out<NT>(out, sum, weights + BIAS_AT, part, lane);
        else
          store_out<NT - 1>(out, sum, weights + BIAS_AT, part, lane);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) bar_arrive(done + 8 * slot);
      }
      from = stop;
    }
  }
}
