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
// scale is s / 2^29. Such a k-tile is multiplied more than once, for each pair of levels that exists.
//
// Where all lines of a tile keep their standards (STANDARDS; planes.h), no scale is looked at before its
// end. Products with low planes, 2^11 below the others, are added up by the tensor cores all along.
//
// Tensor cores truncate while they add, so sums over BK numbers are promoted: scaled and added up in
// registers, in float32. A block is a producer warpgroup and two consumers, of which each has half a
// tile's rows. They issue products by turns, so that one promotes while the other multiplies.
//
// Where a row or column has no planes over BK numbers (its scale is below 0), a warp multiplies and adds
// these numbers themselves.
//
// A may also come as numbers (READS), which two more warpgroups turn into planes where they lie, one for
// each consumer: that costs arithmetic for each column of tiles, and saves writing planes and reading them.
//
// Slices share K out: their sums go to `parts`, and planes_sums adds them in order and finishes them.
// Every sum is added in one order: results are deterministic.
//
// hopper_words.h, activations/cuda.h, hopper_async.h and planes.h come before this file. Macros
// from the host: BM (128) BN STAGES GROUP_M A_MN B_MN READS STANDARDS SAVE HAS_BIAS ADDED
// A_DERIVED B_DERIVED ACT, IS_BF16 0, and the functions wgmma and wgmma_first for accumulators of BN / 2.
//   A_MN / B_MN 1: the operand's M (N) dimension is the contiguous one in memory.
//   READS 1: A comes as numbers; its rows lie along K, and it is not derived.
//   STANDARDS 1: lines of both have standards; A is not read.
//   SAVE 1: `pre` is written beside Y.
//   ADDED 1: C is added to what Y holds; without bias and activation.
//   A_DERIVED / B_DERIVED: how the operand is derived; where one is, the activation is its, and none of Y.

constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2;  // of a plane, or of half a tile of numbers
constexpr int A_STAGE = 2 * A_BYTES, STAGE_BYTES = A_STAGE + 2 * B_BYTES;
constexpr int TOLD_OFFSET = (BM + BN) * 4;      // behind scales, what a step is
constexpr int SMALL_OFFSET = TOLD_OFFSET + 16;  // where A is read, which 16 rows have small numbers
constexpr int SCALES_OFFSET = STAGES * STAGE_BYTES, SCALES_BYTES = SMALL_OFFSET + (READS ? 32 : 0);
// Barriers: of stages, that one is full, and empty; where A is read, that a consumer's planes are there;
// and of 16 rows each, that their planes have been multiplied, and that those of small numbers are there.
constexpr int BAR_OFFSET = SCALES_OFFSET + 2 * STAGES * SCALES_BYTES;
constexpr int SPLIT_OFFSET = BAR_OFFSET + 2 * STAGES * 8, DONE_OFFSET = SPLIT_OFFSET + 2 * STAGES * 8;
constexpr int AGAIN_OFFSET = DONE_OFFSET + 8 * 8;
constexpr int THREADS = READS ? 640 : 384, REGISTERS = READS ? 96 : 168;  // of each, when it begins
constexpr int PRODUCER_REGISTERS = READS ? 32 : 40, SPLIT_REGISTERS = BN > 64 ? 72 : 80;
constexpr int CONSUMER_REGISTERS = READS ? 224 - SPLIT_REGISTERS : 232;
constexpr u64 A_K_STEP = (A_MN ? 16 * 128 : 32) >> 4;
constexpr u64 B_K_STEP = (B_MN ? 16 * 128 : 32) >> 4;

constexpr u32 LOW_TILES = 64;  // k-tiles that products with low planes are added up over
constexpr bool BOTH = !READS || BN <= 64;  // registers hold products of high planes and of others
constexpr bool ANY_DERIVED = A_DERIVED != DERIVED_NONE || B_DERIVED != DERIVED_NONE;

static_assert(BM == 128 && (BN == 64 || BN == 128), "BM, BN");
static_assert(!STANDARDS || !READS, "STANDARDS");
static_assert(!READS || (!A_MN && A_DERIVED == DERIVED_NONE), "READS");
static_assert(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS + 2 * READS * SPLIT_REGISTERS <=
                  THREADS / 128 * REGISTERS,
              "who asks for more registers than there are waits for ever");

