// Products of float32 by tensor cores of float16, as accurate as float32 itself, on Hopper (sm_90a).
//
//   C[m, n] = sum_k A[m, k] * B[n, k];   pre = C + bias;   Y = act(pre)
//
// or of several groups alike, whose rows of planes lie behind each other, of each from a multiple of 64 on.
//
// Both operands come as two planes of float16 (planes_split.cu): A = s_m (h + l / 2^11), B alike, with
// a scale s for each BK numbers of a row (a column) along K.
//
//   C = sum of s_m s_n (sum h h + (sum h l + sum l h) / 2^11);  l l is below what float32 keeps.
//
// Where an operand has numbers small beside others of their BK, these have planes of their own, whose
// scale is s / 2^29. Such a k-tile is multiplied more than once, for each pair of levels that exists.
//
// Where blocks have one scale each (planes.h), lines' scales are not looked at.
//
// Tensor cores truncate while they add, so sums over BK numbers are promoted: scaled, with what is cut off
// in the mean, and added up in registers, in float32. A block is a producer warpgroup and two consumers, of
// which each has half a tile's rows. They issue products by turns, so that one promotes while the other
// multiplies.
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
// hopper_words.h, activations/cuda.h, hopper_async.h, planes.h and the parts of this file, planes_params.h
// to planes_results.h, come before it. Macros from the host: BM (128) BN STAGES GROUP_M A_MN B_MN READS
// GROUPED RAGGED SAVE HAS_BIAS ADDED A_DERIVED B_DERIVED ACT, IS_BF16 0, and the functions wgmma and
// wgmma_first for accumulators of BN / 2.
//   A_MN / B_MN 1: the operand's M (N) dimension is the contiguous one in memory.
//   READS 1: A comes as numbers; its rows lie along K, and it is not derived.
//   GROUPED 1: of several groups; A is not read, nothing is added.
//   RAGGED: sizes of groups are in a table: of rows of A and of Y (1), which are not in slices; of K (2).
//   SAVE 1: `pre` is written beside Y.
//   ADDED 1: C is added to what Y holds; without bias and activation.
//   A_DERIVED / B_DERIVED: how the operand is derived; where one is, the activation is its, and none of Y.

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

  const int tiles_m = tiles_along_m(p);
  const int tiles = tiles_m * p.tiles_n * p.slices * (GROUPED && !RAGGED_M ? p.groups : 1);
  const int first = blockIdx.x, step = gridDim.x;
  if (warpgroup == 0) {
    fewer_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) fill_planes(p, base, first, step, tiles, tiles_m);
    if (threadIdx.x / 32 == 1) fill_scales(p, base, first, step, tiles, tiles_m);
  } else if (READS && warpgroup > 2) {
    fewer_registers<SPLIT_REGISTERS>();
    split_tiles(p, base, warpgroup - 3, first, step, tiles);
  } else {
    more_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1, warp = threadIdx.x % 128 / 32;
    if (consumer == 1) bar_arrive(1, 256);  // consumer 0 starts
    Pipe pipe{base, consumer, warp, 0, 0, 0, 0};
    for (int t = first; t < tiles; t += step) {
      const Tile tile = tile_at(p, t, tiles_m);
      const int row = (RAGGED_M ? 0 : tile.m * BM) + consumer * (BM / 2) + warp * 16;
      const Results results{p, row, tile.n * BN, tile.slice, tile};
      pipe.long_tiles = static_cast<u32>(tile.depth + BK / 2 - 1) / BK;
      float sum[BN / 2] = {};
      u32 told = RAGGED && results.is_empty() ? LAST : 0;
#pragma unroll 1
      while (!(told & LAST)) {
        Scales s;
        bool found;
        told = pipe.step(sum, s, found);
        if (found) results.add_plain(sum, pipe.scales(), told >> K_TILE, s.plain);
        pipe.next();
      }
      if (RAGGED_M && tile.group < 0) results.clear();
      else results.finish(sum);
    }
  }
}

// The slices' sums, added up in their order and finished.
extern "C" __global__ void __launch_bounds__(256) planes_sums(const __grid_constant__ Params p) {
  wait_for_previous();
  let_next_start();
  const long long all = static_cast<long long>(p.M) * p.N;
  long long at = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  const int group = GROUPED ? static_cast<int>(at / all) : 0;
  at -= group * all;
  if (group >= (GROUPED ? p.groups : 1) || at >= all) return;
  const float* const parts = p.parts + group * p.slices * all;
  float v = 0.0f;
#pragma unroll 4
  for (int i = 0; i < p.slices; ++i) v += parts[i * all + at];
  const int column = static_cast<int>(at % p.N);
  if (HAS_BIAS) v += p.bias[GROUPED ? group * p.N + column : column];
  if (GROUPED) at = group * p.y_groups_apart + at / p.N * p.y_row + column;
  if (SAVE) p.pre[at] = v;
  if (ADDED) v += p.y[at];
  p.y[at] = ANY_DERIVED ? v : act(v);
}
