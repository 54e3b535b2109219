// Products of float32 by tensor cores of float16, as accurate as float32 itself, on Hopper (sm_90a).
//
//   C[m, n] = sum_k A[m, k] * B[n, k];   pre = C + bias;   Y = act(pre)
//
// Both operands come as two planes of float16 (planes_split.cu): A = s_m (h + l / 2^11), B alike, with
// a scale s for each BK numbers of a row (a column) along K.
//
//   C = sum of s_m s_n (sum h h + (sum h l + sum l h) / 2^11);  l l is below what float32 keeps.
//
// Where an operand has numbers small beside others of their BK, these have planes of their own, whose
// scale is s / 2^29. Such a k-tile takes more steps, one for each pair of levels that exists.
//
// Tensor cores truncate while they add, so sums over BK numbers are promoted: scaled and added up in
// registers, in float32. A block is a producer warpgroup and two consumers, of which each has half a
// tile's rows. They issue products by turns (TURNS), so that one promotes while the other multiplies.
// CLUSTER blocks along M share one B tile: each loads 1/CLUSTER of it and multicasts it.
//
// Where a row or column has no planes over BK numbers (its scale is below 0), a warp multiplies and adds
// these numbers themselves.
//
// A may also come as numbers (READS), of which consumers make planes in registers: that costs arithmetic
// for each column of tiles, and saves writing planes and reading them.
//
// Slices share K out: their sums go to `parts`, and planes_sums adds them in order and finishes them.
// Every sum is added in one order: results are deterministic.
//
// hopper_words.h, activations/cuda.h, hopper_async.h and planes.h come before this file. Macros
// from the host: BM (128) BN STAGES CLUSTER GROUP_M A_MN B_MN TURNS READS SAVE HAS_BIAS ADDED
// A_DERIVED B_DERIVED ACT, IS_BF16 0, and the functions wgmma and wgmma_first for accumulators of BN / 2.
//   A_MN / B_MN 1: the operand's M (N) dimension is the contiguous one in memory.
//   READS: 0 where A comes as planes, else of how many matrices; rows lie along K, and blocks alone.
//   SAVE 1: `pre` is written beside Y.
//   ADDED 1: C is added to what Y holds; without bias and activation.
//   A_DERIVED / B_DERIVED: how the operand is derived; where one is, the activation is its, and none of Y.

constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2;  // of a plane, or of half a tile of numbers
constexpr int A_STAGE = (READS ? 2 * READS : 2) * A_BYTES, STAGE_BYTES = A_STAGE + 2 * B_BYTES;
constexpr int TOLD_OFFSET = (BM + BN) * 4;  // behind scales, what a step is
constexpr int SCALES_OFFSET = STAGES * STAGE_BYTES, SCALES_BYTES = TOLD_OFFSET + 16;
constexpr int BAR_OFFSET = SCALES_OFFSET + 2 * STAGES * SCALES_BYTES;
constexpr int B_PART = (B_MN ? BK : BN) / CLUSTER;  // rows this block loads of B, or of its K
constexpr u64 A_K_STEP = (A_MN ? 16 * 128 : 32) >> 4;
constexpr u64 B_K_STEP = (B_MN ? 16 * 128 : 32) >> 4;

constexpr bool ANY_DERIVED = A_DERIVED != DERIVED_NONE || B_DERIVED != DERIVED_NONE;

static_assert(BM == 128 && BN % 64 == 0 && B_PART % 8 == 0, "BM, BN");
static_assert(!READS || (!A_MN && CLUSTER == 1), "READS");
static_assert(!READS || (READS <= 2 && A_DERIVED != DERIVED_GATE_GRADIENT), "READS");

struct Params {
  TensorMap a[4], b[4];                  // planes, high first; then of small numbers; or READS matrices
  const float *a_scales, *b_scales;      // (k-tiles, a_lines), (k-tiles, b_lines)
  const int *a_small, *b_small;          // (k-tiles, lines / 64): whether there are small numbers
  const float* plain[3][2];              // the numbers, or what they are derived from: of A, of B
  const float* bias;                     // (N) or null
  float *y, *pre;                        // (M, N) dense
  float* parts;                          // (slices, M, N), where there are several
  long long strides[3][2][2];            // of these: along M (N), along K
  int M, N, K, slices, slice_tiles;      // slice_tiles: k-tiles of a slice
  int tiles_m, tiles_n;                  // of CLUSTER * BM rows, of BN columns
  int a_lines, b_lines;                  // M, N and more, a multiple of 64
};