struct Params {
  TensorMap a[4], b[4];                  // planes, high first; then of small numbers; or the numbers
  const float *a_scales, *b_scales;      // (k-tiles, a_lines), (k-tiles, b_lines)
  const int *a_small, *b_small;          // (k-tiles, lines / 64): HAS_SMALL and APART
  const float* plain[3][2];              // the numbers, or what they are derived from: of A, of B
  const float* bias;                     // (N) or null
  float *y, *pre;                        // (M, N) dense
  float* parts;                          // (slices, M, N), where there are several
  long long strides[3][2][2];            // of these: along M (N), along K
  int M, N, K, slices, slice_tiles;      // slice_tiles: k-tiles of a slice
  int tiles_m, tiles_n;                  // of BM rows, of BN columns
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

__device__ __forceinline__ void load_b(const TensorMap* map, u32 to, u32 bar, int column, int k) {
  if constexpr (B_MN) {
#pragma unroll
    for (int i = 0; i < BN / 64; ++i) tma_load<1>(to + i * (BK * 128), map, bar, column + i * 64, k);
  } else {
    tma_load<1>(to, map, bar, k, column);
  }
}

// Where the scales of a stage lie, and what consumers are told of its step. There are two of each stage's,
// which it takes in turn: those of a step may be read until the next step's stage is released.
__device__ __forceinline__ u32 scales_at(u32 base, int stage, u32 odd) {
  return base + SCALES_OFFSET + (odd * STAGES + stage) * SCALES_BYTES;
}

// What a step is, as consumers are told: its k-tile times 512 and
constexpr u32 A_LEVEL = 1, B_LEVEL = 2;         // the levels of planes
constexpr int A_BLOCKS = 2, B_BLOCKS = 4;       // from these bits on: which 64 lines have such planes
constexpr u32 ALL_BLOCKS = 0x7c, LAST = 1 << 7; // of the tile
constexpr u32 ON_STANDARDS = 1 << 8;            // all scales of the tile are their lines' standards
constexpr int K_TILE = 9;

// Whether lines of a k-tile have small numbers: rows, columns; read, not looked at.
struct Small {
  int rows[BM / 64], columns[BN / 64];

  __device__ __forceinline__ void read(const Params& p, Tile tile, int kt) {
    const int each_a = p.a_lines / 64, each_b = p.b_lines / 64;
    const int row = tile.m * (BM / 64), column = tile.n * (BN / 64);
#pragma unroll
    for (int i = 0; i < BM / 64; ++i)
      rows[i] = !READS && row + i < each_a ? p.a_small[static_cast<long long>(kt) * each_a + row + i] : 0;
#pragma unroll
    for (int i = 0; i < BN / 64; ++i)
      columns[i] = column + i < each_b ? p.b_small[static_cast<long long>(kt) * each_b + column + i] : 0;
  }

  // In the bits that consumers are told.
  __device__ __forceinline__ u32 bits() const {
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < BM / 64; ++i)
      if (rows[i] & HAS_SMALL) found |= A_LEVEL | 1 << (A_BLOCKS + i);
#pragma unroll
    for (int i = 0; i < BN / 64; ++i)
      if (columns[i] & HAS_SMALL) found |= B_LEVEL | 1 << (B_BLOCKS + i);
    return found;
  }
};

// Whether no line of a tile has a scale apart from its standard along these k-tiles; asked by a warp.
__device__ __forceinline__ bool on_standards(const Params& p, Tile tile, int begin, int end) {
  const int each_a = p.a_lines / 64, each_b = p.b_lines / 64;
  const int row = tile.m * (BM / 64), column = tile.n * (BN / 64);
  int found = 0;
#pragma unroll 1
  for (int kt = begin + lane_id(); kt < end; kt += 32) {
    const int* const rows = p.a_small + static_cast<long long>(kt) * each_a;
    const int* const columns = p.b_small + static_cast<long long>(kt) * each_b;
#pragma unroll
    for (int i = 0; i < BM / 64; ++i) found |= rows[min(row + i, each_a - 1)];
#pragma unroll
    for (int i = 0; i < BN / 64; ++i) found |= columns[min(column + i, each_b - 1)];
  }
  return !__any_sync(0xffffffffu, found & APART);
}

