// The body of such a kernel around what is its own: which tiles there are, how a k-tile is loaded, and
// the epilogue. Behind hopper_gemm.h.

// A block's part of the tiles; all counts are in tiles of BM * CLUSTER rows, BN columns, BK steps. Other
// kernels have a Work of their own, with
//   kAlike: whether all tiles have as many k-tiles; else some may have none, and the epilogue has
//           clear<kRows>(row, tile), which finishes those,
//   first, step, tiles; at(t): the t-th tile, of any type with `n`, its column,
//   row(tile, rank): the tile's first row, depth(tile): its k-tiles,
//   before(index): k-tiles of the block's tiles before that one; asked of growing indices,
//   mend(tile, stage's memory, k-tile, consumer, thread): see Pipe.
struct Work {
  static constexpr bool kAlike = true;
  int tiles_m, tiles_n, k_tiles;
  int first, step, tiles;  // of this block: first, first + step, ... below tiles

  __device__ __forceinline__ Work(int tiles_m, int tiles_n, int k_tiles)
      : tiles_m(tiles_m), tiles_n(tiles_n), k_tiles(k_tiles), first(blockIdx.x / CLUSTER),
        step(gridDim.x / CLUSTER), tiles(tiles_m * tiles_n) {}

  __device__ __forceinline__ Tile at(int t) const { return tile_at(t, tiles_m, tiles_n); }
  __device__ __forceinline__ int row(Tile tile, u32 rank) const {
    return (tile.m * CLUSTER + rank) * BM;
  }
  __device__ __forceinline__ int depth(Tile) const { return k_tiles; }
  __device__ __forceinline__ u32 before(int index) const { return index * k_tiles; }
  __device__ __forceinline__ void mend(Tile, u32, int, int, int) const {}
};

// Barriers of the pipeline, `full` first, STAGES each. Ends once all blocks of the cluster know.
__device__ __forceinline__ void init_pipeline(u32 full) {
  constexpr int kConsumerWarps = PINGPONG ? 4 : 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbar_init(full + s * 8, 1);
      mbar_init(full + (STAGES + s) * 8, kConsumerWarps * CLUSTER);
    }
    fence_barriers();
  }
  if constexpr (CLUSTER > 1) cluster_sync(); else __syncthreads();
  wait_for_previous();  // no memory is touched before the kernel ahead is done
}

// One thread fills the pipeline. load(stage's memory, barrier, first row, tile, k-tile) asks for
// STAGE_BYTES in all, of which other blocks of the cluster may send a part.
template <class Work, class Load>
__device__ __forceinline__ void produce(const Work& work, u32 base, u32 full, u32 rank,
                                        const Load& load) {
  int stage = 0;
  u32 phase = 1;  // a fresh barrier counts as "previous phase done"
  if (work.first >= work.tiles) return;
  auto tile = work.at(work.first);
  for (int t = work.first; t < work.tiles; t += work.step) {
    const auto next = work.at(min(t + work.step, work.tiles - 1));  // read while this one is loaded
    const int row = work.row(tile, rank), k_tiles = work.depth(tile);
    for (int kt = 0; kt < k_tiles; ++kt) {
      mbar_wait(full + (STAGES + stage) * 8, phase);
      mbar_expect(full + stage * 8, STAGE_BYTES);
      load(base + stage * STAGE_BYTES, full + stage * 8, row, tile, kt);
      if (++stage == STAGES) { stage = 0; phase ^= 1; }
    }
    tile = next;
  }
}

// A consumer warpgroup's way through its tiles. The epilogue has
//   kShared: whether a block's last tile, whose epilogue has no products to hide under, is finished
//            by both consumers (in pingpong, of two times 64 rows),
//   begin<kRows>(row, tile): under the products; what finish will need of kRows * 64 rows,
//   finish<kRows>(acc, row, tile): the tile's end, from this warp's first row on,
//   end(): behind the last tile.
template <class Work, class Epilogue>
__device__ __forceinline__ void consume(Work& work, u32 base, u32 full, u32 rank, int consumer,
                                        int thread, Epilogue& epilogue) {
  constexpr bool kShared = Epilogue::kShared && PINGPONG && MMA_M == 2;
  const int warp = thread / 32;
  if (PINGPONG && consumer == 1) bar_arrive(1, 256);  // consumer 0 starts

  // The block's tiles are numbered `index`; in pingpong each consumer takes every second one.
  const int count = (work.tiles - work.first + work.step - 1) / work.step;
  // A last tile without products is its owner's alone. Its number is worked out again where it is needed:
  // it would keep a register throughout.
  const bool shares = kShared && (Work::kAlike || (count > 0 &&
      work.depth(work.at(work.first + (count - 1) * work.step)) > 0));
  int index = PINGPONG ? consumer : 0;
  for (; index < count; index += PINGPONG ? 2 : 1) {
    const auto tile = work.at(work.first + index * work.step);
    const int row = work.row(tile, rank) + (PINGPONG ? 0 : consumer * WG_M) + warp * 16;
    const bool is_shared = shares && index == count - 1;
    const int k_tiles = work.depth(tile);
    if constexpr (!Work::kAlike) {
      if (k_tiles == 0) {
        if constexpr (PINGPONG) {  // its turn, which it makes no use of
          bar_sync(1 + consumer, 256);
          bar_arrive(1 + (consumer ^ 1), 256);
        }
        if (shares && index == count - 2) bar_arrive(4, 256);
        epilogue.template clear<MMA_M>(row, tile);
        continue;
      }
    }
    if (is_shared) epilogue.template begin<1>(row, tile);
    else epilogue.template begin<MMA_M>(row, tile);
    float acc[MMA_M][BN / 2];
    const u32 it = work.before(index);  // k-tiles that went through the pipeline before this tile
    const u32 a_src = base + (PINGPONG ? 0 : consumer * (A_BYTES / 2));
    Pipe pipe{a_src,     base + A_BYTES, full, full + STAGES * 8,
              lane_id(), static_cast<int>(it % STAGES), 0, (it / STAGES) & 1};

    // Wait for the other consumer to have issued its tile. This also keeps both within one phase of
    // the pipeline's barriers, which a parity bit cannot tell apart beyond that.
    if constexpr (PINGPONG) bar_sync(1 + consumer, 256);
    pipe.run(acc, k_tiles, [&](u32 stage, int kt) { work.mend(tile, stage, kt, consumer, thread); });
    if constexpr (PINGPONG) bar_arrive(1 + (consumer ^ 1), 256);
    wgmma_wait<0>();
    pipe.release(pipe.previous);
    if (shares && index == count - 2) bar_arrive(4, 256);
    if (is_shared) {
      if (index > 0) bar_sync(4, 256);  // both have read all of the pipeline: its memory is free
      give(base + thread * 16, acc[MMA_M - 1]);
      bar_arrive(3, 256);
      epilogue.template finish<1>(acc, row, tile);
    } else {
      epilogue.template finish<MMA_M>(acc, row, tile);
    }
  }
  if (shares && index == count) {  // the last tile is the other consumer's
    const auto tile = work.at(work.first + (count - 1) * work.step);
    const int row = work.row(tile, rank) + WG_M - 64 + warp * 16;
    epilogue.template begin<1>(row, tile);
    float half[1][BN / 2];  // not acc: written by loads, it would make ptxas serialise all wgmma
    bar_sync(3, 256);
    take(base + thread * 16, half[0]);
    epilogue.template finish<1>(half, row, tile);
  }
  epilogue.end();
}