struct Tile { int m, n, slice; };

// Columns of GROUP_M row-tiles, so that one wave of blocks reads a compact patch of A and B.
__device__ __forceinline__ Tile tile_at(const Params& p, int t) {
  const int each = p.tiles_m * p.tiles_n, slice = t / each;
  t -= slice * each;
  const int per_group = GROUP_M * p.tiles_n;
  const int group = t / per_group;
  const int rest = t - group * per_group;
  const int rows = min(GROUP_M, p.tiles_m - group * GROUP_M);
  return {group * GROUP_M + rest % rows, rest / rows, slice};
}

__device__ __forceinline__ int k_tiles_of(const Params& p, int slice) {
  return min(p.slice_tiles, (p.K + BK - 1) / BK - slice * p.slice_tiles);
}

// ---------------------------------------------------------------- loads

__device__ __forceinline__ void load_a(const TensorMap* map, u32 to, u32 bar, int row, int k) {
  if constexpr (A_MN) {
#pragma unroll
    for (int i = 0; i < BM / 64; ++i) tma_load<1>(to + i * (BK * 128), map, bar, row + i * 64, k);
  } else {
    tma_load<1>(to, map, bar, k, row);
  }
}

__device__ __forceinline__ void load_b(const TensorMap* map, u32 to, u32 bar, int column, int k,
                                       u32 rank) {
  to += rank * (B_PART * 128);
  if constexpr (B_MN) {
#pragma unroll
    for (int i = 0; i < BN / 64; ++i)
      tma_load<CLUSTER>(to + i * (BK * 128), map, bar, column + i * 64, k + rank * B_PART);
  } else {
    tma_load<CLUSTER>(to, map, bar, k, column + rank * B_PART);
  }
}

// Where the scales of a stage lie. There are two of each stage's, which it takes in turn: those of a step
// may be read until the next step's stage is released.
__device__ __forceinline__ u32 scales_at(u32 base, int stage, u32 odd) {
  return base + SCALES_OFFSET + (odd * STAGES + stage) * SCALES_BYTES;
}

// What a step is, as consumers are told: its k-tile times 256 and
constexpr u32 A_LEVEL = 1, B_LEVEL = 2;         // the levels of planes
constexpr int A_BLOCKS = 2, B_BLOCKS = 4;       // from these bits on: which 64 lines have such planes
constexpr u32 ALL_BLOCKS = 0x7c, LAST = 1 << 7; // of the tile

// Whether lines of a k-tile have small numbers: rows of the whole cluster, columns; read, not looked at.
struct Small {
  int rows[CLUSTER * (BM / 64)], columns[BN / 64];

  __device__ __forceinline__ void read(const Params& p, Tile tile, int kt) {
    const int each_a = p.a_lines / 64, each_b = p.b_lines / 64;
    const int row = tile.m * CLUSTER * (BM / 64), column = tile.n * (BN / 64);
#pragma unroll
    for (int i = 0; i < CLUSTER * (BM / 64); ++i)
      rows[i] = !READS && row + i < each_a ? p.a_small[static_cast<long long>(kt) * each_a + row + i] : 0;
#pragma unroll
    for (int i = 0; i < BN / 64; ++i)
      columns[i] = column + i < each_b ? p.b_small[static_cast<long long>(kt) * each_b + column + i] : 0;
  }

  // In the bits that consumers are told, with the levels that any of the cluster has.
  __device__ __forceinline__ u32 bits(u32 rank) const {
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < CLUSTER * (BM / 64); ++i) {
      if (rows[i]) found |= A_LEVEL;
      if (rows[i] && i / (BM / 64) == rank) found |= 1 << (A_BLOCKS + i % (BM / 64));
    }
#pragma unroll
    for (int i = 0; i < BN / 64; ++i)
      if (columns[i]) found |= B_LEVEL | 1 << (B_BLOCKS + i);
    return found;
  }
};