// A stage is filled by a thread and a warp: load(stage, whether its turn is odd, its barrier, tile, k-tile,
// what consumers are told).
template <bool kWarp, class Load>
__device__ __forceinline__ void fill(const Params& p, u32 base, int first, int step, int tiles,
                                     const Load& load) {
  constexpr u32 kA = 3 << A_BLOCKS, kB = ALL_BLOCKS & ~kA, kLevels = A_LEVEL | B_LEVEL;
  int stage = 0;
  u32 odd = 0;
  for (int t = first; t < tiles; t += step) {
    const Tile tile = tile_at(p, t);
    const int begin = tile.slice * p.slice_tiles, end = begin + k_tiles_of(p, tile.slice);
    const u32 kind = STANDARDS && kWarp && on_standards(p, tile, begin, end) ? ON_STANDARDS : 0;
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
        if (levels == 0 && last) found = small.bits();  // others' first steps need not wait for it
        u32 told = static_cast<u32>(kt) << K_TILE | kind | levels;
        told |= (levels & A_LEVEL ? found : ALL_BLOCKS) & kA;
        told |= (levels & B_LEVEL ? found : ALL_BLOCKS) & kB;
        if (last && levels == (found & kLevels)) told |= LAST;
        const u32 full = base + BAR_OFFSET + stage * 8;
        mbar_wait(full + STAGES * 8, odd ^ 1);  // a fresh barrier counts as "previous phase done"
        load(stage, odd, full, tile, kt, told);
        if (kWarp) __syncwarp();  // else the first lane could be a stage's turn ahead of those that wait
        if (++stage == STAGES) { stage = 0; odd ^= 1; }
        if (levels == 0 && !last) found = small.bits();
      }
    }
  }
}

__device__ __forceinline__ void fill_planes(const Params& p, u32 base, int first, int step, int tiles) {
  const auto load = [&](int stage, u32, u32 full, Tile tile, int kt, u32 told) {
    const u32 to = base + stage * STAGE_BYTES;
    const TensorMap* const a = p.a + (told & A_LEVEL ? 2 : 0);
    const TensorMap* const b = p.b + (told & B_LEVEL ? 2 : 0);
    mbar_expect(full, STAGE_BYTES);
#pragma unroll
    for (int plane = 0; plane < 2; ++plane) {
      if (!READS) load_a(a + plane, to + plane * A_BYTES, full, tile.m * BM, kt * BK);
      load_b(b + plane, to + A_STAGE + plane * B_BYTES, full, tile.n * BN, kt * BK);
    }
#pragma unroll
    for (int half = 0; half < 2 * READS; ++half)
      tma_load<1>(to + half * A_BYTES, p.a, full, kt * BK + half * (BK / 2), tile.m * BM);
  };
  fill<false>(p, base, first, step, tiles, load);
}

// Those of lines that exist. By a warp.
__device__ __forceinline__ void fill_scales(const Params& p, u32 base, int first, int step, int tiles) {
  const auto load = [&](int stage, u32 odd, u32 full, Tile tile, int kt, u32 told) {
    if (lane_id()) return;
    const u32 to = scales_at(base, stage, odd);
    const int row = tile.m * BM, column = tile.n * BN;
    const int rows = READS ? 0 : min(BM, p.a_lines - row), columns = min(BN, p.b_lines - column);
    store_shared32(to + TOLD_OFFSET, told);
    mbar_expect(full, 4 * (rows + columns));
    if (!READS)
      bulk_load(to, p.a_scales + static_cast<long long>(kt) * p.a_lines + row, full, 4 * rows);
    bulk_load(to + 4 * BM, p.b_scales + static_cast<long long>(kt) * p.b_lines + column, full,
              4 * columns);
  };
  fill<true>(p, base, first, step, tiles, load);
}

// ---------------------------------------------------------------- products
// acc[4j + 2h + e] is at row warp*16 + h*8 + lane/4, column 8j + 2*(lane%4) + e of a consumer's.

__device__ __forceinline__ void begin_turn(int consumer) {
  bar_sync(1 + consumer, 256);
}

__device__ __forceinline__ void end_turn(int consumer) {
  bar_arrive(1 + (consumer ^ 1), 256);
}

