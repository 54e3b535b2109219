// dx, dW and db of y = act(x W^T + b) of many narrow groups in float32 in one pass, for Hopper. The texts
// of packed_groups_instructions.h, packed_groups_tiles.h, activations/cuda.h and packed_groups_float32.h stand before this
// one.
//
// A strip is one group, whose rows begin and end at 16 bytes by themselves. One warp has tiles of ROWS
// tokens of dy, of what the forward saved and of x brought in by the copy engine, another has dx taken
// out, two more only lend registers; tokens beyond the last are zeros. PARTS warps are a team, which
// computes one tile; teams take turns. A team writes dpre over dy, one tile ahead of what it multiplies.
// Then dx, with the group's weights from shared memory, where SPLIT cut into two numbers of 11 bits each
// as the multiplier takes them; then dW, which stays in registers over the block's tiles of a strip, as
// db does: DOWN of the warps along its rows, ACROSS along its columns. Every block takes the same number
// of tiles, of one strip and then the next; where several teams share a strip each leaves its share, and
// the second kernel adds them up in order.
//
// A product is three of TF32: high * high, high * low and low * high. The multiplier cuts off what does
// not fit its sums, so that of the first each 8 * DEPTH numbers are summed by themselves and added in float32;
// the others are far smaller, and stay in it. Sums are in a fixed order.
//
// Macros from the host: IS_BF16 (0) SIZE (4) SHARED K N P (1) TEAMS DOWN ACROSS STAGES OUTS SPLIT
// DEPTH UNROLL ACT, ACT_<NAME> for every activation, NEED_DX NEED_DW NEED_DB; REGISTERS SERVICE_REGISTERS, of
// a thread that computes and of others.

constexpr int PARTS = DOWN * ACROSS, WARPS = TEAMS * PARTS, THREADS = 32 * (WARPS + 4);
constexpr int BARRIERS = 1024;  // bytes in front of the weights
constexpr bool HAS_SAVED = ACT != ACT_NONE;
constexpr bool NEED_SUMS = NEED_DW || NEED_DB;

using Dy = Tile<N>;
using X = Tile<K>;

constexpr int SAVED_AT = Dy::ROOM, X_AT = SAVED_AT + (HAS_SAVED ? Dy::ROOM : 0);  // of a stage
constexpr int STAGE = X_AT + (NEED_DW ? X::ROOM : 0);
constexpr int COPIED = Dy::BYTES * (HAS_SAVED ? 2 : 1) + (NEED_DW ? X::BYTES : 0);
constexpr int HALVES = PARTS == 1 ? 2 : 1;                         // of a tile's tokens, of one warp's dx
constexpr int BESIDE = PARTS * HALVES / 2;                         // warps along the columns of dx
constexpr int DX_TILES = (K + 7) / 8, NT = (DX_TILES + BESIDE - 1) / BESIDE;  // of 8 columns
constexpr int STEPS = Dy::STEPS;                                   // of 8 columns of dpre
constexpr int PIECE = SPLIT ? 512 : 256;                           // bytes of 8 by 8 weights
constexpr int HELD = NEED_DX ? (DX_TILES * STEPS * PIECE + 1023) / 1024 * 1024 : 0;
constexpr int M_TILES = (N + 15) / 16, MT = (M_TILES + DOWN - 1) / DOWN;        // of 16 rows of dW
constexpr int N_TILES = (K + 7) / 8, NTW = (N_TILES + ACROSS - 1) / ACROSS;     // of 8 columns
constexpr int UNITS = N / 4;                                                    // of 16 bytes of a row of dy
// Which tokens are multiplied together is free; these make lanes read from different banks.
constexpr bool EVERY_OTHER = N % 8 || N % 32 == 0;

static_assert(P == 1 && SIZE == 4, "one group, float32");
static_assert(K % 4 == 0 && N % 4 == 0 && UNITS <= 32, "rows of whole 16 bytes, a warp's at most");
static_assert(BESIDE <= DX_TILES && DOWN <= M_TILES && ACROSS <= N_TILES, "every warp has work");
static_assert(WARPS % 4 == 0 && (PARTS == 1 || PARTS % 2 == 0), "registers go to four warps at a time");
static_assert(STAGES >= 2 * TEAMS && OUTS >= TEAMS, "a tile ahead, no barrier two turns behind a team");

