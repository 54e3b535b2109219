// Products of ragged groups in 16 bits for Hopper (sm_90a): rows sorted by group, whose numbers only the
// device knows.
//
//   RAGGED 1:  Y[rows of g] = act(A[rows of g] B_gᵀ + bias_g), and zeros in rows of no group
//   RAGGED 2:  Y_g = A[rows of g]ᵀ B[rows of g], and zeros where a group has no rows
//
// A block is a producer warpgroup and two consumers, which own whole tiles alternately. Tiles of rows are
// those of the table (ragged.h), so that each belongs to one group.
//
//   RAGGED 1: a tile may read rows of the next group. They end in rows that are not stored: of a warp's 16
//             rows, TMA stores those that lie inside the group, and the warp itself where only some do.
//             B_g is one of a stack: what lies beyond it reads as zeros.
//   RAGGED 2: the last k-tile may hold rows of the next group, infinities and NaN among them. The consumer
//             clears these rows of both operands before it multiplies.
//
// Where groups lie is read before each tile, from shared memory where the groups are few.
//
// hopper_gemm.h, hopper_kernel.h, activations/cuda.h, hopper_epilogue.h and ragged.h come before this file.
// Macros from the host, besides theirs: RAGGED, and KEPT: groups at most of which shared memory keeps the
// table, or 0. CLUSTER is 1, PINGPONG 1, DIRECT 0.

constexpr int OUT_OFFSET = STAGES * STAGE_BYTES;
constexpr int BAR_OFFSET = OUT_OFFSET + 8 * OUT_BUFS * OUT_BYTES;
constexpr int TABLE_OFFSET = BAR_OFFSET + 2 * STAGES * 8;
constexpr bool OF_ROWS = RAGGED == 1;

static_assert(BM == TILE_ROWS && CLUSTER == 1 && PINGPONG && !DIRECT, "the tiles");
static_assert(OF_ROWS ? !A_MN : A_MN && B_MN && !SAVE && !HAS_BIAS, "RAGGED");

struct Params {
  TensorMap a, b;                     // RAGGED 1: b is a stack of groups
  TensorMap y, pre;                   // RAGGED 2: y is a stack of groups
  Ragged groups;
  const unsigned short* bias;         // (groups, N) or null
  unsigned short *y_rows, *pre_rows;  // RAGGED 1: (rows, N), a multiple of 8
  int N, tiles_m, tiles_n, k_tiles;   // RAGGED 1: k_tiles of each tile; RAGGED 2: tiles_m of a group
};

// Of a group, or of none (-1); first, end: rows of A from the tile's (RAGGED 2: the group's) first on to
// the group's last.
struct Part { int m, n, group, first, end; };

// Numbers of the groups' table: as it lies, or a copy in shared memory.
struct Numbers {
  const int* table;
  u32 copy;

  __device__ __forceinline__ int operator[](int i) const {
    return KEPT ? static_cast<int>(load_shared32(copy + 4 * i)) : table[i];
  }
  __device__ __forceinline__ void keep(int count) const {
    for (int i = threadIdx.x; KEPT && i < count; i += 384) store_shared32(copy + 4 * i, table[i]);
  }
};

struct Parts {
  static constexpr bool kAlike = false;
  const Params& p;
  Numbers places;  // RAGGED 1: of each group, and behind the last, its first tile of rows; RAGGED 2: order
  Numbers rows;    // of each group, and behind the last, its first row
  int first, step, tiles;
  int counted;  // RAGGED 2: of the block's tiles, those whose k-tiles `passed` counts
  u32 passed;

  __device__ __forceinline__ Parts(const Params& p, u32 kept)
      : p(p), places{OF_ROWS ? p.groups.tiles() : p.groups.order(), kept},
        rows{p.groups.rows(), kept + 4 * (KEPT + 1)}, first(blockIdx.x), step(gridDim.x), counted(0),
        passed(0) {
    const Ragged& groups = p.groups;
    places.keep(groups.groups + OF_ROWS);
    rows.keep(groups.groups + 1);
    if (KEPT) __syncthreads();
    tiles = (OF_ROWS ? *groups.count() : groups.groups * p.tiles_m) * p.tiles_n;
  }