template <bool kFirst>
__device__ __forceinline__ void multiply(float (&acc)[BN / 2], u64 a, u64 b) {
#pragma unroll
  for (int k = 0; k < BK / 16; ++k) {
    if (kFirst && k == 0) wgmma_first(acc, a, b);
    else wgmma(acc, a + k * A_K_STEP, b + k * B_K_STEP);
  }
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

// sum += acc where there are such planes, with 2^-29 for each second level of a step.
__device__ __forceinline__ void add_small(float (&sum)[BN / 2], const float (&acc)[BN / 2], u32 told,
                                          int consumer) {
  constexpr float kLevel = 1.0f / (1 << 29);
  const float level = (told & A_LEVEL ? kLevel : 1.0f) * (told & B_LEVEL ? kLevel : 1.0f);
#pragma unroll
  for (int i = 0; i < BN / 2; ++i)
    if (told >> (A_BLOCKS + consumer) & told >> (B_BLOCKS + i / 32) & 1)
      sum[i] = fmaf(acc[i], level, sum[i]);
}

struct Pipe {
  u32 base;
  int consumer, warp, stage;
  u32 phase, again;

  __device__ __forceinline__ u32 scales() const { return scales_at(base, stage, phase); }

  __device__ __forceinline__ void release() const {
    __syncwarp();  // its lanes have read the scales of the step before
    if (lane_id() == 0) mbar_arrive(base + BAR_OFFSET + (STAGES + stage) * 8);
  }

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }

  // Where A is read, which of the consumer's 16 rows each have planes of the second level.
  __device__ __forceinline__ u32 small_rows() const {
    const uint4 found = load_shared128(scales() + SMALL_OFFSET + 16 * consumer);
    return found.x | found.y << 1 | found.z << 2 | found.w << 3;
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

  // Whether the tile that comes next is on its lines' standards.
  __device__ __forceinline__ bool on_standards() const {
    if (!STANDARDS) return false;
    mbar_wait(base + BAR_OFFSET + stage * 8, phase);
    return load_shared32(scales() + TOLD_OFFSET) & ON_STANDARDS;
  }

  // sum = the products of such a tile.
  __device__ __forceinline__ void standard_tile(float (&sum)[BN / 2]) {
    constexpr float kLow = 1.0f / 2048.0f;
    float low[BN / 2] = {};
    for (bool last = false; !last; next()) {
      mbar_wait(base + BAR_OFFSET + stage * 8, phase);
      const u32 told = load_shared32(scales() + TOLD_OFFSET);
      last = told & LAST;
      const u32 at = base + stage * STAGE_BYTES;
      const u64 a_high = make_desc<A_MN>(at + consumer * (A_BYTES / 2)), a_low = a_high + (A_BYTES >> 4);
      const u64 b_high = make_desc<B_MN>(at + A_STAGE), b_low = b_high + (B_BYTES >> 4);
      float high[BN / 2];
      begin_turn(consumer);
      wgmma_fence();
      if (told & (A_LEVEL | B_LEVEL)) {
        multiply<true>(high, a_high, b_low);
        multiply<false>(high, a_low, b_high);
        wgmma_commit();
        wgmma_wait<0>();
        settle(high);
        scale(high, kLow, kLow);
        wgmma_fence();
        multiply<false>(high, a_high, b_high);
      } else {
        multiply<false>(low, a_high, b_low);
        multiply<false>(low, a_low, b_high);
        multiply<true>(high, a_high, b_high);
      }
      wgmma_commit();
      end_turn(consumer);
      wgmma_wait<0>();
      settle(low);
      settle(high);
      release();
      if (told & (A_LEVEL | B_LEVEL)) {
        add_small(sum, high, told, consumer);
      } else {
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sum[i] += high[i];
      }
      if (last || (told >> K_TILE) % LOW_TILES == LOW_TILES - 1) {
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sum[i] = fmaf(low[i], kLow, sum[i]), low[i] = 0.0f;
      }
      if (last) on_scales(sum);
    }
  }

  // sum *= rows' and columns' scales of a step, the larger first: nothing leaves float32's range before.
  __device__ __forceinline__ void on_scales(float (&sum)[BN / 2]) const {
    Scales rows;
    read_scales(rows);
    const u32 columns = scales() + 4 * BM + 8 * (lane_id() & 3);
#pragma unroll
    for (int i = 0; i < BN / 2; i += 2) {
      const float2 s = load_shared64(columns + 8 * (i & ~3));
      const float row = i & 2 ? rows.lower : rows.upper;
      sum[i] = sum[i] * fmaxf(row, s.x) * fminf(row, s.x);
      sum[i + 1] = sum[i + 1] * fmaxf(row, s.y) * fminf(row, s.y);
    }
  }

  // acc = the products of planes with rows' scales, which are known once `meanwhile` has run, while the
  // tensor cores work; then the stage is released, if it is the `last` time. Where registers hold both, the
  // products of high planes are under way while the others are scaled; else they are added to these.
  template <class Meanwhile>
  __device__ __forceinline__ void multiply_planes(float (&acc)[BN / 2], bool turns, bool last,
                                                  const Scales& s, const Meanwhile& meanwhile) const {
    constexpr float kLow = 1.0f / 2048.0f;
    const u32 at = base + stage * STAGE_BYTES;
    const u64 high = make_desc<A_MN>(at + consumer * (A_BYTES / 2)), low = high + (A_BYTES >> 4);
    const u64 b = make_desc<B_MN>(at + A_STAGE);
    if (turns) begin_turn(consumer);
    wgmma_fence();
    multiply<true>(acc, high, b + (B_BYTES >> 4));
    multiply<false>(acc, low, b);
    wgmma_commit();
    if constexpr (BOTH) {
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
      if (last) release();
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) acc[i] = fmaf(of_high[i], i & 2 ? s.lower : s.upper, acc[i]);
    } else {
      if (turns) end_turn(consumer);
      meanwhile();
      wgmma_wait<0>();
      settle(acc);
      scale(acc, kLow, kLow);
      if (turns) begin_turn(consumer);
      wgmma_fence();
      multiply<false>(acc, high, b);
      wgmma_commit();
      if (turns) end_turn(consumer);
      wgmma_wait<0>();
      settle(acc);
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
    if (READS) mbar_wait(base + SPLIT_OFFSET + (2 * stage + consumer) * 8, phase);
    const u32 told = load_shared32(scales() + TOLD_OFFSET);
    const u32 small = READS ? small_rows() : 0;
    float acc[BN / 2];
    multiply_planes(acc, true, !small, s, [&] {
      read_scales(s);
      found = any_plain(s);
      s.put_off(told);
    });
    promote_step(sum, acc, s, told);
    if (small) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (small >> i & 1 && lane_id() == 0) mbar_arrive(base + DONE_OFFSET + (4 * consumer + i) * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (small >> i & 1) mbar_wait(base + AGAIN_OFFSET + (4 * consumer + i) * 8, again >> i & 1);
      again ^= small;
      __syncwarp();
      multiply_planes(acc, false, true, s, [&] {
        read_scales(s);
        s.put_off(told | A_LEVEL);
      });
      if (small >> warp & 1) promote_step(sum, acc, s, told | A_LEVEL);
    }
    found &= !(told & (A_LEVEL | B_LEVEL));  // the k-tile's first step had numbers without planes
    return told;
  }
};

// ---------------------------------------------------------------- planes of what is read

// A k-tile's numbers of 16 rows, of which each four lanes have a row and the one 8 below it, 16 numbers of
// each. In shared memory halves of the tile, 32 numbers of each row, become planes: no row needs another's
// place. Rows are dealt out so that lanes meet in no bank, neither where they read nor where they write.
struct Numbers {
  u32 at;  // where the first row lies
  float v[2][16];

  __device__ __forceinline__ u32 row() const { return __brev(lane_id() >> 2) >> 29; }

  __device__ __forceinline__ void read() {
    const u32 lane = lane_id() & 3, own = row();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i / 4, half = i / 2 % 2, four = i % 2 * 4;
      const u32 from = at + half * A_BYTES + (own + 8 * r) * 128 + ((four + lane ^ own) << 4);
      const uint4 x = load_shared128(from);
      float* const to = v[r] + i % 4 * 4;
      to[0] = __uint_as_float(x.x), to[1] = __uint_as_float(x.y);
      to[2] = __uint_as_float(x.z), to[3] = __uint_as_float(x.w);
    }
  }

  template <class Fact>
  __device__ __forceinline__ Fact of_row(int r) const {
    Fact row, other;  // two, which do not wait for each other
#pragma unroll
    for (int i = 0; i < 8; ++i) row.add(v[r][i]), other.add(v[r][8 + i]);
    row.add(other);
    row.add_across(1);
    row.add_across(2);
    return row;
  }

  // Puts them on their rows' scales, which are written; whether any is small.
  __device__ __forceinline__ bool scale(u32 to) {
    const Span rows[2] = {of_row<Span>(0), of_row<Span>(1)};
    float s[2] = {rows[0].scale(), rows[1].scale()};
    const bool told = rows[0].tells() && rows[1].tells();
    if (__any_sync(0xffffffffu, !told)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        settle(v[r]);  // what was made of them before needs no registers
        s[r] = of_row<Known>(r).scale();
      }
    }
    bool found = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if ((lane_id() & 3) == 0) store_shared32(to + 4 * (row() + 8 * r), __float_as_uint(s[r]));
      found |= s[r] >= 0.0f && below(rows[r].least, s[r]);
#pragma unroll
      for (float& x : v[r]) x = scaled(x, s[r]);
    }
    return found;
  }

  // Their planes of a level.
  template <int kLevel>
  __device__ __forceinline__ void write() const {
    const u32 lane = lane_id() & 3, own = row();
    __syncwarp();  // all have read
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* const x = v[i / 4] + i % 4 * 4;
      const u32 eight = i % 4 * 2 + (lane >> 1);
      const u32 to = at + (own + 8 * (i / 4)) * 128 + ((eight ^ own) << 4) + (lane & 1) * 8;
      uint2 high, low;
      split<kLevel>(x[0], x[1], x[2], x[3], high, low);
      store_shared64(to, high);
      store_shared64(to + A_BYTES, low);
    }
  }
};

