// Products of many groups of unequal sizes in one launch, float32, for sm_80 and later: plain
// arithmetic. Behind instructions.h, groups.h and shares.h.
//
// A block computes a tile (TILE_M, TILE_N) of one group in steps of WORDS numbers along the depth, of
// which STAGES are in shared memory or on their way there. Tiles lie there as in global memory: lines
// along the depth, or across it where TURNED. Lines come in copies of 16 bytes where they begin at 16
// bytes, else number by number. WARPS_K warps share a step's depth; their sums are added at the end.

constexpr int STEP = 64;  // parts of the depth are multiples of it
constexpr int WARPS = WARPS_M * WARPS_N * WARPS_K, THREADS = 32 * WARPS;
constexpr int PART_M = TILE_M / WARPS_M, PART_N = TILE_N / WARPS_N, PART_K = WORDS / WARPS_K;
constexpr int EACH_M = 4, LANES_M = PART_M / EACH_M;  // results of a thread, and threads of a warp
constexpr int LANES_N = 32 / LANES_M, EACH_N = PART_N / LANES_N;
constexpr int LINE = WORDS + 4;  // of a tile along the depth: 8 rows share no bank
constexpr int SAVED_AT = TILE_M * LINE, B_AT = SAVED_AT * (DERIVED ? 2 : 1);
constexpr int STAGE = B_AT + TILE_N * LINE;  // numbers
constexpr int PITCH = TILE_N + 4;            // of sums
static_assert(STEP % WORDS == 0 && EACH_N % 4 == 0 && PART_K % 4 == 0, "whole pieces");

// The pieces of UNIT numbers of a tile that one thread copies: neighbours in memory by neighbouring
// threads.
template <bool TURNED, int TILE, int UNIT>
struct Pieces {
  static constexpr int WIDTH = TURNED ? TILE : WORDS, LINES = TURNED ? WORDS : TILE;
  static constexpr int ACROSS = WIDTH / UNIT, APART = THREADS / ACROSS;  // lines of a thread
  static constexpr int EACH = (LINES + APART - 1) / APART;
  static_assert(THREADS % ACROSS == 0, "whole lines");
  int line0, col;
  __device__ __forceinline__ Pieces()
      : line0(threadIdx.x / ACROSS), col(threadIdx.x % ACROSS * UNIT) {}
  __device__ __forceinline__ int line(int i) const { return line0 + i * APART; }
  __device__ __forceinline__ bool there(int i) const {
    return LINES % APART == 0 || line(i) < LINES;
  }
  __device__ __forceinline__ int place(int i) const {
    return line(i) * (TURNED ? TILE : LINE) + col;
  }
};

// A tile's rows of a matrix (rows, depth), or (depth, rows) where TURNED, as one thread walks them
// along the depth.
template <bool TURNED, int TILE>
struct Walk {
  const Number* next;  // the thread's first piece
  u64 apart, along;    // numbers to its next line, and to its next step
  int rows, depth;     // left
  bool wide;           // lines begin at 16 bytes

  __device__ __forceinline__ Walk(u64 address, int rows, int depth, int pitch, int row0, int k0,
                                  bool wide)
      : apart(pitch), along(TURNED ? static_cast<u64>(pitch) * WORDS : WORDS), rows(rows - row0),
        depth(depth - k0), wide(wide) {
    const Pieces<TURNED, TILE, 4> four;
    const Pieces<TURNED, TILE, 1> one;
    const int line = (TURNED ? k0 : row0) + (wide ? four.line0 : one.line0);
    next = at(address) + static_cast<u64>(line) * pitch + (TURNED ? row0 : k0) +
           (wide ? four.col : one.col);
    apart *= wide ? four.APART : one.APART;
  }

  template <int UNIT>
  __device__ __forceinline__ void copy(u32 tile) const {
    const Pieces<TURNED, TILE, UNIT> pieces;
    const int left = (TURNED ? rows : depth) - pieces.col, lines = TURNED ? depth : rows;
    const int bytes = max(0, min(left, UNIT)) * 4;
    const Number* from = next;
#pragma unroll 4
    for (int i = 0; i < pieces.EACH; ++i, from += apart) {
      if (pieces.there(i))
        copy_async<UNIT * 4>(tile + pieces.place(i) * 4, from, pieces.line(i) < lines ? bytes : 0);
    }
  }

  __device__ __forceinline__ void bring(u32 tile) {
    if (wide)
      copy<4>(tile);
    else
      copy<1>(tile);
    next += along;
    depth -= WORDS;
  }
};

__device__ __forceinline__ bool aligned(u64 address, int pitch) {
  return (address | static_cast<u64>(pitch) * 4) % 16 == 0;
}

