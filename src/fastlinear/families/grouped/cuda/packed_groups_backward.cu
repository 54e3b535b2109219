// dx, dW and db of y = act(x W^T + b) of many narrow groups in one pass, for Hopper: strips of groups
// side by side. The texts of packed_groups_instructions.h, packed_groups_tiles.h, activations/cuda.h,
// derivatives.h and packed_groups_sign_mask.h stand before this one.
//
// A strip is P groups whose columns lie together in memory, so that its part of a row begins and ends
// at 16 bytes though that of one group may not. One thread has tiles of ROWS tokens of dy, of what the
// forward saved and of x brought in by the copy engine, and dx taken out; tokens beyond the last are
// zeros. Warps p * PARTS ... of the others compute group p: dpre over dy in shared memory, then dx
// with W in registers, then their part of dW and db, which stay in registers over the block's tiles of
// a strip. Every block takes the same number of tiles, of one strip and then the next; where several
// share a strip each leaves its float32 share, and the second kernel adds them up in order. SHARED,
// groups first: a strip is one group, and of its rows P are one, so that p is no group but a place
// among P tokens, each with its share of dW and db.
//
// SIGNS: of what the forward computed its signs were saved. Warps that have nothing else to do,
// DACT_WARPS, then write dpre over dy, tiles ahead of those that multiply.
//
// Rows of a group need not begin at 16 bytes in shared memory. Matrices are read from a window that
// begins up to SHIFT words early: of dW what belongs to others is not stored, in dx it is masked.
// A word is 4 bytes: two 16-bit numbers.
//
// STAGED: a strip's W comes into shared memory by one copy, while the strip before is at work.
//
// Macros from the host: IS_BF16 SIZE SHARED K N P PARTS ACROSS STAGES OUTS BLOCKS ACT, ACT_<NAME> for
// every activation, SIGNS STAGED NEED_DX NEED_DW NEED_DB; SERVICE_WARPS REGISTERS SERVICE_REGISTERS, of a
// thread that computes and of others, 0 where all have the same. PARTS warps of a group are ACROSS along
// the columns of dW.

constexpr int WARPS = P * PARTS, THREADS = 32 * (WARPS + SERVICE_WARPS);
constexpr int NW = N / 2;  // words of a group of dy
constexpr bool HAS_SAVED = ACT != ACT_NONE && !SIGNS;
constexpr int DACT_WARPS = SIGNS ? SERVICE_WARPS - 1 : 0;
constexpr bool NEED_SUMS = NEED_DW || NEED_DB;
constexpr int BARRIERS = 1024;  // bytes in front of the tiles

using Dy = Tile<N>;
using X = Tile<K>;

constexpr int SAVED_AT = Dy::ROOM, X_AT = SAVED_AT + (HAS_SAVED ? Dy::ROOM : 0);
constexpr int STAGE = X_AT + (NEED_DW ? X::ROOM : 0);
constexpr int COPIED =
    Dy::BYTES * (HAS_SAVED ? 2 : 1) + (SIGNS ? SIGN_BYTES : 0) + (NEED_DW ? X::BYTES : 0);
constexpr int SIGNS_ROOM = SIGNS ? (STAGES * SIGN_BYTES + 1023) / 1024 * 1024 : 0;  // behind all stages
constexpr int WEIGHT_GROUPS = SHARED ? 1 : P;  // of a strip
constexpr u32 WEIGHT_BYTES = WEIGHT_GROUPS * N * K * 2;
constexpr int STEPS = Dy::STEPS;                                          // of dx
constexpr int DX_TILES = (K + 7) / 8, NT = (DX_TILES + PARTS - 1) / PARTS;  // 8 columns each
constexpr int DOWN = PARTS / ACROSS;                                      // warps along rows of dW
constexpr int M_TILES = (Dy::WINDOW + 7) / 8, MT = (M_TILES + DOWN - 1) / DOWN;    // 16 rows each
constexpr int N_TILES = (X::WINDOW + 3) / 4, NTW = (N_TILES + ACROSS - 1) / ACROSS;  // 8 columns

static_assert(K % 2 == 0 && N % 2 == 0, "whole words");
static_assert(Dy::ROW % 16 == 0 && X::ROW % 16 == 0, "strips of whole 16 bytes");
static_assert(Dy::BOX_COLUMNS <= 256 && X::BOX_COLUMNS <= 256, "one box");
static_assert(DOWN * ACROSS == PARTS && DOWN <= M_TILES && PARTS <= DX_TILES, "every warp has work");
static_assert(P <= 15, "named barriers");
static_assert(!STAGED || NEED_DX && WEIGHT_BYTES % 16 == 0, "whole 16 bytes");