// Planes of a consumer's rows, by its own warpgroup. Those of small numbers follow in their place once it
// is done with the others, from numbers that wait in registers.
__device__ __forceinline__ void split_tiles(const Params& p, u32 base, int consumer, int first, int step,
                                            int tiles) {
  const u32 warp = 4 * consumer + threadIdx.x % 128 / 32, rows = 16 * warp;
  int stage = 0;
  u32 phase = 0, done = 0;
  const auto arrive = [&](u32 bar) {
    fence_async();
    __syncwarp();
    if (lane_id() == 0) mbar_arrive(base + bar);
  };
  for (int t = first; t < tiles; t += step) {
    u32 told;
#pragma unroll 1
    do {
      mbar_wait(base + BAR_OFFSET + stage * 8, phase);
      const u32 scales = scales_at(base, stage, phase);
      told = load_shared32(scales + TOLD_OFFSET);
      Numbers numbers{base + stage * STAGE_BYTES + rows * 128};
      numbers.read();
      const bool small = __any_sync(0xffffffffu, numbers.scale(scales + 4 * rows));
      if (lane_id() == 0) store_shared32(scales + SMALL_OFFSET + 4 * warp, small);
      if (small) numbers.write<1>();
      else numbers.write<0>();
      arrive(SPLIT_OFFSET + (2 * stage + consumer) * 8);
      if (small) {
        mbar_wait(base + DONE_OFFSET + warp * 8, done);
        done ^= 1;
        numbers.write<2>();
        arrive(AGAIN_OFFSET + warp * 8);
      }
      if (++stage == STAGES) { stage = 0; phase ^= 1; }
    } while (!(told & LAST));
  }
}

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