// ---------------------------------------------------------------- dpre

constexpr int LANES = smallest_power(UNITS), AT_ONCE = 32 / LANES;  // of a row; rows of a warp

// dpre over dy, and sums of what a lane sees of four columns.
__device__ __forceinline__ void grade(float (&db)[4], u32 stage, int part, int lane) {
  constexpr int STRIDE = AT_ONCE * PARTS, TURNS = (ROWS + STRIDE - 1) / STRIDE, BATCH = TURNS < 4 ? TURNS : 4;
  const int unit = lane % LANES, first = part * AT_ONCE + lane / LANES;
#pragma unroll
  for (int turn = 0; turn < TURNS; turn += BATCH) {
    u32 dy[BATCH][4], saved[BATCH][4];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const u32 at = stage + Dy::at(min(first + (turn + i) * STRIDE, ROWS - 1), 16 * min(unit, UNITS - 1));
      load_words<4>(dy[i], at);
      if (HAS_SAVED) load_words<4>(saved[i], at + SAVED_AT);
    }
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int row = first + (turn + i) * STRIDE;
      if (row < ROWS && unit < UNITS) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          float dpre = __uint_as_float(dy[i][v]);
          if (HAS_SAVED) dpre = graded(dpre, __uint_as_float(saved[i][v]));
          sum[v] += dpre;
          dy[i][v] = __float_as_uint(dpre);
        }
        if (HAS_SAVED) store_words<4>(stage + Dy::at(row, 16 * unit), dy[i]);
      }
    }
#pragma unroll
    for (int v = 0; v < 4; ++v) db[v] += sum[v];
  }
}

// ---------------------------------------------------------------- dx = dpre W

// Of 8 columns of dx and 8 of dpre what a lane multiplies: two numbers, or both halves of each.
__device__ __forceinline__ void place_weights(u32 to, const float* group, int thread) {
#pragma unroll 4
  for (int i = thread; i < DX_TILES * STEPS * 32; i += 32 * WARPS) {
    const int lane = i % 32, k = i / 32 / STEPS * 8 + lane / 4, n = i / 32 % STEPS * 8 + lane % 4;
    u32 word[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = n + 4 * half < N && k < K;
      word[half] = inside ? __float_as_uint(group[(n + 4 * half) * K + k]) : 0u;
    }
    if (SPLIT) {
      u32 both[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) cut(word[half], both[half], both[2 + half]);
      store_words<4>(to + 16 * i, both);
    } else {
      store_words<2>(to + 8 * i, word);
    }
  }
}

// COUNT tiles of 8 columns of a warp's tokens.
template <int COUNT, int MANY, bool SHORT>
__device__ __forceinline__ void step(float (&sum)[HALVES][NT][4], float (&rest)[HALVES][NT][4], u32 weights,
                                     u32 dpre, int s, int half, int beside, int lane) {
  u32 high[HALVES][MANY][4], low[HALVES][MANY][4];
#pragma unroll
  for (int b = 0; b < HALVES; ++b)
#pragma unroll
    for (int d = 0; d < MANY; ++d)
      load_split<Dy, SHORT>(high[b][d], low[b][d], dpre, 16 * (half + b), s + d, d == MANY - 1, lane);
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    u32 w[MANY][4];
#pragma unroll
    for (int d = 0; d < MANY; ++d) {
      const u32 from = weights + ((beside + BESIDE * j) * STEPS + s + d) * PIECE;
      if (SPLIT) {
        load_words<4>(w[d], from + 16 * lane);
      } else {
        u32 word[2];
        load_words<2>(word, from + 8 * lane);
#pragma unroll
        for (int e = 0; e < 2; ++e) cut(word[e], w[d][e], w[d][2 + e]);
      }
    }
#pragma unroll
    for (int b = 0; b < HALVES; ++b)
      multiply_split<MANY, SHORT>(sum[b][j], rest[b][j], high[b], low[b], w);
  }
}