// A stage is filled by two threads: load(stage, whether its turn is odd, its barrier, tile, k-tile, what
// consumers are told).
template <class Load>
__device__ __forceinline__ void fill(const Params& p, u32 base, u32 rank, int first, int step, int tiles,
                                     const Load& load) {
  constexpr u32 kA = 3 << A_BLOCKS, kB = ALL_BLOCKS & ~kA, kLevels = A_LEVEL | B_LEVEL;
  int stage = 0;
  u32 odd = 0;
  for (int t = first; t < tiles; t += step) {
    const Tile tile = tile_at(p, t);
    const int begin = tile.slice * p.slice_tiles, end = begin + k_tiles_of(p, tile.slice);
    Small next;
    next.read(p, tile, begin);
#pragma unroll 1
    for (int kt = begin; kt < end; ++kt) {
      const Small small = next;
      const bool last = kt + 1 == end;
      if (!last) next.read(p, tile, kt + 1);
      u32 found = 0;
#pragma unroll 1
      for (u32 levels = 0; levels <= (found & kLevels); ++levels) {
        if (levels & ~found) continue;
        if (levels == 0 && last) found = small.bits(rank);  // others' first steps need not wait for it
        u32 told = static_cast<u32>(kt) << 8 | levels;
        told |= (levels & A_LEVEL ? found : ALL_BLOCKS) & kA;
        told |= (levels & B_LEVEL ? found : ALL_BLOCKS) & kB;
        if (last && levels == (found & kLevels)) told |= LAST;
        const u32 full = base + BAR_OFFSET + stage * 8;
        mbar_wait(full + STAGES * 8, odd ^ 1);  // a fresh barrier counts as "previous phase done"
        load(stage, odd, full, tile, kt, told);
        if (++stage == STAGES) { stage = 0; odd ^= 1; }
        if (levels == 0 && !last) found = small.bits(rank);
      }
    }
  }
}

__device__ __forceinline__ int row_of(Tile tile, u32 rank) { return (tile.m * CLUSTER + rank) * BM; }

__device__ __forceinline__ void fill_planes(const Params& p, u32 base, u32 rank, int first, int step,
                                            int tiles) {
  fill(p, base, rank, first, step, tiles, [&](int stage, u32, u32 full, Tile tile, int kt, u32 told) {
    const u32 to = base + stage * STAGE_BYTES;
    const TensorMap* const a = p.a + (told & A_LEVEL ? 2 : 0);
    const TensorMap* const b = p.b + (told & B_LEVEL ? 2 : 0);
    mbar_expect(full, STAGE_BYTES);
#pragma unroll
    for (int plane = 0; plane < 2; ++plane) {
      if (!READS) load_a(a + plane, to + plane * A_BYTES, full, row_of(tile, rank), kt * BK);
      load_b(b + plane, to + A_STAGE + plane * B_BYTES, full, tile.n * BN, kt * BK, rank);
    }
#pragma unroll
    for (int half = 0; half < 2 * READS; ++half)
      tma_load<1>(to + half * A_BYTES, p.a + half / 2, full, kt * BK + half % 2 * (BK / 2),
                  row_of(tile, rank));
  });
}

// Those of lines that exist; the last blocks of a cluster may have no rows.
__device__ __forceinline__ void fill_scales(const Params& p, u32 base, u32 rank, int first, int step,
                                            int tiles) {
  fill(p, base, rank, first, step, tiles, [&](int stage, u32 odd, u32 full, Tile tile, int kt, u32 told) {
    const u32 to = scales_at(base, stage, odd);
    const int row = row_of(tile, rank), column = tile.n * BN;
    const int rows = READS ? 0 : max(min(BM, p.a_lines - row), 0), columns = min(BN, p.b_lines - column);
    store_shared32(to + TOLD_OFFSET, told);
    mbar_expect(full, 4 * (rows + columns));
    if (!READS && (CLUSTER == 1 || rows))
      bulk_load(to, p.a_scales + static_cast<long long>(kt) * p.a_lines + row, full, 4 * rows);
    bulk_load(to + 4 * BM, p.b_scales + static_cast<long long>(kt) * p.b_lines + column, full,
              4 * columns);
  });
}

// ---------------------------------------------------------------- products
// acc[4j + 2h + e] is at row warp*16 + h*8 + lane/4, column 8j + 2*(lane%4) + e of a consumer's.

__device__ __forceinline__ void begin_turn(int consumer) {
  if (TURNS) bar_sync(1 + consumer, 256);
}

__device__ __forceinline__ void end_turn(int consumer) {
  if (TURNS) bar_arrive(1 + (consumer ^ 1), 256);
}

// What wgmma takes of A from registers, for each 16 along K.
using Words = u32[BK / 16][4];