  __device__ __forceinline__ Part at(int t) const {
    const Ragged& groups = p.groups;
    if constexpr (OF_ROWS) {
      // Columns of a band of row-tiles, at most GROUP_M, all of one group: its weight is read once a band.
      const int place = t - places[groups.groups] * p.tiles_n;
      if (place >= 0) {  // rows of no group
        const int m = place / p.tiles_n;
        const Lines lines = groups.of_tiles()[places[groups.groups] + m];
        return {0, place - m * p.tiles_n, -1, lines.first, lines.first + lines.rows};
      }
      const int group = group_at(places, groups.groups, t, p.tiles_n);
      const int count = places[group + 1] - places[group];
      int rest = t - places[group] * p.tiles_n, band = 0, most = count;
      if (count > GROUP_M) {
        const int bands = (count + GROUP_M - 1) / GROUP_M;
        most = (count + bands - 1) / bands;
        band = rest / (most * p.tiles_n) * most;
        rest -= band * p.tiles_n;
        most = min(most, count - band);
      }
      const int n = rest / most, m = band + rest - n * most;
      return {m, n, group, rows[group] + m * BM, rows[group + 1]};
    } else {
      // Groups of many rows come first, so that no block ends with one of them.
      const int each = p.tiles_m * p.tiles_n, place = t / each, group = places[place];
      const Tile tile = tile_at(t - place * each, p.tiles_m, p.tiles_n);
      return {tile.m, tile.n, group, rows[group], rows[group + 1]};
    }
  }

  __device__ __forceinline__ int row(const Part& part, u32) const {
    return OF_ROWS ? part.first : part.m * BM;
  }

  __device__ __forceinline__ int depth(const Part& part) const {
    if (OF_ROWS) return part.group < 0 ? 0 : p.k_tiles;
    return (part.end - part.first + BK - 1) / BK;
  }

  __device__ __forceinline__ u32 before(int index) {
    if (OF_ROWS) return index * p.k_tiles;
    for (; counted < index; ++counted) passed += depth(at(first + counted * step));
    return passed;
  }

  // Rows of a k-tile behind the group's last become zeros. Swizzled or not, a row is 128 bytes.
  __device__ __forceinline__ void mend(const Part& part, u32 stage, int kt, int consumer,
                                       int thread) const {
    if constexpr (!OF_ROWS) {
      const int left = part.end - part.first - kt * BK;
      if (left >= BK) return;
#pragma unroll 1
      for (u32 box = stage; box < stage + STAGE_BYTES; box += BK * 128)
        for (u32 at = left * 128 + thread * 16; at < BK * 128; at += 128 * 16)
          store_shared128(box + at, uint4{0, 0, 0, 0});
      fence_async();
      bar_sync(5 + consumer, 128);
    }
  }
};

// What asks for a k-tile.
struct Load {
  const Params& p;

  __device__ __forceinline__ void operator()(u32 a_dst, u32 bar, int row, const Part& part,
                                             int kt) const {
    const u32 b_dst = a_dst + A_BYTES;
    const int k = kt * BK, col = part.n * BN;
    if constexpr (OF_ROWS) {
      tma_load<1>(a_dst, &p.a, bar, k, row);
#pragma unroll
      for (int i = 0; i < (B_MN ? BN / 64 : 1); ++i) {
        const int x = B_MN ? col + i * 64 : k, y = B_MN ? k : col;
        tma_load_stack(b_dst + i * (BK * 128), &p.b, bar, x, y, part.group);
      }
    } else {
#pragma unroll
      for (int i = 0; i < BM / 64; ++i)
        tma_load<1>(a_dst + i * (BK * 128), &p.a, bar, row + i * 64, part.first + k);
#pragma unroll
      for (int i = 0; i < BN / 64; ++i)
        tma_load<1>(b_dst + i * (BK * 128), &p.b, bar, col + i * 64, part.first + k);
    }
  }
};

