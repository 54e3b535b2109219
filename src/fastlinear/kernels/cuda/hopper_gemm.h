// What GEMMs for Hopper (sm_90a) share: the pipeline that TMA fills and wgmma empties, the order of
// tiles. A block is a producer warpgroup and two consumers. Behind hopper_async.h.
//
// Macros from the host: BM BN STAGES CLUSTER PINGPONG GROUP_M A_MN B_MN IS_BF16, and the generated
// functions wgmma(acc, desc_a, desc_b) for m64 x BN x k16, and wgmma_first, which does not add to acc
// but overwrites it.
//   CLUSTER: blocks along M that share one B tile.
//   PINGPONG 1: each consumer owns whole BM x BN tiles, alternately; 0: both share one, BM/2 rows each.
//   A_MN / B_MN 1: the operand's M (N) dimension is the contiguous one in memory.

constexpr int WG_M = PINGPONG ? BM : BM / 2;       // rows of one consumer's accumulator
constexpr int MMA_M = WG_M / 64;                   // wgmma instructions along M
constexpr int A_BYTES = BM * BK * 2;
constexpr int B_BYTES = BN * BK * 2;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;

static_assert(BM % (PINGPONG ? 64 : 128) == 0, "BM");

constexpr u64 A_K_STEP = (A_MN ? 16 * 128 : 32) >> 4;
constexpr u64 B_K_STEP = (B_MN ? 16 * 128 : 32) >> 4;

// ---------------------------------------------------------------- products
// acc[mi][4j + 2h + e] is at row mi*64 + warp*16 + h*8 + lane/4, column 8j + 2*(lane%4) + e.

// One k-tile's products. kFirst: they overwrite the accumulators. That says that the old values are
// dead, so the epilogue before may use their registers: without, it has two elements under way.
template <bool kFirst>
__device__ __forceinline__ void products(float (&acc)[MMA_M][BN / 2], u32 a_src, u32 b_src) {
  const u64 a_desc = make_desc<A_MN>(a_src);
  const u64 b_desc = make_desc<B_MN>(b_src);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BK / 16; ++k) {
#pragma unroll
    for (int mi = 0; mi < MMA_M; ++mi) {
      // 64 rows further down A: 8192 bytes in either layout
      const u64 a = a_desc + k * A_K_STEP + mi * (8192 >> 4), b = b_desc + k * B_K_STEP;
      if (kFirst && k == 0) wgmma_first(acc[mi], a, b); else wgmma(acc[mi], a, b);
    }
  }
  wgmma_commit();
}

// A consumer's way through the pipeline.
struct Pipe {
  u32 a, b;         // where its rows of A, and B, lie in the first stage
  u32 full, empty;  // the first stage's barriers
  u32 lane;
  int stage, previous;
  u32 phase;

  // The k-tile's reads are done: lets the blocks that fill this stage know.
  __device__ __forceinline__ void release(int which) const {
    if (CLUSTER > 1) {
      if (lane < CLUSTER) mbar_arrive_cta(empty + which * 8, lane);
    } else if (lane == 0) {
      mbar_arrive(empty + which * 8);
    }
  }

  template <bool kFirst, class Mend>
  __device__ __forceinline__ void step(float (&acc)[MMA_M][BN / 2], int kt, const Mend& mend) {
    mbar_wait(full + stage * 8, phase);
    mend(a + stage * STAGE_BYTES, kt);
    products<kFirst>(acc, a + stage * STAGE_BYTES, b + stage * STAGE_BYTES);
    if (!kFirst) {
      wgmma_wait<1>();  // all but the step just issued
      release(previous);
    }
    previous = stage;
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }

  // Issues all k-tiles of one tile; the last, in stage `previous`, may still be under way.
  // mend(where its rows of A lie, k-tile): what is to be done to a stage before it is multiplied.
  template <class Mend>
  __device__ __forceinline__ void run(float (&acc)[MMA_M][BN / 2], int k_tiles, const Mend& mend) {
    step<true>(acc, 0, mend);
    for (int kt = 1; kt < k_tiles; ++kt) step<false>(acc, kt, mend);
  }

  __device__ __forceinline__ void run(float (&acc)[MMA_M][BN / 2], int k_tiles) {
    run(acc, k_tiles, [](u32, int) {});
  }
};

// Half a consumer's accumulators to and from shared memory, 16 bytes of each thread side by side.
__device__ __forceinline__ void give(u32 to, const float (&acc)[BN / 2]) {
#pragma unroll
  for (int i = 0; i < BN / 8; ++i)
    store_shared128(to + i * 2048, acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
}

__device__ __forceinline__ void take(u32 from, float (&acc)[BN / 2]) {
#pragma unroll
  for (int i = 0; i < BN / 8; ++i)
    load_shared128(from + i * 2048, acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
}

// ---------------------------------------------------------------- tile order

struct Tile { int m, n; };  // in units of BM * CLUSTER rows and BN columns

// Columns of GROUP_M row-tiles, so that one wave of blocks reads a compact patch of A and B.
__device__ __forceinline__ Tile tile_at(int t, int tiles_m, int tiles_n) {
  const int per_group = GROUP_M * tiles_n;
  const int group = t / per_group;
  const int rest = t - group * per_group;
  const int rows = min(GROUP_M, tiles_m - group * GROUP_M);
  return {group * GROUP_M + rest % rows, rest / rows};
}