__device__ __forceinline__ u64 step_of(u64 a, int k) { return a + k * A_K_STEP; }
__device__ __forceinline__ const u32 (&step_of(const Words& a, int k))[4] { return a[k]; }

template <bool kFirst, class Operand>
__device__ __forceinline__ void multiply(float (&acc)[BN / 2], const Operand& a, u64 b) {
#pragma unroll
  for (int k = 0; k < BK / 16; ++k) {
    if (kFirst && k == 0) wgmma_first(acc, step_of(a, k), b);
    else wgmma(acc, step_of(a, k), b + k * B_K_STEP);
  }
}

__device__ __forceinline__ void hold(u64) {}

// wgmma has read them once the wait that stands before is over.
__device__ __forceinline__ void hold(Words& a) {
#pragma unroll
  for (int i = 0; i < BK / 4; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

__device__ __forceinline__ float load_scale(u32 at) { return __uint_as_float(load_shared32(at)); }

// acc = s_m acc
__device__ __forceinline__ void scale(float (&acc)[BN / 2], float upper, float lower) {
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) acc[i] *= i & 2 ? lower : upper;
}

// sum += s_n acc
__device__ __forceinline__ void promote(float (&sum)[BN / 2], const float (&acc)[BN / 2], u32 columns) {
#pragma unroll
  for (int i = 0; i < BN / 2; i += 4) {
    const float2 s = load_shared64(columns + 8 * i);
    sum[i] = fmaf(acc[i], s.x, sum[i]);
    sum[i + 1] = fmaf(acc[i + 1], s.y, sum[i + 1]);
    sum[i + 2] = fmaf(acc[i + 2], s.x, sum[i + 2]);
    sum[i + 3] = fmaf(acc[i + 3], s.y, sum[i + 3]);
  }
}

// Rows' scales: those that sums are multiplied by before columns', and those behind them, where products
// of small numbers would leave float32's range.
struct Scales {
  float upper, lower, late_upper, late_lower;
  bool late;           // of any row of the warp
  bool plain[2];       // whether these rows have no planes

  // Lines behind the last row may hold anything.
  __device__ __forceinline__ void put_off(u32 told) {
    const float least = told & (A_LEVEL | B_LEVEL) ? 1.0f : 0x1p-70f;  // sums from 2^-28 on stay whole
    late_upper = upper < least ? upper : 1.0f;
    late_lower = lower < least ? lower : 1.0f;
    upper = upper < least ? 1.0f : upper;
    lower = lower < least ? 1.0f : lower;
    late = __any_sync(0xffffffffu, late_upper < 1.0f || late_lower < 1.0f);
  }
};

// sum += s_n acc with late scales of rows and 2^-29 for each second level of a step's; nothing where there
// are no such planes.
__device__ __forceinline__ void promote_small(float (&sum)[BN / 2], const float (&acc)[BN / 2],
                                              u32 columns, const Scales& rows, u32 told, int consumer) {
  constexpr float kLevel = 1.0f / (1 << 29);
  const float level = (told & A_LEVEL ? kLevel : 1.0f) * (told & B_LEVEL ? kLevel : 1.0f);
#pragma unroll
  for (int i = 0; i < BN / 2; i += 2) {
    const float2 s = load_shared64(columns + 8 * (i & ~3));
    const float late = i & 2 ? rows.late_lower : rows.late_upper;
    const bool has = told >> (A_BLOCKS + consumer) & told >> (B_BLOCKS + i / 32) & 1;
    if (!has) continue;
    // the larger scale first
    sum[i] += late < 1.0f ? acc[i] * s.x * late * level : acc[i] * level * s.x;
    sum[i + 1] += late < 1.0f ? acc[i + 1] * s.y * late * level : acc[i + 1] * level * s.y;
  }
}

// A's numbers of a k-tile that a thread holds, on their rows' scales: of two rows, 8 apart, numbers 2c,
// 2c + 1, 2c + 8 and 2c + 9 of each 16 along K, where c is lane % 4.
struct Numbers {
  float v[BK / 16][2][4];

  // From where a warp's 16 rows lie in the first half of the tile.
  __device__ __forceinline__ void read(u32 rows) {
    const u32 lane = lane_id(), row = lane >> 2, c = lane & 3;
    const bool odd = row & 1;  // these read two steps in the other order: so no two rows meet in a bank
#pragma unroll
    for (int i = 0; i < BK / 8; ++i) {
      const int half = i / 4, part = i / 2 % 2, r = i % 2;  // parts are 8 numbers apart
      float2 found[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const u32 four = ((j ^ odd) * 4 + part * 2 + (c >> 1)) ^ row;
        const u32 at = rows + half * A_BYTES + (row + 8 * r) * 128 + (four << 4) + (c & 1) * 8;
        const float2 x = load_shared64(at);
        float2 saved{};
        if (READS > 1) saved = load_shared64(at + 2 * A_BYTES);
        found[j] = {derived(A_DERIVED, x.x, saved.x, 0.0f), derived(A_DERIVED, x.y, saved.y, 0.0f)};
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 own = odd ? found[1 - j] : found[j];
        v[2 * half + j][r][2 * part] = own.x;
        v[2 * half + j][r][2 * part + 1] = own.y;
      }
    }
  }

  // Puts them on their rows' scales; whether any is small.
  __device__ __forceinline__ bool scale(Scales& s) {
    float of[2];
    bool found = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Known row{0, 0};
      u32 least = 0xffffffffu;  // of the bits of those that are not 0, less 1
#pragma unroll
      for (int i = 0; i < BK / 4; ++i) {
        row.add(v[i / 4][r][i % 4]);
        least = min(least, (__float_as_uint(v[i / 4][r][i % 4]) & 0x7fffffffu) - 1);
      }
      row.add_across(1);
      row.add_across(2);
      of[r] = row.scale();
      s.plain[r] = of[r] < 0.0f;
      const float own = s.plain[r] ? 1.0f : of[r], to = inverse(own);
      found |= !s.plain[r] && least < __float_as_uint(own / (1 << TOP)) - 1;
      if (s.plain[r]) {
#pragma unroll
        for (int i = 0; i < BK / 4; ++i) v[i / 4][r][i % 4] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < BK / 4; ++i) v[i / 4][r][i % 4] *= to;
    }
    s.upper = of[0], s.lower = of[1];
    return found;
  }

  // Planes of the first level or the second, or of all numbers where none is small.
  template <int kLevel>
  __device__ __forceinline__ void planes(Words& high, Words& low) const {
    const auto of_level = [](float x) {
      if (kLevel == 0) return x;
      if (is_small(x) != (kLevel == 2)) return 0.0f;
      return kLevel == 2 ? x * (1 << LEVEL) : x;
    };
#pragma unroll
    for (int i = 0; i < BK / 4; ++i) {
      const int step = i / 4, part = i / 2 % 2, r = i % 2;
      split(of_level(v[step][r][2 * part]), of_level(v[step][r][2 * part + 1]), high[step][i % 4],
            low[step][i % 4]);
    }
  }
};

