// y = act(x W^T + b) of many narrow groups, for Hopper: strips of groups side by side. The texts of
// packed_groups_instructions.h, packed_groups_tiles.h, activations/cuda.h, derivatives.h and packed_groups_sign_mask.h
// stand before this one.
//
// A strip is P groups whose columns lie together in memory, so that its part of a row of x, and of y,
// begins and ends at 16 bytes though that of one group may not. One warp has tiles of ROWS tokens
// brought in by the copy engine, another has y taken out; tokens beyond the last are zeros and stay
// inside. Warps p * PARTS ... of the others compute group p, with its weights in registers. Every
// block takes the same number of tiles, of one strip and then the next. Sums are float32, in a fixed
// order. SHARED, groups first: a strip is one group, and of its rows P are one, so that p is no group
// but a place among P tokens.
//
// STAGED: a strip's weights come into shared memory by one copy, while the strip before is at work. Read
// from where they lie, every word of a warp is another line.
//
// Macros from the host: IS_BF16 SIZE SHARED K N P PARTS STAGES OUTS BLOCKS ACT, ACT_<NAME> for every
// activation, HAS_BIAS SAVE_PRE SIGNS STAGED; MIXED, blocks of 16 rows whose instructions may mix;
// SERVICE_WARPS REGISTERS SERVICE_REGISTERS, of a thread that computes and of others, 0 where all have
// the same.

constexpr int WARPS = P * PARTS, THREADS = 32 * (WARPS + SERVICE_WARPS);
constexpr int KW = K / 2;          // words of a group's row of x
constexpr int BARRIERS = 1024;     // bytes in front of the tiles
constexpr int OUTPUTS = SAVE_PRE || SIGNS ? 2 : 1;

using X = Tile<K>;
using Y = Tile<N>;

constexpr int OUT = (SAVE_PRE ? 2 : 1) * Y::ROOM;                         // y, then pre
constexpr int WEIGHT_GROUPS = SHARED ? 1 : P;                             // of a strip
constexpr u32 WEIGHT_BYTES = WEIGHT_GROUPS * N * K * 2;
constexpr int TILES = (N + 7) / 8, NT = (TILES + PARTS - 1) / PARTS;      // of 8 outputs

static_assert(K % 2 == 0 && N % 2 == 0, "whole words");
static_assert(X::ROW % 16 == 0 && Y::ROW % 16 == 0, "strips of whole 16 bytes");
static_assert(PARTS <= TILES, "every warp has work");
static_assert(!(SAVE_PRE && SIGNS), "one is kept");
static_assert(SERVICE_WARPS >= 2, "one warp loads, one stores");
static_assert(!STAGED || WEIGHT_BYTES % 16 == 0, "whole 16 bytes");

// Weights and biases of one warp's outputs, tiles part, part + PARTS, ... of 8, as the multiplier
// takes them. Of biases two a word, as they are in memory.
struct Weights {
  u32 word[NT][X::STEPS][2];
  u32 bias[NT];
};

__device__ __forceinline__ void load_weights(Weights& w, const u32* weight, int p, int part, int lane) {
  const int n0 = 8 * part + lane / 4, k0 = lane % 4 - X::shift(p);
  const u32* from = weight + n0 * KW + k0;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int n = 8 * PARTS * j;
    const bool mine = 8 * PARTS * (j + 1) <= N || n + n0 < N;
#pragma unroll
    for (int s = 0; s < X::STEPS; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = 8 * s + 4 * half;
        const bool inside = (k >= X::SHIFT || k + k0 >= 0) && (k + 4 <= KW || k + k0 < KW);
        w.word[j][s][half] = mine && inside ? from[n * KW + k] : 0u;
      }
    }
  }
}

__device__ __forceinline__ void load_biases(Weights& w, const u32* bias, int part, int lane) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int column = 8 * (part + PARTS * j) + lane % 4 * 2;
    w.bias[j] = HAS_BIAS && column < N ? bias[column / 2] : 0u;
  }
}

// COUNT tiles of 8 outputs of 16 tokens, begun with their biases.
template <int COUNT>
__device__ __forceinline__ void compute(float (&acc)[NT][4], const Weights& w, u32 x, int block, int p,
                                        int lane) {
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    acc[j][0] = acc[j][2] = HAS_BIAS ? half_of(w.bias[j], 0) : 0.0f;
    acc[j][1] = acc[j][3] = HAS_BIAS ? half_of(w.bias[j], 1) : 0.0f;
  }
  multiply_windows<X, COUNT>(acc, w.word, x, block, p, lane);
}

__device__ __forceinline__ u32 activated(float a, float b) {
  if constexpr (ACT == ACT_RELU) return relu_of(pack(a, b));
  return pack(act(a), act(b));
}

template <int COUNT>
__device__ __forceinline__ void store_out(u32 out, LaneSigns<NT>& signs, const float (&acc)[NT][4],
                                          int block, int p, int part, int lane) {
  if (SIGNS) signs.next_block();
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    const int column = 8 * (part + PARTS * j) + lane % 4 * 2;
    if (column < N) {
      const u32 at = out + Y::at(16 * block + lane / 4, p * (2 * N) + 2 * column);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float a = acc[j][2 * h], b = acc[j][2 * h + 1];
        const u32 y[1] = {activated(a, b)};
        store_words<1>(at + h * 8 * Y::PITCH, y);
        if (SIGNS) signs.add(j, h, y[0]);
        if (SAVE_PRE) {
          const u32 pre[1] = {pack(a, b)};
          store_words<1>(at + Y::ROOM + h * 8 * Y::PITCH, pre);
        }
      }
    }
  }
}