// act' applied to those numbers of dy's tile that this thread has brought, which it sees first. They
// are written to `out` as well, (depth, rows), where it is not null.
template <int UNIT>
__device__ __forceinline__ void derive(float* tile, int rows, int depth, int row0, int k0,
                                       Number* out) {
  const Pieces<A_TURNED, TILE_M, UNIT> pieces;
#pragma unroll
  for (int i = 0; i < pieces.EACH; ++i) {
    if (!pieces.there(i)) continue;
    float* const at = tile + pieces.place(i);
    const int line = k0 + pieces.line(i), col = row0 + pieces.col;
#pragma unroll
    for (int n = 0; n < UNIT; ++n) {
      at[n] = graded(at[n], at[SAVED_AT + n]);
      if (MODE == 2 && WRITES && out && line < depth && col + n < rows)
        out[static_cast<u64>(line) * rows + col + n] = at[n];
    }
  }
}

// The i-th row of a lane among those of its warp.
template <bool TURNED, int LANES>
__device__ __forceinline__ int row_of(int lane, int i) {
  return TURNED ? (i / 4 * LANES + lane) * 4 + i % 4 : i * LANES + lane;
}

// Four numbers of the depth of each row of a lane; `tile` is at the warp's first row.
template <bool TURNED, int TILE, int LANES, int EACH>
__device__ __forceinline__ void read(float (&v)[EACH][4], const float* tile, int lane, int k) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const float* const at = TURNED ? tile + (k + i % 4) * TILE + row_of<true, LANES>(lane, i / 4 * 4)
                                   : tile + row_of<false, LANES>(lane, i) * LINE + k;
    const float4 four = *reinterpret_cast<const float4*>(at);
    const float found[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (TURNED)
        v[i / 4 * 4 + n][i % 4] = found[n];
      else
        v[i][n] = found[n];
    }
  }
}