struct Pipe {
  u32 base;
  int consumer, warp, stage;
  u32 phase;

  __device__ __forceinline__ u32 scales() const { return scales_at(base, stage, phase); }

  __device__ __forceinline__ void release() const {
    __syncwarp();  // its lanes have read the scales of the step before
    const u32 empty = base + BAR_OFFSET + (STAGES + stage) * 8, lane = lane_id();
    if (CLUSTER > 1) {
      if (lane < CLUSTER) mbar_arrive_cta(empty, lane);
    } else if (lane == 0) {
      mbar_arrive(empty);
    }
  }

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }

  // Scales of a thread's two rows. Behind the last row lies anything.
  __device__ __forceinline__ void read_scales(Scales& s) const {
    const u32 rows = scales() + 4 * (consumer * (BM / 2) + warp * 16 + (lane_id() >> 2));
    s.upper = load_scale(rows);
    s.lower = load_scale(rows + 32);
    s.plain[0] = s.upper < 0.0f;
    s.plain[1] = s.lower < 0.0f;
  }

  // Whether one of the warp's rows or columns may have no planes; behind the last column lies anything.
  __device__ __forceinline__ bool any_plain(const Scales& s) const {
    bool found = s.plain[0] || s.plain[1];
    const u32 lane = lane_id();
#pragma unroll
    for (int i = 0; i < BN / 64; ++i) {
      const float2 column = load_shared64(scales() + 4 * BM + 256 * i + 8 * lane);
      found |= column.x < 0.0f || column.y < 0.0f;
    }
    return __any_sync(0xffffffffu, found);
  }

  // acc = the products of planes with rows' scales, which are known once `meanwhile` has run, while the
  // tensor cores work; then the stage is released, or is not. Where registers hold both, the products of
  // high planes are under way while the others are scaled; else they are added to these. Where A's planes
  // are made here, a turn lasts to its end: meanwhile the other consumer makes its own.
  template <class Operand, class Meanwhile>
  __device__ __forceinline__ void multiply_planes(float (&acc)[BN / 2], Operand& high, Operand& low, u64 b,
                                                  bool turns, bool last, const Scales& s,
                                                  const Meanwhile& meanwhile) const {
    constexpr float kLow = 1.0f / 2048.0f;
    constexpr bool kBoth = BN <= (READS ? 64 : 128);
    hold(high), hold(low);
    if (turns) begin_turn(consumer);
    wgmma_fence();
    multiply<true>(acc, high, b + (B_BYTES >> 4));
    multiply<false>(acc, low, b);
    wgmma_commit();
    if constexpr (kBoth) {
      float of_high[BN / 2];
      multiply<true>(of_high, high, b);
      wgmma_commit();
      if (turns) end_turn(consumer);
      meanwhile();
      wgmma_wait<1>();
      settle(acc);
      scale(acc, kLow * s.upper, kLow * s.lower);
      wgmma_wait<0>();
      settle(of_high);
      hold(high), hold(low);
      if (last) release();
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) acc[i] = fmaf(of_high[i], i & 2 ? s.lower : s.upper, acc[i]);
    } else {
      if (turns && !READS) end_turn(consumer);
      meanwhile();
      wgmma_wait<0>();
      settle(acc);
      scale(acc, kLow, kLow);
      if (turns && !READS) begin_turn(consumer);
      wgmma_fence();
      multiply<false>(acc, high, b);
      wgmma_commit();
      if (turns) end_turn(consumer);
      wgmma_wait<0>();
      settle(acc);
      hold(high), hold(low);
      if (last) release();
      scale(acc, s.upper, s.lower);
    }
  }

  // sum += acc with rows' and columns' scales, of a step of that level.
  __device__ __forceinline__ void promote_step(float (&sum)[BN / 2], const float (&acc)[BN / 2],
                                               const Scales& s, u32 told) const {
    const u32 columns = scales() + 4 * BM + 8 * (lane_id() & 3);
    if (told & (A_LEVEL | B_LEVEL) || s.late) promote_small(sum, acc, columns, s, told, consumer);
    else promote(sum, acc, columns);
  }

  // sum += the products of a step; returns what it was told, the rows' scales, and whether the numbers of
  // some line are to be multiplied themselves.
  __device__ __forceinline__ u32 step(float (&sum)[BN / 2], Scales& s, bool& found) {
    mbar_wait(base + BAR_OFFSET + stage * 8, phase);
    const u32 told = load_shared32(scales() + TOLD_OFFSET);
    add_products(sum, s, found, told);
    found &= !(told & (A_LEVEL | B_LEVEL));  // the k-tile's first step had numbers without planes
    return told;
  }