// x (M, G, K), y and pre (M, G, N) by their maps, whose boxes are a Tile's, or SHARED (G, rows, P * K)
// and (G, rows, P * N), also by address; W (G, N, K), bias (G, N). With SIGNS pre_begin is of these.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
grouped_linear_strips(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap y_map,
                      const __grid_constant__ TensorMap pre_map, const u32* __restrict__ weight,
                      const u32* __restrict__ bias, char* x_begin, char* y_begin, char* pre_begin,
                      int rows, int tiles, int each, int more) {
  extern __shared__ __align__(1024) char memory[];
  const u32 bars = (smem_addr(memory) + 1023u) & ~1023u;
  const u32 full = bars, empty = full + 8 * STAGES;
  const u32 done = empty + 8 * STAGES, taken = done + 8 * OUTS, brought = taken + 8 * OUTS;
  const u32 stages = bars + BARRIERS, outs = stages + STAGES * X::ROOM, signs_at = outs + OUTS * OUT;
  const u32 weights_at = signs_at + (SIGNS ? OUTS * SIGN_BYTES : 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Work work = {tiles, each, more};
  const int block = blockIdx.x, begin = work.begin(block), count = work.begin(block + 1) - begin;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      bar_init(full + 8 * s, 1);
      bar_init(empty + 8 * s, WARPS);
    }
    for (int s = 0; s < OUTS; ++s) {
      bar_init(done + 8 * s, WARPS);
      bar_init(taken + 8 * s, 1);
    }
    bar_init(brought, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (threadIdx.x == 0) {  // no read: these may still be written
    const u64 first = begin / tiles;
    fetch_to_l2(weight + first * WEIGHT_GROUPS * N * KW, WEIGHT_BYTES);
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
      auto bring_weights = [&](u64 strip) {
        bar_expect(brought, WEIGHT_BYTES);
        const char* from = reinterpret_cast<const char*>(weight) + strip * WEIGHT_BYTES;
        load_bytes(weights_at, from, brought, WEIGHT_BYTES);
      };
      if (STAGED && lane == 0) bring_weights(walk.strip);
      int since = 0;  // the step at which the strip began, or -1: the next one's weights are asked for
      for (int i = 0; i < count; ++i) {
        if (STAGED) {  // those of the strip are in registers once its first tile is computed
          const bool enters = i == walk.next;
          if (since >= 0 && walk.next < count && (enters || i == since + STAGES)) {
            bar_wait(empty + 8 * (since % STAGES), (since / STAGES) & 1);
            if (lane == 0) bring_weights(walk.strip + 1);
            since = -1;
          }
          if (enters) since = i;
        }
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
      const Signs signs = {pre_begin, tiles, (each * static_cast<int>(gridDim.x) + more) / tiles};
      for (int i = 0; i < count; ++i) {
        const int out = i % OUTS, row = ROWS * walk.tokens(i);
        bar_wait(done + 8 * out, (i / OUTS) & 1);
        if (lane == 0) {
          y.store(outs + out * OUT, walk.strip, row);
          if (SAVE_PRE) pre.store(outs + out * OUT + Y::ROOM, walk.strip, row);
          if (SIGNS) store_bytes(signs.at(walk.strip, row), signs_at + out * SIGN_BYTES, SIGN_BYTES);
          wait_stores<(OUTS - 1) * OUTPUTS>();
          if (i >= OUTS - 1) bar_arrive(taken + 8 * ((i + 1) % OUTS));
        }
        __syncwarp();
      }
      if (lane == 0) wait_stores<0>();
    }
  } else {
#if REGISTERS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
    const int p = warp / PARTS, part = warp % PARTS;
    const bool all = part + PARTS * (NT - 1) < TILES;
    int i = 0, strips = 0;
    while (i < count) {
      const int strip = (begin + i) / tiles, stop = min(count, (strip + 1) * tiles - begin);
      Weights w;
      int here = lane;
      asm volatile("" : "+r"(here));  // what is needed once a strip is not kept meanwhile
      const u64 group = static_cast<u64>(strip) * WEIGHT_GROUPS + (SHARED ? 0 : p);
      const u32* from = weight + group * (N * KW);
      load_biases(w, bias + group * (N / 2), part, here);
      if (STAGED) {
        from = reinterpret_cast<const u32*>(memory + (weights_at - smem_addr(memory)));
        from += SHARED ? 0 : p * (N * KW);
        bar_wait(brought, strips++ & 1);
      }
      load_weights(w, from, p, part, here);
      for (; i < stop; ++i) {
        const int stage = i % STAGES, slot = i % OUTS;
        const u32 x = stages + stage * X::ROOM, out = outs + slot * OUT;
        LaneSigns<NT> signs;
        bar_wait(full + 8 * stage, (i / STAGES) & 1);
#pragma unroll MIXED
        for (int b = 0; b < ROWS / 16; ++b) {
          float acc[NT][4];
          if (all)
            compute<NT>(acc, w, x, b, p, lane);
          else
            compute<NT - 1>(acc, w, x, b, p, lane);
          if (b == ROWS / 16 - 1) {
            __syncwarp();
            if (lane == 0) bar_arrive(empty + 8 * stage);
          }
          if (b == 0 && i >= OUTS) bar_wait(taken + 8 * slot, (i / OUTS - 1) & 1);
          if (all)
            store_out<NT>(out, signs, acc, b, p, part, lane);
          else
            store_out<NT - 1>(out, signs, acc, b, p, part, lane);
        }
        if (SIGNS)
          signs.store(signs_at + slot * SIGN_BYTES, p, 4 * part + lane % 4, PARTS, lane);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) bar_arrive(done + 8 * slot);
      }
    }
  }
}