// ---------------------------------------------------------------- dpre

__device__ __forceinline__ u32 graded_word(u32 dy, u32 saved) {
  if constexpr (ACT == ACT_RELU) {
    const u32 lo = half_of(saved, 0) <= 0.0f ? 0u : 0xffffu;
    return dy & (half_of(saved, 1) <= 0.0f ? lo : lo | 0xffff0000u);
  }
  return pack(graded(half_of(dy, 0), half_of(saved, 0)), graded(half_of(dy, 1), half_of(saved, 1)));
}

// dpre over dy of one group, by all its warps.
__device__ __forceinline__ void grade(u32 stage, int p, int part, int lane) {
  constexpr int V = NW % 4 == 0 ? 4 : NW % 2 == 0 ? 2 : 1, UNITS = NW / V;
  constexpr int LANES = UNITS > 16 ? 32 : smallest_power(UNITS), PASSES = (UNITS + 31) / 32;
  constexpr int AT_ONCE = 32 / LANES, STRIDE = AT_ONCE * PARTS;
  constexpr int TURNS = (ROWS + STRIDE - 1) / STRIDE * PASSES, BATCH = TURNS < 8 / V ? TURNS : 8 / V;
#pragma unroll
  for (int turn = 0; turn < TURNS; turn += BATCH) {
    u32 dy[BATCH][V], saved[BATCH][V];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (turn + i < TURNS) {
        const int row = part * AT_ONCE + lane / LANES + (turn + i) / PASSES * STRIDE;
        const int unit = lane % LANES + (turn + i) % PASSES * LANES;
        const u32 at = stage + Dy::at(min(row, ROWS - 1), p * (2 * N) + 4 * V * min(unit, UNITS - 1));
        load_words<V>(dy[i], at);
        load_words<V>(saved[i], at + SAVED_AT);
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (turn + i < TURNS) {
        const int row = part * AT_ONCE + lane / LANES + (turn + i) / PASSES * STRIDE;
        const int unit = lane % LANES + (turn + i) % PASSES * LANES;
#pragma unroll
        for (int v = 0; v < V; ++v) dy[i][v] = graded_word(dy[i][v], saved[i][v]);
        if (row < ROWS && unit < UNITS)
          store_words<V>(stage + Dy::at(row, p * (2 * N) + 4 * V * unit), dy[i]);
      }
    }
  }
}

// ---------------------------------------------------------------- dx = dpre W

// W of one warp's columns, as the multiplier takes it: tiles part, part + PARTS, ... of 8 columns.
struct Weights {
  u32 word[NT][STEPS][2];
};

__device__ __forceinline__ void load_weights(Weights& w, const u16* group, int p, int part, int lane) {
  const int n0 = 2 * (lane % 4 - Dy::shift(p)), k0 = 8 * part + lane / 4;
  const u16* from = group + n0 * K + k0;
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = 16 * s + 8 * half;
      const bool row = (n >= 2 * Dy::SHIFT || n + n0 >= 0) && (n + 8 <= N || n + n0 < N);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const int k = 8 * PARTS * j;
        u32 word = 0u;
        if (row && (8 * PARTS * (j + 1) <= K || k + k0 < K))
          word = from[n * K + k] | static_cast<u32>(from[(n + 1) * K + k]) << 16;
        w.word[j][s][half] = word;
      }
    }
  }
}

template <int TILES>
__device__ __forceinline__ void store_dx(u32 out, const float (&acc)[NT][4], int block, int p,
                                         int part, int lane) {
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    const int column = 8 * (part + PARTS * j) + lane % 4 * 2;
    if (column < K) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 word[1] = {pack(acc[j][2 * h], acc[j][2 * h + 1])};
        store_words<1>(out + X::at(16 * block + 8 * h + lane / 4, p * (2 * K) + 2 * column), word);
      }
    }
  }
}

// ---------------------------------------------------------------- dW += dpre^T x, db += dpre

// What one warp has of its strip's dW and db: tiles down, down + DOWN, ... of 16 rows, and of their
// columns NTW tiles of 8; db by the tokens its lanes happen to hold.
struct Sums {
  float dw[NEED_DW ? MT : 1][NEED_DW ? NTW : 1][4];
  float db[MT][2];
};