#if !READS
  __device__ __forceinline__ void add_products(float (&sum)[BN / 2], Scales& s, bool& found, u32 told) {
    const u32 at = base + stage * STAGE_BYTES, a_at = at + consumer * (A_BYTES / 2);
    u64 high = make_desc<A_MN>(a_at), low = high + (A_BYTES >> 4);
    float acc[BN / 2];
    multiply_planes(acc, high, low, make_desc<B_MN>(at + A_STAGE), true, true, s, [&] {
      read_scales(s);
      found = any_plain(s);
      s.put_off(told);
    });
    promote_step(sum, acc, s, told);
  }
#else
  // Planes of A's numbers; those of the second level where any row of the consumer has them.
  __device__ __forceinline__ void add_products(float (&sum)[BN / 2], Scales& s, bool& found, u32 told) {
    const u32 at = base + stage * STAGE_BYTES, rows = at + (consumer * (BM / 2) + warp * 16) * 128;
    const u64 b = make_desc<B_MN>(at + A_STAGE);
    Numbers numbers;
    numbers.read(rows);
    const bool small = bar_any(3 + consumer, 128, numbers.scale(s));
    found = any_plain(s);
    float acc[BN / 2];
    Words high, low;
    if (small) numbers.planes<1>(high, low);
    else numbers.planes<0>(high, low);
    Scales own = s;
    multiply_planes(acc, high, low, b, true, !small, own, [&] { own.put_off(told); });
    promote_step(sum, acc, own, told);
    if (small) {
      numbers.read(rows);
      numbers.scale(s);
      numbers.planes<2>(high, low);
      own = s;
      multiply_planes(acc, high, low, b, false, true, own, [&] { own.put_off(told | A_LEVEL); });
      promote_step(sum, acc, own, told | A_LEVEL);
    }
  }
