// How stages of planes.cu are filled: by a thread that loads planes or numbers, and by a warp that loads
// scales and tells consumers what a step is.

// shared[i]: whether 64 lines' planes are those by rows.
__device__ __forceinline__ void load_a(const TensorMap* map, const TensorMap* by_rows,
                                       const bool (&shared)[BM / 64], u32 to, u32 bar, int row, int k) {
  if constexpr (A_MN) {
#pragma unroll
    for (int i = 0; i < BM / 64; ++i)
      tma_load<1>(to + i * (BK * 128), shared[i] ? by_rows : map, bar, row + i * 64, k);
  } else {
    tma_load<1>(to, map, bar, k, row);
  }
}

__device__ __forceinline__ void load_b(const TensorMap* map, const TensorMap* by_rows,
                                       const bool (&shared)[BN / 64], u32 to, u32 bar, int column, int k) {
  if constexpr (B_MN) {
#pragma unroll
    for (int i = 0; i < BN / 64; ++i)
      tma_load<1>(to + i * (BK * 128), shared[i] ? by_rows : map, bar, column + i * 64, k);
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
constexpr u32 UNIFORM_STEP = 1 << 8;            // each 64 lines of the step have one scale
constexpr int K_TILE = 9;

// Whether lines of a k-tile have small numbers: rows, columns; read, not looked at.
struct Small {
  int rows[BM / 64], columns[BN / 64];

  __device__ __forceinline__ void read(const Params& p, Tile tile, int kt) {
    const int each_a = p.a_lines / 64, each_b = p.b_lines / 64;
    const int row = tile.row(p) / 64, column = tile.column(p) / 64;
    const int* const a = p.a_small + static_cast<long long>(tile.a_tile(p, kt)) * each_a;
    const int* const b = p.b_small + static_cast<long long>(tile.b_tile(p, kt)) * each_b;
#pragma unroll
    for (int i = 0; i < BM / 64; ++i) rows[i] = READS ? 0 : row + i < each_a ? a[row + i] : UNIFORM;
#pragma unroll
    for (int i = 0; i < BN / 64; ++i) columns[i] = column + i < each_b ? b[column + i] : UNIFORM;
  }

  __device__ __forceinline__ bool is_uniform() const {
    int all = UNIFORM;
#pragma unroll
    for (int one : rows) all &= one;
#pragma unroll
    for (int one : columns) all &= one;
    return all;
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

// A stage is filled by a thread and a warp: load(stage, whether its turn is odd, its barrier, tile, k-tile,
// what consumers are told).
template <bool kWarp, class Load>
__device__ __forceinline__ void fill(const Params& p, u32 base, int first, int step, int tiles,
                                     int tiles_m, const Load& load) {
  constexpr u32 kA = 3 << A_BLOCKS, kB = ALL_BLOCKS & ~kA, kLevels = A_LEVEL | B_LEVEL;
  int stage = 0;
  u32 odd = 0;
  for (int t = first; t < tiles; t += step) {
    const Tile tile = tile_at(p, t, tiles_m);
    int begin, end;
    tile.steps(p, begin, end);
    if (RAGGED && begin == end) continue;
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
        u32 told = static_cast<u32>(kt) << K_TILE | levels;
        told |= (levels & A_LEVEL ? found : ALL_BLOCKS) & kA;
        told |= (levels & B_LEVEL ? found : ALL_BLOCKS) & kB;
        if (last && levels == (found & kLevels)) told |= LAST;
        if (!READS && kWarp && levels == 0 && small.is_uniform()) told |= UNIFORM_STEP;
        const u32 full = base + BAR_OFFSET + stage * 8;
        mbar_wait(full + STAGES * 8, odd ^ 1);  // a fresh barrier counts as "previous phase done"
        load(stage, odd, full, tile, kt, told, small);
        if (kWarp) __syncwarp();  // else the first lane could be a stage's turn ahead of those that wait
        if (++stage == STAGES) { stage = 0; odd ^= 1; }
        if (levels == 0 && !last) found = small.bits();
      }
    }
  }
}

__device__ __forceinline__ void fill_planes(const Params& p, u32 base, int first, int step, int tiles,
                                            int tiles_m) {
  const auto load = [&](int stage, u32, u32 full, Tile tile, int kt, u32 told, const Small& small) {
    bool a_shared[BM / 64], b_shared[BN / 64];
#pragma unroll
    for (int i = 0; i < BM / 64; ++i) a_shared[i] = !(told & A_LEVEL) && small.rows[i] & SHARED;
#pragma unroll
    for (int i = 0; i < BN / 64; ++i) b_shared[i] = !(told & B_LEVEL) && small.columns[i] & SHARED;
    const u32 to = base + stage * STAGE_BYTES;
    const TensorMap* const a = p.a + (told & A_LEVEL ? 2 : 0);
    const TensorMap* const b = p.b + (told & B_LEVEL ? 2 : 0);
    mbar_expect(full, STAGE_BYTES);
#pragma unroll
    for (int plane = 0; plane < 2; ++plane) {
      if (!READS)
        load_a(a + plane, p.a_shared + plane, a_shared, to + plane * A_BYTES, full, tile.row(p),
               tile.a_tile(p, kt) * BK);
      load_b(b + plane, p.b_shared + plane, b_shared, to + A_STAGE + plane * B_BYTES, full,
             tile.column(p), tile.b_tile(p, kt) * BK);
    }
#pragma unroll
    for (int half = 0; half < 2 * READS; ++half)
      tma_load<1>(to + half * A_BYTES, p.a, full, kt * BK + half * (BK / 2), tile.m * BM);
  };
  fill<false>(p, base, first, step, tiles, tiles_m, load);
}

// Those of lines that exist. By a warp.
__device__ __forceinline__ void fill_scales(const Params& p, u32 base, int first, int step, int tiles,
                                            int tiles_m) {
  const auto load = [&](int stage, u32 odd, u32 full, Tile tile, int kt, u32 told, const Small&) {
    if (lane_id()) return;
    const u32 to = scales_at(base, stage, odd);
    const int row = tile.row(p), column = tile.column(p);
    const int rows = READS ? 0 : min(BM, p.a_lines - row), columns = min(BN, p.b_lines - column);
    store_shared32(to + TOLD_OFFSET, told);
    mbar_expect(full, 4 * (rows + columns));
    if (!READS)
      bulk_load(to, p.a_scales + static_cast<long long>(tile.a_tile(p, kt)) * p.a_lines + row, full,
                4 * rows);
    bulk_load(to + 4 * BM, p.b_scales + static_cast<long long>(tile.b_tile(p, kt)) * p.b_lines + column,
              full, 4 * columns);
  };
  fill<true>(p, base, first, step, tiles, tiles_m, load);
}