struct Epilogue : Staging {
  static constexpr bool kShared = true;
  const Params& p;
  Part part;
  u32 bias[BN / 64];

  __device__ __forceinline__ Epilogue(const Params& p, u32 at, bool leader)
      : Staging{at, leader}, p(p), part() {}

  template <int kRows>
  __device__ __forceinline__ void begin(int, const Part& of) {
    part = of;
    if (HAS_BIAS) {
      const unsigned short* const own = p.bias + static_cast<long long>(of.group) * p.N;
      load_bias(bias, own, of.n * BN, lane_id(), p.N);
    }
  }

  // Those of 16 staged rows that belong to the group, from (row, col) on.
  __device__ __forceinline__ void send_some(int count, unsigned short* to, int row, int col) const {
    __syncwarp();
    const u32 lane = lane_id(), from = buffer(count, lane);
    const int n = col + (lane & 7) * 8;
#pragma unroll 1
    for (int r = lane >> 3; r < part.end - row && n < p.N; r += 4)
      *reinterpret_cast<uint4*>(to + static_cast<long long>(row + r) * p.N + n) =
          load_shared128(from + r * 128 + ((lane & 7) ^ (r & 7)) * 16);
    if (leader) tma_store_none();
  }

  // Sends off what was staged. Each time is one store of those that `stage` waits for.
  template <bool kStream>
  __device__ __forceinline__ void leave(int count, const TensorMap* map, unsigned short* to, int row,
                                        int col) const {
    if constexpr (OF_ROWS) {
      if (row + 16 <= part.end) send<kStream>(count, map, row, col);
      else send_some(count, to, row, col);
    } else {
      fence_async();
      __syncwarp();
      if (leader) tma_store_stack(map, at + count % OUT_BUFS * OUT_BYTES, col, row, part.group);
    }
  }

  __device__ __forceinline__ void y(int count, int row, int col) const {
    leave<false>(count, &p.y, p.y_rows, row, col);
  }
  __device__ __forceinline__ void pre(int count, int row, int col) const {
    leave<true>(count, &p.pre, p.pre_rows, row, col);
  }

  template <int kRows, int kAccs>
  __device__ __forceinline__ void finish(float (&acc)[kAccs][BN / 2], int row, const Part&) const {
    ::finish<kRows>(*this, acc, bias, row, part.n * BN);
  }

  // A tile without products.
  template <int kRows>
  __device__ __forceinline__ void clear(int row, const Part& of) {
    part = of;
    const u32 zeros[16] = {};
#pragma unroll 1
    for (int i = 0; i < kRows * (BN / 64); ++i) {
      const int here = row + i % kRows * 64, col = of.n * BN + i / kRows * 64;
      stage((1 + SAVE) * i, zeros);
      y((1 + SAVE) * i, here, col);
      if (!SAVE) continue;
      stage(2 * i + 1, zeros);
      pre(2 * i + 1, here, col);
    }
  }

  __device__ __forceinline__ void end() const {
    if (leader) tma_store_wait_all();
  }
};

extern "C" __global__ void __launch_bounds__(384, 1) ragged_product(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = smem_addr(smem), full = base + BAR_OFFSET;
  const int warpgroup = threadIdx.x / 128;  // not by a shuffle: it can be had again, and takes no register
  const int thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    prefetch_map(&p.a);
    prefetch_map(&p.b);
    prefetch_map(&p.y);
  }
  init_pipeline(full);
  Parts parts(p, base + TABLE_OFFSET);

  // A launch of 384 threads gets 168 registers each; 40 + 2 * 232 = 3 * 168 shares them out anew. A
  // larger sum would wait for ever.
  if (warpgroup == 0) {
    fewer_registers<40>();
    if (thread == 0) {
      produce(parts, base, full, 0, Load{p});
      let_next_start();
    }
  } else {
    more_registers<232>();
    const int consumer = warpgroup - 1;
    const u32 lane = thread & 31;
    Epilogue epilogue(p, staged(base + OUT_OFFSET, consumer * 4 + thread / 32, lane), lane == 0);
    consume(parts, base, full, 0, consumer, thread, epilogue);
  }
}
