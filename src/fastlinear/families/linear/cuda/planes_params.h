// What planes.cu is told, and how its shared memory and its registers are shared out. Comes before the
// other parts of it.

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

constexpr bool BOTH = !READS || BN <= 64;  // registers hold products of high planes and of others
constexpr bool ANY_DERIVED = A_DERIVED != DERIVED_NONE || B_DERIVED != DERIVED_NONE;

static_assert(BM == 128 && (BN == 64 || BN == 128), "BM, BN");
static_assert(!GROUPED || !ADDED, "GROUPED");
static_assert(!RAGGED || GROUPED, "RAGGED");
static_assert(!READS || (!A_MN && A_DERIVED == DERIVED_NONE && !GROUPED), "READS");
static_assert(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS + 2 * READS * SPLIT_REGISTERS <=
                  THREADS / 128 * REGISTERS,
              "who asks for more registers than there are waits for ever");

struct Params {
  TensorMap a[4], b[4];                  // planes, high first; then of small numbers; or the numbers
  TensorMap a_shared[2], b_shared[2];    // by columns: planes by rows, where these serve
  const float *a_scales, *b_scales;      // (k-tiles, a_lines), (k-tiles, b_lines)
  const int *a_small, *b_small;          // (k-tiles, lines / 64): HAS_SMALL, UNIFORM, SHARED
  const float* plain[3][2];              // the numbers, or what they are derived from: of A, of B
  const float* bias;                     // (N) or null
  float *y, *pre;                        // (M, N) dense
  float* parts;                          // (slices, M, N), where there are several
  long long strides[3][2][2];            // of these: along M (N), along K
  long long groups_apart[3][2];          // and from group to group
  long long y_groups_apart;              // of y and pre, whose rows are y_row numbers apart
  Ragged ragged;                         // where RAGGED; M (K) is then of all groups
  int M, N, K, slices, slice_tiles;      // of a group; slice_tiles: k-tiles of a slice
  int tiles_m, tiles_n;                  // of BM rows, of BN columns
  int a_lines, b_lines;                  // of all groups: M, N and more, a multiple of 64
  int groups, y_row;
  int a_group, a_group_tiles;            // of A, lines and k-tiles from a group to the next
  int b_group, b_group_tiles;            // of B
};

constexpr bool RAGGED_M = RAGGED == 1, RAGGED_K = RAGGED == 2;

// Of a group, or of none where rows of A are ragged: then its results are zeros.
struct Tile {
  int m, n, slice, group;
  Lines lines;           // RAGGED_M: its rows
  int first_tile, first; // RAGGED_K: where the group begins, of k-tiles and of rows
  int depth;             // K of the group

  // Its first line in all of A, or of B, and where a k-tile of its group lies there.
  __device__ __forceinline__ int row(const Params& p) const {
    return RAGGED_M ? lines.planes : m * BM + (GROUPED ? group * p.a_group : 0);
  }
  __device__ __forceinline__ int column(const Params& p) const {
    return n * BN + (GROUPED ? group * p.b_group : 0);
  }
  __device__ __forceinline__ int a_tile(const Params& p, int kt) const {
    return kt + (RAGGED_K ? first_tile : GROUPED ? group * p.a_group_tiles : 0);
  }
  __device__ __forceinline__ int b_tile(const Params& p, int kt) const {
    return kt + (RAGGED_K ? first_tile : GROUPED ? group * p.b_group_tiles : 0);
  }

  // Its slice's k-tiles.
  __device__ __forceinline__ void steps(const Params& p, int& begin, int& end) const {
    const int all = group < 0 ? 0 : (depth + BK - 1) / BK;
    const int each = RAGGED_K ? (all + p.slices - 1) / p.slices : p.slice_tiles;
    begin = min(slice * each, all);
    end = min(begin + each, all);
  }
};

__device__ __forceinline__ int tiles_along_m(const Params& p) {
  return RAGGED_M ? *p.ragged.count() : p.tiles_m;
}

// Columns of GROUP_M row-tiles, so that one wave of blocks reads a compact patch of A and B.
__device__ __forceinline__ Tile tile_at(const Params& p, int t, int tiles_m) {
  const int each = tiles_m * p.tiles_n, part = t / each;
  const int of_group = GROUPED ? part / p.slices : 0, slice = part - of_group * p.slices;
  t -= part * each;
  const int per_group = GROUP_M * p.tiles_n;
  const int group = t / per_group;
  const int rest = t - group * per_group;
  const int rows = min(GROUP_M, tiles_m - group * GROUP_M);
  Tile tile{group * GROUP_M + rest % rows, rest / rows, slice, of_group, {}, 0, 0, p.K};
  if (RAGGED_M) {
    tile.lines = p.ragged.of_tiles()[tile.m];
    tile.group = tile.lines.group;
  }
  if (RAGGED_K) {
    tile.first_tile = p.ragged.blocks()[of_group];
    tile.first = p.ragged.rows()[of_group];
    tile.depth = p.ragged.rows()[of_group + 1] - tile.first;
  }
  return tile;
}