template <int TILES>
__device__ __forceinline__ void add_products(Sums& sums, u32 dpre, u32 x, int p, int down, int across,
                                             int lane) {
#pragma unroll
  for (int t = 0; t < ROWS / 16; ++t) {
    u32 a[TILES][4];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int byte = Dy::window(p) + 32 * (down + DOWN * i) + lane / 8 % 2 * 16;
      load_four<true>(a[i], dpre + Dy::at(16 * t + lane / 16 * 8 + lane % 8, byte));
    }
    if (NEED_DB && across == 0) {
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float first = half_of(a[i][h], 0) + half_of(a[i][h], 1);
          const float second = half_of(a[i][h + 2], 0) + half_of(a[i][h + 2], 1);
          sums.db[i][h] += first + second;
        }
      }
    }
    if constexpr (NEED_DW) {
      const int row = 16 * t + lane % 16, byte = X::window(p) + 16 * NTW * across;
#pragma unroll
      for (int j = 0; j + 1 < NTW; j += 2) {
        u32 b[4];
        load_four<true>(b, x + X::at(row, byte + 16 * j + lane / 16 * 16));
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          multiply<false>(sums.dw[i][j], a[i], b[0], b[1]);
          multiply<false>(sums.dw[i][j + 1], a[i], b[2], b[3]);
        }
      }
      if (NTW % 2) {
        u32 b0, b1;
        load_two<true>(b0, b1, x + X::at(row, byte + 16 * (NTW - 1)));
#pragma unroll
        for (int i = 0; i < TILES; ++i) multiply<false>(sums.dw[i][NTW - 1], a[i], b0, b1);
      }
    }
  }
}

// Into the float32 share of the group, or ROUNDED into the results where one share is all.
template <bool ROUNDED>
__device__ __forceinline__ void store_sums(Sums& sums, char* dw, char* db, u64 group, int p, int down,
                                           int across, int lane) {
  constexpr int NUMBER = ROUNDED ? 2 : 4;
  const int k0 = 8 * NTW * across + lane % 4 * 2 - 2 * X::shift(p);
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = 16 * (down + DOWN * i) + 8 * h + lane / 4 - 2 * Dy::shift(p);
      const bool mine = n >= 0 && n < N;
      if constexpr (NEED_DW) {
        char* row = dw + static_cast<long long>(NUMBER) * ((group * N + n) * K + k0);
#pragma unroll
        for (int j = 0; j < NTW; ++j) {
          const float a = sums.dw[i][j][2 * h], b = sums.dw[i][j][2 * h + 1];
          const int k = k0 + 8 * j;
          if (mine && k >= 0 && k < K) {
            if constexpr (ROUNDED)
              *reinterpret_cast<u32*>(row + 8 * NUMBER * j) = pack(a, b);
            else
              *reinterpret_cast<float2*>(row + 8 * NUMBER * j) = make_float2(a, b);
          }
        }
      }
      if (NEED_DB && across == 0) {
        float sum = sums.db[i][h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (mine && lane % 4 == 0) {
          if constexpr (ROUNDED)
            reinterpret_cast<u16*>(db)[group * N + n] = static_cast<u16>(pack(sum, 0.0f));
          else
            reinterpret_cast<float*>(db)[group * N + n] = sum;
        }
      }
    }
  }
}

// ---------------------------------------------------------------- kernels

