// Products of many groups of unequal sizes in one launch, float32, for sm_80 and later: plain
// arithmetic. Behind instructions.h, groups.h and shares.h; tiles of 64 x 64.

constexpr int TILE = 64, WORDS = 16, PITCH = WORDS + 4;  // pitch: 8 rows share no bank
constexpr int THREADS = 128, EACH = TILE * WORDS / THREADS;
constexpr int STEP = 64;  // parts of the depth are multiples of it
static_assert(TILE_M == TILE && TILE_N == TILE, "what a block computes");

// A number of row `row` and place `k` along the depth; 0 outside. A matrix is (rows, depth), or
// (depth, rows) where TURNED, of lines `pitch` apart.
template <bool TURNED>
__device__ __forceinline__ float fetch(const Number* from, int rows, int depth, int pitch, int row,
                                       int k) {
  const u64 place = TURNED ? static_cast<u64>(k) * pitch + row : static_cast<u64>(row) * pitch + k;
  return row < rows && k < depth ? from[place] : 0.0f;
}

// Where the i-th word of a thread lies in a tile: neighbours in memory by neighbouring threads.
template <bool TURNED>
__device__ __forceinline__ void placed(int i, int& row, int& word) {
  const int t = threadIdx.x;
  row = TURNED ? t % TILE : t / WORDS + i * (THREADS / WORDS);
  word = TURNED ? t / TILE + i * (THREADS / TILE) : t % WORDS;
}

struct Tile {
  float word[EACH];
};

template <bool TURNED, bool CHANGED>
__device__ __forceinline__ void fetch_tile(Tile& tile, const Number* from, const Number* saved,
                                           int rows, int depth, int pitch, int row0, int k0,
                                           double* sum, Number* out) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int row, word;
    placed<TURNED>(i, row, word);
    float v = fetch<TURNED>(from, rows, depth, pitch, row0 + row, k0 + word);
    if (CHANGED && DERIVED)
      v = graded(v, fetch<TURNED>(saved, rows, depth, TURNED ? rows : depth, row0 + row,
                                   k0 + word));
    tile.word[i] = v;
    if (CHANGED && MODE == 2) *sum += v;
    if (CHANGED && DERIVED && MODE == 2 && WRITES && out && row0 + row < rows && k0 + word < depth)
      out[static_cast<u64>(k0 + word) * rows + row0 + row] = v;
  }
}

template <bool TURNED>
__device__ __forceinline__ void store_tile(float (&to)[TILE][PITCH], const Tile& tile) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    int row, word;
    placed<TURNED>(i, row, word);
    to[row][word] = tile.word[i];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
unequal_linear(const __grid_constant__ Groups groups, int count) {
  __shared__ __align__(16) float a_tile[TILE][PITCH];
  __shared__ __align__(16) float b_tile[TILE][PITCH];
#if MODE == 1 && PARTS
  const int behind = static_cast<int>(blockIdx.x) - groups.tiles;
  if (behind >= 0) return add_shares<THREADS>(groups.shares, groups.shared, behind);
#endif
  const int g = group_of(groups, count, blockIdx.x);
  const int rows = groups.rows[g], cols = groups.cols[g], depth = groups.depth[g];
  const int across = max(1, (cols + TILE - 1) / TILE), down = (rows + TILE - 1) / TILE;
  const int number = blockIdx.x - groups.first[g], parts = SPLIT ? PARTS_OF : 1;
  const int part = SPLIT ? number / (across * down) : 0, tile = number - part * across * down;
  const int row0 = tile / across * TILE, col0 = tile % across * TILE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_w = warp / 2 * 32, col_w = warp % 2 * 32;

  const int steps = (depth + STEP - 1) / STEP, each = (steps + parts - 1) / parts * STEP;
  const int from = SPLIT ? min(depth, part * each) : 0, end = SPLIT ? min(depth, from + each) : depth;
  Number* const out = MODE == 2 && WRITES && DERIVED && col0 == 0 ? to(groups.bias[g]) : nullptr;
  const int a_pitch = PITCH_OF(a, A_TURNED ? rows : depth);
  const int b_pitch = PITCH_OF(b, B_TURNED ? cols : depth);

  float acc[32] = {};
  double sum = 0.0;  // many numbers, of which little may be left
  Tile a, b;
  const auto fetch_both = [&](int k) {
    fetch_tile<A_TURNED, MODE != 0>(a, at(groups.a[g]), at(groups.saved[g]), rows, end, a_pitch, row0,
                                    k, &sum, out);
    fetch_tile<B_TURNED, false>(b, at(groups.b[g]), nullptr, cols, end, b_pitch, col0, k, nullptr,
                                nullptr);
  };
  fetch_both(from);
  for (int k = from; k < end; k += WORDS) {
    __syncthreads();
    store_tile<A_TURNED>(a_tile, a);
    store_tile<B_TURNED>(b_tile, b);
    __syncthreads();
    if (k + WORDS < end) fetch_both(k + WORDS);
    float part[32] = {};  // sums of sums: their error grows with fewer terms
#pragma unroll
    for (int w = 0; w < WORDS; w += 4) {
      float4 left[4], right[8];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        left[i] = *reinterpret_cast<const float4*>(&a_tile[row_w + lane / 4 + 8 * i][w]);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        right[j] = *reinterpret_cast<const float4*>(&b_tile[col_w + lane % 4 + 4 * j][w]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float& c = part[8 * i + j];
          c = fmaf(left[i].x, right[j].x, c);
          c = fmaf(left[i].y, right[j].y, c);
          c = fmaf(left[i].z, right[j].z, c);
          c = fmaf(left[i].w, right[j].w, c);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) acc[i] += part[i];
  }

  const u64 share = SPLIT && parts > 1 ? part * share_of(rows, cols) : 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int row = row0 + row_w + lane / 4 + 8 * (i / 8);
    const int col = col0 + col_w + lane % 4 + 4 * (i % 8);
    if (row < rows && col < cols) {
      const u64 place = static_cast<u64>(row) * cols + col;
      float v = acc[i];
      if (MODE == 0) {
        if (groups.bias[g]) v += at(groups.bias[g])[col];
        if (SAVE_PRE) to(groups.more[g])[place] = v;
        v = act(v);
      }
      to(groups.c[g])[share + place] = v;
    }
  }

  if (MODE == 2 && col0 == 0 && groups.more[g]) {  // two threads hold the sums of each row
    __syncthreads();
    double* sums = reinterpret_cast<double*>(a_tile);
    sums[threadIdx.x] = sum;
    __syncthreads();
    const int row = row0 + threadIdx.x;
    Number* db = parts > 1 ? to(groups.c[g]) + share + share_of_dw(rows, cols) : to(groups.more[g]);
    if (threadIdx.x < TILE && row < rows)
      db[row] = static_cast<float>(sums[threadIdx.x] + sums[threadIdx.x + TILE]);
  }
}