template <int COUNT>
__device__ __forceinline__ void make_dx(u32 out, u32 weights, u32 dpre, u32 taken, bool wait, u32 parity,
                                        int half, int beside, int lane) {
  float sum[HALVES][NT][4] = {}, rest[HALVES][NT][4] = {};
#pragma unroll UNROLL
  for (int s = 0; s < Rest<Dy>::BEGIN; s += DEPTH)
    step<COUNT, DEPTH, false>(sum, rest, weights, dpre, s, half, beside, lane);
  if constexpr (Rest<Dy>::MANY > 0)
    step<COUNT, Rest<Dy>::MANY, Dy::HALF>(sum, rest, weights, dpre, Rest<Dy>::BEGIN, half, beside, lane);
  if (wait) bar_wait(taken, parity);
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    const int column = 8 * (beside + BESIDE * j) + lane % 4 * 2;
    if (column < K) {
#pragma unroll
      for (int h = 0; h < 2 * HALVES; ++h) {
        u32 word[2];
#pragma unroll
        for (int e = 0; e < 2; ++e)
          word[e] = __float_as_uint(together(sum[h / 2][j][h % 2 * 2 + e], rest[h / 2][j][h % 2 * 2 + e]));
        store_words<2>(out + X::at(16 * half + 8 * h + lane / 4, 4 * column), word);
      }
    }
  }
}

// ---------------------------------------------------------------- dW += dpre^T x

// What one warp has of its strip's dW: tiles down, down + DOWN, ... of 16 rows, and of their columns NTW
// tiles of 8 from NTW * across on.
struct Sums {
  float whole[NEED_DW ? MT : 1][NEED_DW ? NTW : 1][4], rest[NEED_DW ? MT : 1][NEED_DW ? NTW : 1][4];
};

// Of a tile's row and columns from `byte` on.
template <class T>
__device__ __forceinline__ u32 token_word(u32 tile, int s, int second, int byte, int lane) {
  const int row = 8 * s + (EVERY_OTHER ? 2 * (lane % 4) + second : lane % 4 + 4 * second);
  u32 word[1];
  load_words<1>(word, tile + T::at(row, byte));
  return word[0];
}

template <int TILES>
__device__ __forceinline__ void add_products(Sums& sums, u32 dpre, u32 x, int down, int across, int lane) {
#pragma unroll 1
  for (int s = 0; s < ROWS / 8; s += DEPTH) {
    u32 high[TILES][DEPTH][4], low[TILES][DEPTH][4];
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int d = 0; d < DEPTH; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int byte = 64 * (down + DOWN * i) + 4 * (lane / 4) + e % 2 * 32;
          cut(token_word<Dy>(dpre, s + d, e / 2, byte, lane), high[i][d][e], low[i][d][e]);
        }
#pragma unroll
    for (int j = 0; j < NTW; ++j) {
      u32 w[DEPTH][4];
#pragma unroll
      for (int d = 0; d < DEPTH; ++d)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int byte = 32 * (NTW * across + j) + 4 * (lane / 4);
          cut(token_word<X>(x, s + d, e, byte, lane), w[d][e], w[d][2 + e]);
        }
#pragma unroll
      for (int i = 0; i < TILES; ++i)
        multiply_split<DEPTH, false>(sums.whole[i][j], sums.rest[i][j], high[i], low[i], w);
    }
  }
}

__device__ __forceinline__ void store_dw(const Sums& sums, float* dw, int down, int across, int lane) {
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = 16 * (down + DOWN * i) + 8 * h + lane / 4, k0 = 8 * NTW * across + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < NTW; ++j) {
        const float first = together(sums.whole[i][j][2 * h], sums.rest[i][j][2 * h]);
        const float second = together(sums.whole[i][j][2 * h + 1], sums.rest[i][j][2 * h + 1]);
        if (n < N && k0 + 8 * j < K)
          *reinterpret_cast<float2*>(dw + n * K + k0 + 8 * j) = make_float2(first, second);
      }
    }
  }
}

