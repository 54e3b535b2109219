// Where groups of rows lie whose sizes only the device knows (Ragged of ragged.h). One block.
//
// Sizes below 0 count as 0, and groups end where the rows do: nothing is read or written outside.
//
// hopper_words.h and ragged.h come before this file.

constexpr int THREADS = 1024;
constexpr int MOST_ORDERED = 256;  // groups: each is compared with each

struct Params {
  const void* sizes;  // (groups)
  Ragged to;
  int rows;           // of all groups, and behind them
  int wide;           // whether sizes have 64 bits
  int ordered;        // whether groups are put in order, those of most rows first, where they are few
};

// The sum of the threads' numbers up to its own.
__device__ __forceinline__ long long sum_up_to(long long (&all)[THREADS], long long own) {
  const int at = threadIdx.x;
  __syncthreads();  // all have read the last of before
  all[at] = own;
  __syncthreads();
  for (int apart = 1; apart < THREADS; apart *= 2) {
    const long long more = at >= apart ? all[at - apart] : 0;
    __syncthreads();
    all[at] += more;
    __syncthreads();
  }
  return all[at];
}

extern "C" __global__ void __launch_bounds__(THREADS) ragged_table(const __grid_constant__ Params p) {
  __shared__ long long all[THREADS];
  wait_for_previous();
  let_next_start();
  const int own = threadIdx.x, groups = p.to.groups;
  int* const rows = p.to.rows();
  int* const blocks = p.to.blocks();
  int* const tiles = p.to.tiles();
  long long row = 0;
  int block = 0, tile = 0;  // of groups before these
  for (int from = 0; from < groups; from += THREADS) {
    const int g = from + own;
    long long size = 0;
    if (g < groups)
      size = p.wide ? static_cast<const long long*>(p.sizes)[g] : static_cast<const int*>(p.sizes)[g];
    size = min(max(size, 0ll), static_cast<long long>(p.rows));
    const long long end = min(row + sum_up_to(all, size), static_cast<long long>(p.rows));
    row = min(row + all[THREADS - 1], static_cast<long long>(p.rows));
    __syncthreads();
    all[own] = end;
    if (g < groups) rows[g + 1] = static_cast<int>(end);
    __syncthreads();
    const long long begin = own ? all[own - 1] : from ? rows[from] : 0;
    const int count = static_cast<int>(end - begin);
    const int own_blocks = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int own_tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
    const long long both = sum_up_to(all, static_cast<long long>(own_blocks) << 32 | own_tiles);
    if (g < groups) {
      blocks[g + 1] = block + static_cast<int>(both >> 32);
      tiles[g + 1] = tile + static_cast<int>(both & 0xffffffff);
    }
    block += static_cast<int>(all[THREADS - 1] >> 32);
    tile += static_cast<int>(all[THREADS - 1] & 0xffffffff);
  }
  if (own == 0) rows[0] = blocks[0] = tiles[0] = 0;
  __syncthreads();
  const int end = static_cast<int>(row), behind = (p.rows - end + TILE_ROWS - 1) / TILE_ROWS;
  for (int i = own; i < p.to.most_blocks; i += THREADS) {
    Lines lines = {0, 0, -1, 0};
    if (i < block) {
      const int g = group_at(blocks, groups, i), first = rows[g] + (i - blocks[g]) * BLOCK_ROWS;
      lines = {first, rows[g + 1] - first, g, 0};
    }
    p.to.of_blocks()[i] = lines;
  }
  for (int i = own; i < tile + behind; i += THREADS) {
    if (i < tile) {
      const int g = group_at(tiles, groups, i), within = i - tiles[g];
      const int first = rows[g] + within * TILE_ROWS;
      p.to.of_tiles()[i] = {first, rows[g + 1] - first, g, (blocks[g] + 2 * within) * BLOCK_ROWS};
    } else {
      const int first = end + (i - tile) * TILE_ROWS;
      p.to.of_tiles()[i] = {first, p.rows - first, -1, 0};
    }
  }
  if (own == 0) *p.to.count() = tile + behind;
  if (!p.ordered) return;
  const bool few = groups <= MOST_ORDERED;
  all[own] = own < groups ? rows[own + 1] - rows[own] : 0;
  __syncthreads();
  for (int g = own; g < groups; g += THREADS) {
    int place = few ? 0 : g;
    for (int i = 0; few && i < groups; ++i) place += all[i] > all[g] || (all[i] == all[g] && i < g);
    p.to.order()[place] = g;
  }
}