extern "C" __global__ void __launch_bounds__(THREADS, 1) planes_product(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = smem_addr(smem);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbar_init(base + BAR_OFFSET + s * 8, 2);
      mbar_init(base + BAR_OFFSET + (STAGES + s) * 8, 8);
    }
    for (int i = 0; READS && i < 2 * STAGES + 8; ++i) mbar_init(base + SPLIT_OFFSET + i * 8, 4);
    for (int i = 0; READS && i < 8; ++i) mbar_init(base + AGAIN_OFFSET + i * 8, 1);
    fence_barriers();
  }
  __syncthreads();
  wait_for_previous();
  let_next_start();

  const int tiles = p.tiles_m * p.tiles_n * p.slices;
  const int first = blockIdx.x, step = gridDim.x;
  if (warpgroup == 0) {
    fewer_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) fill_planes(p, base, first, step, tiles);
    if (threadIdx.x / 32 == 1) fill_scales(p, base, first, step, tiles);
  } else if (READS && warpgroup > 2) {
    fewer_registers<SPLIT_REGISTERS>();
    split_tiles(p, base, warpgroup - 3, first, step, tiles);
  } else {
    more_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1, warp = threadIdx.x % 128 / 32;
    if (consumer == 1) bar_arrive(1, 256);  // consumer 0 starts
    Pipe pipe{base, consumer, warp, 0, 0, 0};
    for (int t = first; t < tiles; t += step) {
      const Tile tile = tile_at(p, t);
      const int row = tile.m * BM + consumer * (BM / 2) + warp * 16;
      const Results results{p, row, tile.n * BN, tile.slice};
      float sum[BN / 2] = {};
      u32 told = LAST;
      if (pipe.on_standards()) pipe.standard_tile(sum);
      else told = 0;
#pragma unroll 1
      while (!(told & LAST)) {
        Scales s;
        bool found;
        told = pipe.step(sum, s, found);
        if (found) results.add_plain(sum, pipe.scales(), told >> K_TILE, s.plain);
        pipe.next();
      }
      results.finish(sum);
    }
  }
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