// The sums in shared memory as results of rows (rows, cols) of `pitch` numbers, COUNT at once. `raw`
// ones are shares.
template <int COUNT>
__device__ __forceinline__ void finish(const float* sums, const Number* bias, Number* c, Number* pre,
                                       int rows, int cols, int pitch, bool raw) {
  constexpr int PIECES = TILE_N / COUNT;
#pragma unroll 2
  for (int i = threadIdx.x; i < TILE_M * PIECES; i += THREADS) {
    const int row = i / PIECES, col = i % PIECES * COUNT;
    if (row >= rows || col >= cols) continue;
    float v[COUNT] = {};
#pragma unroll
    for (int w = 0; w < WARPS_K; ++w) {
#pragma unroll
      for (int n = 0; n < COUNT; ++n) v[n] += sums[(w * TILE_M + row) * PITCH + col + n];
    }
    const auto put = [&](Number* to) {
      to += static_cast<u64>(row) * pitch + col;
      if constexpr (COUNT == 4)
        *reinterpret_cast<float4*>(to) = {v[0], v[1], v[2], v[3]};
      else
        *to = v[0];
    };
    if (MODE == 0 && !raw) {
#pragma unroll
      for (int n = 0; n < COUNT; ++n) v[n] += bias ? bias[col + n] : 0.0f;
      if (SAVE_PRE) put(pre);
#pragma unroll
      for (int n = 0; n < COUNT; ++n) v[n] = act(v[n]);
    }
    put(c);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
unequal_linear(const __grid_constant__ Groups groups, int count) {
  SHARED_MEMORY;
  if (EARLY) let_next_start();
  if (EARLY && MODE == 1) wait_for_previous();
#if MODE == 1 && ADDS
  const int behind = static_cast<int>(blockIdx.x) - groups.tiles;
  if (behind >= 0) return add_shares<THREADS>(groups.shares, groups.shared, behind);
#endif
  const int g = group_of(groups, count, blockIdx.x);
  const int rows = groups.rows[g], cols = groups.cols[g], depth = groups.depth[g];
  const int across = max(1, (cols + TILE_N - 1) / TILE_N), down = (rows + TILE_M - 1) / TILE_M;
  const int number = blockIdx.x - groups.first[g], parts = PARTS_OF;
  const int part = PARTS ? number / (across * down) : 0, tile = number - part * across * down;
  const int row0 = tile / across * TILE_M, col0 = tile % across * TILE_N;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_k = warp / (WARPS_M * WARPS_N), row_w = warp / WARPS_N % WARPS_M * PART_M;
  const int col_w = warp % WARPS_N * PART_N, lane_m = lane / LANES_N, lane_n = lane % LANES_N;

  const int all = (depth + STEP - 1) / STEP, each = (all + parts - 1) / parts * STEP;
  const int from = min(depth, part * each), end = min(depth, from + each);
  const int steps = (end - from + WORDS - 1) / WORDS;
  Number* const out = MODE == 2 && WRITES && DERIVED && col0 == 0 ? to(groups.bias[g]) : nullptr;
  const bool summing = MODE == 2 && col0 == 0 && groups.more[g];

  const int a_pitch = PITCH_OF(a, A_TURNED ? rows : depth), a_width = A_TURNED ? rows : depth;
  const int b_pitch = PITCH_OF(b, B_TURNED ? cols : depth);
  const bool wide =
      aligned(groups.a[g], a_pitch) && (!DERIVED || aligned(groups.saved[g], a_width));
  Walk<A_TURNED, TILE_M> a(groups.a[g], rows, depth, a_pitch, row0, from, wide);
  Walk<A_TURNED, TILE_M> saved(groups.saved[g], rows, depth, a_width, row0, from, wide);
  Walk<B_TURNED, TILE_N> b(groups.b[g], cols, depth, b_pitch, col0, from,
                           aligned(groups.b[g], b_pitch));
  const u32 start = shared_address(memory);
  float* const stages = reinterpret_cast<float*>(memory);
  const auto bring = [&](int step) {
    if (step < steps) {
      const u32 stage = start + step % STAGES * STAGE * 4;
      a.bring(stage);
      if (DERIVED) saved.bring(stage + SAVED_AT * 4);
      b.bring(stage + B_AT * 4);
    }
    commit();
  };
  float acc[EACH_M][EACH_N] = {};
  double sum = 0.0;  // many numbers, of which little may be left
#pragma unroll 1
  for (int step = 0; step < STAGES - 1; ++step) bring(step);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait<STAGES - 2>();
    float* const stage = stages + step % STAGES * STAGE;
    if (DERIVED) {
      const int k0 = from + step * WORDS;
      if (wide)
        derive<4>(stage, rows, depth, row0, k0, out);
      else
        derive<1>(stage, rows, depth, row0, k0, out);
    }
    __syncthreads();
    bring(step + STAGES - 1);
    if (summing)
      for (int k = threadIdx.x / TILE_M; k < WORDS; k += THREADS / TILE_M)
        sum += stage[k * TILE_M + threadIdx.x % TILE_M];
    const float* const a_tile = stage + row_w * (A_TURNED ? 1 : LINE);
    const float* const b_tile = stage + B_AT + col_w * (B_TURNED ? 1 : LINE);
    float part_of[EACH_M][EACH_N] = {};  // sums of sums: their error grows with fewer terms
#pragma unroll 2
    for (int w = 0; w < PART_K; w += 4) {
      float left[EACH_M][4], right[EACH_N][4];
      read<A_TURNED, TILE_M, LANES_M>(left, a_tile, lane_m, warp_k * PART_K + w);
      read<B_TURNED, TILE_N, LANES_N>(right, b_tile, lane_n, warp_k * PART_K + w);
#pragma unroll
      for (int i = 0; i < EACH_M; ++i) {
#pragma unroll
        for (int j = 0; j < EACH_N; ++j) {
#pragma unroll
          for (int n = 0; n < 4; ++n) part_of[i][j] = fmaf(left[i][n], right[j][n], part_of[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < EACH_M; ++i) {
#pragma unroll
      for (int j = 0; j < EACH_N; ++j) acc[i][j] += part_of[i][j];
    }
  }
  wait<0>();
  __syncthreads();

  Number* const share = to(groups.c[g]) + (parts > 1 ? part * share_of(rows, cols) : 0);
  if (summing) {
    double* const sums = reinterpret_cast<double*>(memory);
    sums[threadIdx.x] = sum;
    __syncthreads();
    const int row = row0 + threadIdx.x;
    if (threadIdx.x < TILE_M && row < rows) {
      for (int i = TILE_M; i < THREADS; i += TILE_M) sum += sums[i + threadIdx.x];
      (parts > 1 ? share + share_of_dw(rows, cols) : to(groups.more[g]))[row] =
          static_cast<float>(sum);
    }
    __syncthreads();
  }
  float* const sums = stages + (warp_k * TILE_M + row_w) * PITCH + col_w;
#pragma unroll
  for (int i = 0; i < EACH_M; ++i) {
#pragma unroll
    for (int j = 0; j < EACH_N; ++j)
      sums[row_of<A_TURNED, LANES_M>(lane_m, i) * PITCH + row_of<B_TURNED, LANES_N>(lane_n, j)] =
          acc[i][j];
  }
  __syncthreads();
  const u64 first = static_cast<u64>(row0) * cols + col0;
  const Number* bias = MODE == 0 && groups.bias[g] ? at(groups.bias[g]) + col0 : nullptr;
  Number *c = share + first, *pre = SAVE_PRE ? to(groups.more[g]) + first : nullptr;
  if (cols % 4 == 0)
    finish<4>(stages, bias, c, pre, rows - row0, cols - col0, cols, parts > 1);
  else
    finish<1>(stages, bias, c, pre, rows - row0, cols - col0, cols, parts > 1);
}