#endif
};

// ---------------------------------------------------------------- results

__device__ __forceinline__ bool aligned(const float* at) {
  return (reinterpret_cast<u64>(at) & 7) == 0;
}

// A warp's 16 rows of a tile, from `row` on.
struct Results {
  const Params& p;
  int row, column, slice;

  // A number of A or B, of a line along K.
  template <int kOperand>
  __device__ __forceinline__ float number(int line, int k) const {
    constexpr int kDerived = kOperand ? B_DERIVED : A_DERIVED;
    const auto read = [&](int i) {
      const long long* const s = p.strides[i][kOperand];
      return p.plain[i][kOperand][line * s[0] + k * s[1]];
    };
    const float x = read(0), saved = kDerived == DERIVED_NONE ? 0.0f : read(1);
    return derived(kDerived, x, saved, kDerived == DERIVED_GATE_GRADIENT ? read(2) : 0.0f);
  }

  // sum += the numbers' own products along a k-tile, where a row or a column has no planes there. Places
  // are worked out again at each k: they would not all fit in registers.
  __device__ __forceinline__ void add_plain(float (&sum)[BN / 2], u32 scales, int k_tile,
                                            const bool (&plain)[2]) const {
    bool rows[2];
    u64 columns = 0;
    {
      const int r = row + (lane_id() >> 2), c = 2 * (lane_id() & 3);
#pragma unroll
      for (int h = 0; h < 2; ++h) rows[h] = plain[h] && r + 8 * h < p.M;
#pragma unroll
      for (int i = 0; i < BN / 4; i += 2) {
        const float2 s = load_shared64(scales + 4 * (BM + c + 4 * i));
        columns |= static_cast<u64>(column + c + 4 * i < p.N && s.x < 0.0f) << i;
        columns |= static_cast<u64>(column + c + 4 * i + 1 < p.N && s.y < 0.0f) << (i + 1);
      }
    }
    if (!__any_sync(0xffffffffu, rows[0] || rows[1] || columns)) return;
    const int end = min((k_tile + 1) * BK, p.K);
#pragma unroll 1
    for (int k = k_tile * BK; k < end; ++k) {
      const u32 lane = lane_id();
      const int r = row + (lane >> 2), c = column + 2 * (lane & 3);
      float a[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        a[h] = number<0>(min(r + 8 * h, p.M - 1), k);
#pragma unroll
      for (int i = 0; i < BN / 4; ++i) {
        const int n = min(c + 8 * (i >> 1) + (i & 1), p.N - 1), at = 4 * (i >> 1) + (i & 1);
        const float b = number<1>(n, k);
        const bool own = columns >> i & 1;
        if (own || rows[0]) sum[at] = fmaf(a[0], b, sum[at]);
        if (own || rows[1]) sum[at + 2] = fmaf(a[1], b, sum[at + 2]);
      }
    }
  }

  // Groups j to j + 3 of eight columns each; `pairs`: rows begin on 8 bytes and have an even length.
  __device__ __forceinline__ void store(float* to, const float (&v)[BN / 2], int j, bool pairs) const {
    const u32 lane = lane_id();
    const int r = row + (lane >> 2), n = column + 2 * (lane & 3);
    float* const at[2] = {to + static_cast<long long>(r) * p.N + n,
                          to + static_cast<long long>(r + 8) * p.N + n};
    if (pairs) {
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 16; i += 2)
        if (r + 4 * (i & 2) < p.M && n + 2 * (i & ~3) < p.N)
          *reinterpret_cast<float2*>(at[i >> 1 & 1] + 2 * (i & ~3)) = {v[i], v[i + 1]};
    } else {
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 16; ++i)
        if (r + 4 * (i & 2) < p.M && n + 2 * (i & ~3) + (i & 1) < p.N)
          at[i >> 1 & 1][2 * (i & ~3) + (i & 1)] = v[i];
    }
  }

  // v += what lies there, alike.
  __device__ __forceinline__ void add(const float* from, float (&v)[BN / 2], int j, bool pairs) const {
    const u32 lane = lane_id();
    const int r = row + (lane >> 2), n = column + 2 * (lane & 3);
    const float* const at[2] = {from + static_cast<long long>(r) * p.N + n,
                                from + static_cast<long long>(r + 8) * p.N + n};
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 16; i += 2) {
      const float* const here = at[i >> 1 & 1] + 2 * (i & ~3);
      const int left = r + 4 * (i & 2) < p.M ? p.N - n - 2 * (i & ~3) : 0;
      if (pairs && left > 0) {
        const float2 old = *reinterpret_cast<const float2*>(here);
        v[i] += old.x, v[i + 1] += old.y;
      } else {
        if (left > 0) v[i] += here[0];
        if (left > 1) v[i + 1] += here[1];
      }
    }
  }

  __device__ __forceinline__ void finish(float (&sum)[BN / 2]) const {
    const bool last = p.slices == 1;
    float* const to = last ? p.y : p.parts + slice * (static_cast<long long>(p.M) * p.N);
    const bool pairs = p.N % 2 == 0 && aligned(to) && (!SAVE || aligned(p.pre));
    const int first = column + 2 * (lane_id() & 3);
    float bias[BN / 4];  // read before anything is written, which might be this
    if (HAS_BIAS) {
#pragma unroll
      for (int i = 0; i < BN / 4; ++i) {
        const int n = first + 8 * (i >> 1) + (i & 1);
        bias[i] = last && n < p.N ? p.bias[n] : 0.0f;
      }
    }
#pragma unroll
    for (int j = 0; j < BN / 8; j += 4) {
      if (last) {
#pragma unroll
        for (int i = 4 * j; HAS_BIAS && i < 4 * j + 16; ++i) sum[i] += bias[i / 4 * 2 + i % 2];
        if (SAVE) store(p.pre, sum, j, pairs);
#pragma unroll
        for (int i = 4 * j; !ANY_DERIVED && i < 4 * j + 16; ++i) sum[i] = act(sum[i]);
        if (ADDED) add(to, sum, j, pairs);
      }
      store(to, sum, j, pairs);
    }
  }
};