// Of a team's warps, through shared memory.
__device__ __forceinline__ void store_db(float (&db)[4], float* out, u32 room, int part, int lane, int team) {
#pragma unroll
  for (int v = 0; v < 4; ++v)
#pragma unroll
    for (int apart = LANES; apart < 32; apart *= 2) db[v] += __shfl_xor_sync(0xffffffffu, db[v], apart);
  if (lane < UNITS) {
    u32 word[4];
#pragma unroll
    for (int v = 0; v < 4; ++v) word[v] = __float_as_uint(db[v]);
    store_words<4>(room + 4 * (part * N + 4 * lane), word);
  }
  asm volatile("bar.sync %0, %1;" ::"r"(team + 2), "n"(32 * PARTS) : "memory");
  for (int n = 32 * part + lane; n < N; n += 32 * PARTS) {
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      u32 word[1];
      load_words<1>(word, room + 4 * (p * N + n));
      sum += __uint_as_float(word[0]);
    }
    out[n] = sum;
  }
}

// ---------------------------------------------------------------- kernels

// dy, saved (M, G, N) and x, dx (M, G, K) by their maps, whose boxes are a Tile's, or SHARED (G, M, N) and
// (G, M, K), also by address; W (G, N, K). dw (slots, G, N, K) and db (slots, G, N) are shares, or the
// results where slots is 1.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
grouped_linear_strips_backward_float32(const __grid_constant__ TensorMap dy_map,
                                       const __grid_constant__ TensorMap saved_map,
                                       const __grid_constant__ TensorMap x_map,
                                       const __grid_constant__ TensorMap dx_map,
                                       const float* __restrict__ weight, float* __restrict__ dw,
                                       float* __restrict__ db, char* dy_begin, char* saved_begin,
                                       char* x_begin, char* dx_begin, int rows, int groups, int slots,
                                       int tiles, int each, int more) {
  extern __shared__ __align__(1024) char memory[];
  const u32 bars = (smem_addr(memory) + 1023u) & ~1023u;
  const u32 full = bars, empty = full + 8 * STAGES, ready = empty + 8 * STAGES;
  const u32 done = ready + 8 * STAGES, taken = done + 8 * OUTS;
  const u32 weights = bars + BARRIERS, stages = weights + HELD, outs = stages + STAGES * STAGE;
  const u32 partial = outs + (NEED_DX ? OUTS * X::ROOM : 0);  // sums of db
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Work work = {tiles, each, more};
  const int block = blockIdx.x, begin = work.begin(block), count = work.begin(block + 1) - begin;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      bar_init(full + 8 * s, 1);
      bar_init(empty + 8 * s, PARTS);
      bar_init(ready + 8 * s, PARTS);
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
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(SERVICE_REGISTERS));
    Walk walk = {work, block, lane};
    walk.enter(begin / tiles);
    if (warp == WARPS) {  // brings tiles in
      const Moved<Dy> dy = {&dy_map, dy_begin, rows}, saved = {&saved_map, saved_begin, rows};
      const Moved<X> x = {&x_map, x_begin, rows};
      for (int i = 0; i < count; ++i) {
        const int stage = i % STAGES, row = ROWS * walk.tokens(i);
        if (i >= STAGES) bar_wait(empty + 8 * stage, (i / STAGES - 1) & 1);
        if (lane == 0) {
          const u32 bar = full + 8 * stage, to = stages + stage * STAGE;
          bar_expect(bar, COPIED);
          dy.load(to, bar, walk.strip, row);
          if (HAS_SAVED) saved.load(to + SAVED_AT, bar, walk.strip, row);
          if (NEED_DW) x.load(to + X_AT, bar, walk.strip, row);
        }
        __syncwarp();
      }
    } else if (NEED_DX && warp == WARPS + 1) {  // takes dx out
      const Moved<X> dx = {&dx_map, dx_begin, rows};
      for (int i = 0; i < count; ++i) {
        const int out = i % OUTS, row = ROWS * walk.tokens(i);
        bar_wait(done + 8 * out, (i / OUTS) & 1);
        if (lane == 0) {
          dx.store(outs + out * X::ROOM, walk.strip, row);
          constexpr int KEPT = OUTS > 1 ? 1 : 0;  // tiles whose room is not free yet
          wait_stores<KEPT>();
          if (i >= KEPT) bar_arrive(taken + 8 * ((i - KEPT) % OUTS));
        }
        __syncwarp();
      }
      if (lane == 0) wait_stores<0>();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    // warps with more tiles of dx have fewer of dW; of the warps that share a part of the multiprocessor,
    // not all are the first of their teams
    const int team = warp / PARTS, part = (warp + team * PARTS / 4) % PARTS;
    const int half = part * HALVES % 2, beside = part * HALVES / 2;
    const int down = DOWN - 1 - part / ACROSS, across = part % ACROSS;
    float db_sum[4];
    auto prepare = [&](int i) {
      const int stage = i % STAGES;
      // The stage's last tile may be another team's, who may not have seen it come: without the first
      // wait the second could take that one for this.
      if (i >= STAGES) bar_wait(empty + 8 * stage, (i / STAGES - 1) & 1);
      bar_wait(full + 8 * stage, (i / STAGES) & 1);
      grade(db_sum, stages + stage * STAGE, part, lane);
      __syncwarp();
      if (lane == 0) bar_arrive(ready + 8 * stage);
    };
    int i = team, from = 0;
    while (from < count) {
      const int strip = (begin + from) / tiles, stop = min(count, (strip + 1) * tiles - begin);
      if (NEED_DX) {
        if (from > 0) asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
        place_weights(weights, weight + static_cast<u64>(strip) * (N * K), 32 * warp + lane);
        asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
      }
      Sums sums = {};
#pragma unroll
      for (int v = 0; v < 4; ++v) db_sum[v] = 0.0f;
      if (i < stop) prepare(i);
      for (; i < stop; i += TEAMS) {
        if (i + TEAMS < stop) prepare(i + TEAMS);
        const int stage = i % STAGES, slot = i % OUTS;
        const u32 dpre = stages + stage * STAGE;
        bar_wait(ready + 8 * stage, (i / STAGES) & 1);
        if (NEED_DX) {
          const u32 out = outs + slot * X::ROOM, bar = taken + 8 * slot, parity = (i / OUTS - 1) & 1;
          if (beside + BESIDE * (NT - 1) < DX_TILES)
            make_dx<NT>(out, weights, dpre, bar, i >= OUTS, parity, half, beside, lane);
          else
            make_dx<NT - 1>(out, weights, dpre, bar, i >= OUTS, parity, half, beside, lane);
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          __syncwarp();
          if (lane == 0) bar_arrive(done + 8 * slot);
        }
        if (NEED_DW) {
          if (down + DOWN * (MT - 1) < M_TILES)
            add_products<MT>(sums, dpre, dpre + X_AT, down, across, lane);
          else if constexpr (MT > 1)
            add_products<MT - 1>(sums, dpre, dpre + X_AT, down, across, lane);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) bar_arrive(empty + 8 * stage);
      }
      if (NEED_SUMS) {
        const u64 turn = (block - work.first(strip)) * TEAMS + team;
        const u64 share = turn * groups + strip;
        if (NEED_DW) store_dw(sums, dw + share * (N * K), down, across, lane);
        if (NEED_DB) {
          store_db(db_sum, db + share * N, partial + 4 * N * PARTS * team, part, lane, team);
          asm volatile("bar.sync %0, %1;" ::"r"(team + 2), "n"(32 * PARTS) : "memory");
        }
      }
      from = stop;
    }
  }
}