// dy, saved (M, G, N) and x, dx (M, G, K) by their maps, whose boxes are a Tile's, or SHARED (G, rows,
// P * N) and (G, rows, P * K), also by address, as signs are; W (G, N, K). dw (slots, G, N, K) and db (slots, G, N)
// are float32 shares, or 16-bit results where slots is 1.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
grouped_linear_strips_backward(const __grid_constant__ TensorMap dy_map,
                               const __grid_constant__ TensorMap saved_map,
                               const __grid_constant__ TensorMap x_map,
                               const __grid_constant__ TensorMap dx_map,
                               const u16* __restrict__ weight, char* __restrict__ dw,
                               char* __restrict__ db, char* dy_begin, char* saved_begin, char* x_begin,
                               char* dx_begin, int rows, int groups, int slots, int tiles, int each,
                               int more) {
  extern __shared__ __align__(1024) char memory[];
  const u32 bars = (smem_addr(memory) + 1023u) & ~1023u;
  const u32 full = bars, done = full + 8 * STAGES, taken = done + 8 * STAGES;
  const u32 graded = taken + 8 * OUTS, brought = graded + 8 * STAGES, stages = bars + BARRIERS;
  const u32 signs_at = stages + STAGES * STAGE, outs = signs_at + SIGNS_ROOM;
  const u32 weights_at = outs + OUTS * X::ROOM;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Work work = {tiles, each, more};
  const int block = blockIdx.x, begin = work.begin(block), count = work.begin(block + 1) - begin;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      bar_init(full + 8 * s, 1);
      bar_init(done + 8 * s, WARPS);
      if (DACT_WARPS) bar_init(graded + 8 * s, DACT_WARPS);
    }
    for (int s = 0; s < OUTS; ++s) bar_init(taken + 8 * s, 1);
    bar_init(brought, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (NEED_DX && threadIdx.x == 0) {  // no read: these may still be written
    const u64 first = begin / tiles;
    fetch_to_l2(weight + first * WEIGHT_GROUPS * N * K, WEIGHT_BYTES);
  }
  __syncthreads();
  let_next_start();
  wait_for_previous();

  if (warp >= WARPS) {  // one warp brings tiles in and takes dx out
#if REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(SERVICE_REGISTERS));
#endif
    if (warp == WARPS) {
      const Moved<Dy> dy = {&dy_map, dy_begin, rows}, saved = {&saved_map, saved_begin, rows};
      const Moved<X> x = {&x_map, x_begin, rows}, dx = {&dx_map, dx_begin, rows};
      const Signs signs = {saved_begin, tiles, groups / P};
      auto load = [&](int i, int strip, int row) {
        const u32 bar = full + 8 * (i % STAGES), to = stages + i % STAGES * STAGE;
        bar_expect(bar, COPIED);
        dy.load(to, bar, strip, row);
        if (HAS_SAVED) saved.load(to + SAVED_AT, bar, strip, row);
        if (SIGNS)
          load_bytes(signs_at + i % STAGES * SIGN_BYTES, signs.at(strip, row), bar, SIGN_BYTES);
        if (NEED_DW) x.load(to + X_AT, bar, strip, row);
      };
      auto bring_weights = [&](int strip) {
        bar_expect(brought, WEIGHT_BYTES);
        const char* from = reinterpret_cast<const char*>(weight) + static_cast<u64>(strip) * WEIGHT_BYTES;
        load_bytes(weights_at, from, brought, WEIGHT_BYTES);
      };
      if (STAGED && lane == 0) bring_weights(begin / tiles);
      int first = 0;  // the step at which the strip began
      for (int i = 0; i < min(STAGES, count); ++i) {
        const int strip = (begin + i) / tiles, row = ROWS * work.tokens(block, i, strip, lane);
        if (lane == 0) load(i, strip, row);
      }
      for (int i = 0; i < count; ++i) {
        const int ahead = min(i + STAGES, count - 1);
        const int strip = (begin + i) / tiles, next = (begin + ahead) / tiles;
        const int row = NEED_DX ? ROWS * work.tokens(block, i, strip, lane) : 0;
        const int next_row = ROWS * work.tokens(block, ahead, next, lane);
        bar_wait(done + 8 * (i % STAGES), (i / STAGES) & 1);
        if (STAGED && i == first) {  // its W is in registers: the next one's may come
          first = (strip + 1) * tiles - begin;
          if (first < count && lane == 0) bring_weights(strip + 1);
        }
        if (lane == 0) {
          if (NEED_DX) dx.store(outs + i % OUTS * X::ROOM, strip, row);
          if (i + STAGES < count) load(i + STAGES, next, next_row);
          if (NEED_DX) {
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            bar_arrive(taken + 8 * (i % OUTS));
          }
        }
        __syncwarp();
      }
    } else if (DACT_WARPS) {
      for (int i = 0; i < count; ++i) {
        const int slot = i % STAGES;
        bar_wait(full + 8 * slot, (i / STAGES) & 1);
        const u32 signs = signs_at + slot * SIGN_BYTES;
        grade_by_signs<Dy, DACT_WARPS ? DACT_WARPS : 1>(stages + slot * STAGE, signs,
                                                        warp - WARPS - 1, lane);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) bar_arrive(graded + 8 * slot);
      }
    }
  } else {
#if REGISTERS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
    const int p = warp / PARTS, part = warp % PARTS;
    const int place = PARTS - 1 - part, down = place % DOWN, across = place / DOWN;
    int i = 0, strips = 0;
    while (i < count) {
      const int strip = (begin + i) / tiles, stop = min(count, (strip + 1) * tiles - begin);
      const u64 group = SHARED ? strip : static_cast<u64>(strip) * P + p;
      const u16* from = weight + group * (N * K);
      if (STAGED) {
        from = reinterpret_cast<const u16*>(memory + (weights_at - smem_addr(memory)));
        from += SHARED ? 0 : p * (N * K);
        bar_wait(brought, strips++ & 1);
      }
      Weights w;
      int here = lane;
      asm volatile("" : "+r"(here));  // what is needed once a strip is not kept meanwhile
      if (NEED_DX) load_weights(w, from, p, part, here);
      Sums sums = {};
      for (; i < stop; ++i) {
        const int slot = i % STAGES;
        const u32 dpre = stages + slot * STAGE, x = dpre + X_AT;
        bar_wait(full + 8 * slot, (i / STAGES) & 1);
        if (HAS_SAVED) {
          grade(dpre, p, part, lane);
          if (PARTS == 1)
            __syncwarp();
          else
            asm volatile("bar.sync %0, %1;" ::"r"(p + 1), "n"(32 * PARTS) : "memory");
        } else if (DACT_WARPS) {
          bar_wait(graded + 8 * slot, (i / STAGES) & 1);
        } else if (SIGNS) {
          grade_by_signs<Dy, WARPS>(dpre, signs_at + slot * SIGN_BYTES, warp, lane);
          asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
        }
        if (NEED_DX) {
          const u32 out = outs + i % OUTS * X::ROOM;
          const bool all = part + PARTS * (NT - 1) < DX_TILES;
#pragma unroll 1
          for (int b = 0; b < ROWS / 16; ++b) {
            float acc[NT][4] = {};
            if (all)
              multiply_windows<Dy, NT>(acc, w.word, dpre, b, p, lane);
            else
              multiply_windows<Dy, NT - 1>(acc, w.word, dpre, b, p, lane);
            if (b == 0 && i >= OUTS) bar_wait(taken + 8 * (i % OUTS), (i / OUTS - 1) & 1);
            store_dx<NT>(out, acc, b, p, part, lane);
          }
        }
        if (NEED_SUMS) {
          if (down + DOWN * (MT - 1) < M_TILES)
            add_products<MT>(sums, dpre, x, p, down, across, lane);
          else if constexpr (MT > 1)
            add_products<MT - 1>(sums, dpre, x, p, down, across, lane);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) bar_arrive(done + 8 * slot);
      }
      if (NEED_SUMS) {
        asm volatile("" : "+r"(here));
        const u64 turn = block - work.first(strip);
        const u64 share = (SHARED ? turn * P + p : turn) * groups + group;
        if (slots == 1)
          store_sums<true>(sums, dw, db, share, p, down, across, here);
        else
          store_sums<false>(sums, dw, db, share, p, down, across, here);
      }
    }
  }
}