// ---------------------------------------------------------------- the kernel

extern "C" __global__ void __launch_bounds__(384, 1) planes_product(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = smem_addr(smem);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbar_init(base + BAR_OFFSET + s * 8, 2);
      mbar_init(base + BAR_OFFSET + (STAGES + s) * 8, 8 * CLUSTER);
    }
    fence_barriers();
  }
  if constexpr (CLUSTER > 1) cluster_sync(); else __syncthreads();
  wait_for_previous();
  let_next_start();

  const int tiles = p.tiles_m * p.tiles_n * p.slices;
  const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  if (warpgroup == 0) {
    fewer_registers<40>();
    if (threadIdx.x == 0) fill_planes(p, base, rank, first, step, tiles);
    if (threadIdx.x == 32) fill_scales(p, base, rank, first, step, tiles);
  } else {
    more_registers<232>();
    const int consumer = warpgroup - 1, warp = threadIdx.x % 128 / 32;
    if (TURNS && consumer == 1) bar_arrive(1, 256);  // consumer 0 starts
    Pipe pipe{base, consumer, warp, 0, 0};
    for (int t = first; t < tiles; t += step) {
      const Tile tile = tile_at(p, t);
      const int row = row_of(tile, rank) + consumer * (BM / 2) + warp * 16;
      const Results results{p, row, tile.n * BN, tile.slice};
      float sum[BN / 2] = {};
      u32 told;
#pragma unroll 1
      do {
        Scales s;
        bool found;
        told = pipe.step(sum, s, found);
        if (found) results.add_plain(sum, pipe.scales(), told >> 8, s.plain);
        pipe.next();
      } while (!(told & LAST));
      results.finish(sum);
    }
  }
  __syncwarp();
  if constexpr (CLUSTER > 1) cluster_sync();  // no block leaves while a peer may still write to it
}

// The slices' sums, added up in their order and finished.
extern "C" __global__ void __launch_bounds__(256) planes_sums(const __grid_constant__ Params p) {
  wait_for_previous();
  let_next_start();
  const long long all = static_cast<long long>(p.M) * p.N;
  const long long at = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= all) return;
  float v = 0.0f;
#pragma unroll 4
  for (int i = 0; i < p.slices; ++i) v += p.parts[i * all + at];
  if (HAS_BIAS) v += p.bias[at % p.N];
  if (SAVE) p.pre[at] = v;
  if (ADDED) v += p.y[at];
  p.y[at] = ANY_DERIVED ? v : act(v);
}