// Adds up the shares of a strip's teams, in order; the first dw_blocks blocks those of dW.
extern "C" __global__ void __launch_bounds__(256)
grouped_linear_strips_sums_float32(const float* dw_shares, const float* db_shares, float* dw, float* db,
                                   int groups, int tiles, int each, int more, int dw_blocks) {
  const Work work = {tiles, each, more};
  const bool of_dw = blockIdx.x < dw_blocks;
  const u32 size = of_dw ? N * K : N;  // numbers of a group
  const u32 at = ((of_dw ? blockIdx.x : blockIdx.x - dw_blocks) * 256 + threadIdx.x) * 4;
  if (at >= groups * size) return;
  const int strip = at / size, shares = (work.last(strip) - work.first(strip) + 1) * TEAMS;
  const float4* from = reinterpret_cast<const float4*>(of_dw ? dw_shares : db_shares) + at / 4;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  wait_for_previous();
#pragma unroll 4
  for (int s = 0; s < shares; ++s) {
    const float4 share = from[static_cast<u64>(s) * (groups * size / 4)];
    sum.x += share.x;
    sum.y += share.y;
    sum.z += share.z;
    sum.w += share.w;
  }
  reinterpret_cast<float4*>(of_dw ? dw : db)[at / 4] = sum;
}