// Adds up the shares of a strip's blocks, in order; the first dw_blocks blocks those of dW.
extern "C" __global__ void __launch_bounds__(256)
grouped_linear_strips_sums(const float* dw_shares, const float* db_shares, u32* dw, u32* db,
                           int groups, int tiles, int each, int more, int dw_blocks) {
  const Work work = {tiles, each, more};
  const bool of_dw = blockIdx.x < dw_blocks;
  const u32 size = of_dw ? N * K : N;  // numbers of a group
  const u32 at = ((of_dw ? blockIdx.x : blockIdx.x - dw_blocks) * 256 + threadIdx.x) * 2;
  if (at >= groups * size) return;
  const int strip = at / (SHARED ? size : P * size);
  const int shares = (work.last(strip) - work.first(strip) + 1) * (SHARED ? P : 1);
  const float2* from = reinterpret_cast<const float2*>(of_dw ? dw_shares : db_shares) + at / 2;
  float2 sum = make_float2(0.0f, 0.0f);
  wait_for_previous();
#pragma unroll 4
  for (int s = 0; s < shares; ++s) {
    const float2 share = from[static_cast<u64>(s) * (groups * size / 2)];
    sum.x += share.x;
    sum.y += share.y;
  }
  (of_dw ? dw : db)[at / 2] = pack(sum.x, sum.y);
}
