// Persistent warp-specialised GEMM with a bias + activation epilogue for Hopper (sm_90a).
//
//   C[m, n] = sum_k A[m, k] * B[n, k];   pre = C + bias;   Y = act(pre)
//
// One block: warpgroup 0 is the TMA producer, warpgroups 1 and 2 are consumers.
//   PINGPONG 1: each consumer owns whole BM x BN tiles, alternately, so that one group's epilogue
//               runs under the other group's wgmma. A block's last tile has no products left to
//               hide under, so its epilogue is done by both.
//   PINGPONG 0: both consumers share a tile, BM/2 rows each.
// CLUSTER blocks along M share one B tile: each loads 1/CLUSTER of it (of its rows, or with B_MN of
// its K) and multicasts it.
//
// hopper_gemm.h and activations/cuda.h come before this file. Further macros from the host:
//   OUT_BUFS: staging buffers of a warp. HAS_BIAS.
//   SAVE 1: `pre` is written beside Y.
//   DIRECT 1: rows of Y begin anywhere, where TMA cannot store: warps write them element by element,
//             64 contiguous bytes at once, out of the staging buffers.

constexpr int OUT_BYTES = 16 * 64 * 2;             // one staging buffer; OUT_BUFS per warp
constexpr int OUT_OFFSET = STAGES * STAGE_BYTES;
constexpr int BAR_OFFSET = OUT_OFFSET + 8 * OUT_BUFS * OUT_BYTES;
constexpr int B_PART = (B_MN ? BK : BN) / CLUSTER; // rows this block loads of B, or of its K

static_assert(BN % 64 == 0 && B_PART % 8 == 0, "BN");
static_assert(BN / 64 % OUT_BUFS == 0, "OUT_BUFS");
constexpr bool SHARED_LAST = PINGPONG && MMA_M == 2;
// The epilogue does all rows of 64 columns, whose bias it keeps in registers, before the next 64;
// where that would spill, all columns of 64 rows.
constexpr bool BY_COLUMNS = !(SAVE == 1 && ACT == ACT_RELU2) && !(DIRECT && ACT == ACT_GELU);

// ---------------------------------------------------------------- accumulators

// The tile's bias, packed in pairs: lane i of the warp holds pairs i, i + 32, ...
__device__ __forceinline__ void load_bias(u32 (&out)[BN / 64], const unsigned short* bias, int col,
                                          u32 lane, int N) {
#pragma unroll
  for (int c = 0; c < BN / 64; ++c) {
    const int n = col + 64 * c + 2 * lane;
    if constexpr (DIRECT) {  // N may be odd
      const u32 low = n < N ? bias[n] : 0, high = n + 1 < N ? bias[n + 1] : 0;
      out[c] = low | high << 16;
    } else {
      out[c] = n < N ? *reinterpret_cast<const u32*>(bias + n) : 0;
    }
  }
}

// The bias of this lane's columns among 64: of 8j + 2 (lane%4) and the one after, j = 0 to 7.
__device__ __forceinline__ void read_bias(float (&out)[16], u32 packed) {
  const u32 lane = lane_id();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    u32 from;  // volatile: not kept in a register throughout
    asm volatile("add.u32 %0, %1, %2;" : "=r"(from) : "r"(lane & 3), "r"(4 * j));
    unpack(__shfl_sync(0xffffffffu, packed, from), out[2 * j], out[2 * j + 1]);
  }
}

// Adds it to the accumulators of 64 rows.
__device__ __forceinline__ void add_bias(float* acc, const float (&bias)[16]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) acc[i] += bias[i / 4 * 2 + i % 2];
}

// 64 columns of 64 rows, packed as Output::stage takes them, with the activation or before it.
template <bool kAct>
__device__ __forceinline__ void convert(const float* acc, u32 (&r)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float lo = acc[2 * i], hi = acc[2 * i + 1];
    r[i] = kAct ? pack(act(lo), act(hi)) : pack(lo, hi);
  }
}

// ---------------------------------------------------------------- epilogue

// One warp's way to memory: 16 rows x 64 columns at a time, waiting for no other warp.
struct Output {
  u32 at;      // where this lane's stmatrix row lies in the first of OUT_BUFS staging buffers
  bool leader;
#if DIRECT
  unsigned short *y, *pre;
  int rows, columns;  // of both
#endif

  // Puts 64 columns of 16 rows into buffer `count` modulo OUT_BUFS, a constant once unrolled. Of 16
  // columns q, r[4q] and r[4q + 1] pack column pair 2q of rows 0-7 and 8-15, r[4q + 2] and
  // r[4q + 3] pair 2q + 1.
  __device__ __forceinline__ void stage(int count, const u32 (&r)[16]) const {
    if (!DIRECT && leader) tma_store_wait_read<OUT_BUFS - 1>();  // its last store is read out
    __syncwarp();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      u32 to;  // volatile: worked out here, not kept in a register throughout
      asm volatile("xor.b32 %0, %1, %2;" : "=r"(to) : "r"(at), "r"(q * 32));
      stmatrix(to + count % OUT_BUFS * OUT_BYTES, r[4 * q], r[4 * q + 1], r[4 * q + 2],
               r[4 * q + 3]);
    }
  }

#if DIRECT
  // Stores what was staged to (row, col) of `matrix`.
  __device__ __forceinline__ void send(int count, unsigned short* matrix, int row, int col) const {
    __syncwarp();
    const u32 lane = lane_id();
    // The buffer's first row, from where this lane's stmatrix row lies.
    const u32 from = at - (lane & 15) * 128 - ((lane >> 4) ^ (lane & 7)) * 16 +
                     count % OUT_BUFS * OUT_BYTES + (lane & 7) * 2;
    unsigned short* to = matrix + static_cast<long long>(row) * columns + col + lane;
    const int left = min(rows - row, 16), width = columns - col - lane;
#pragma unroll 1
    for (int r = 0; r < left; ++r, to += columns) {
      const u32 piece = (lane >> 3) ^ (r & 7);  // of columns 0-31; of the others bit 2 differs
      if (width > 0) *to = load_shared16(from + r * 128 + piece * 16);
      if (width > 32) to[32] = load_shared16(from + r * 128 + (piece ^ 4) * 16);
    }
  }
#else
  // Stores what was staged to (row, col).
  template <bool kStream>
  __device__ __forceinline__ void send(int count, const TensorMap* map, int row, int col) const {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    // The leader is lane 0, whose row is the buffer's first.
    if (leader) tma_store<kStream>(map, at + count % OUT_BUFS * OUT_BYTES, col, row);
  }
#endif
};

// The i-th block of 64 x 64 of the epilogue: in which 64 columns, in which 64 rows.
__device__ __forceinline__ int column(int i, int rows) {
  return BY_COLUMNS ? i / rows : i % (BN / 64);
}

__device__ __forceinline__ int block_row(int i, int rows) {
  return BY_COLUMNS ? i % rows : i / (BN / 64);
}

// What the epilogue needs besides the accumulators.
struct Epilogue {
  Output out;
  const TensorMap *y_map, *save_map;

#if DIRECT
  __device__ __forceinline__ void y(int i, int row, int col) const { out.send(i, out.y, row, col); }
  __device__ __forceinline__ void pre(int i, int row, int col) const {
    out.send(i, out.pre, row, col);
  }
#else
  __device__ __forceinline__ void y(int i, int row, int col) const {
    out.send<false>(i, y_map, row, col);
  }
  __device__ __forceinline__ void pre(int i, int row, int col) const {
    out.send<true>(i, save_map, row, col);
  }
#endif

  // Bias, activation and store of kRows * 64 rows; this warp's first is `row`. A store is sent off
  // only when the next one's values are there: what was staged has arrived by then.
  template <int kRows, int kAccs>
  __device__ __forceinline__ void finish(float (&acc)[kAccs][BN / 2], const u32 (&bias)[BN / 64],
                                         int row, int col) const {
    float b[16];
#pragma unroll
    for (int i = 0; i < kRows * (BN / 64); ++i) {
      const int c = column(i, kRows), mi = block_row(i, kRows);
      const int before_row = row + block_row(i - 1, kRows) * 64;
      const int before_col = col + column(i - 1, kRows) * 64;
      float* p = acc[mi] + c * 32;
      if (HAS_BIAS) {
        if (mi == 0 || !BY_COLUMNS) read_bias(b, bias[c]);
        add_bias(p, b);
      }
      u32 r[16];
#if SAVE == 1
      convert<false>(p, r);
      if (i > 0) y(2 * i - 1, before_row, before_col);
      out.stage(2 * i, r);
      convert<true>(p, r);
      pre(2 * i, row + mi * 64, col + c * 64);
      out.stage(2 * i + 1, r);
#else
      convert<true>(p, r);
      if (i > 0) y(i - 1, before_row, before_col);
      out.stage(i, r);
#endif
    }
    y(kRows * (BN / 64) * (1 + SAVE) - 1, row + (kRows - 1) * 64, col + BN - 64);
  }
};

// ---------------------------------------------------------------- the kernel

extern "C" __global__ void __launch_bounds__(384, 1)
linear_act_gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                const __grid_constant__ TensorMap y_map, const __grid_constant__ TensorMap save_map,
                const unsigned short* __restrict__ bias_ptr, int N, int tiles_m, int tiles_n,
                int k_tiles
#if DIRECT
                , unsigned short* __restrict__ y_ptr, unsigned short* __restrict__ pre_ptr, int M
#endif
) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = smem_addr(smem);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int thread = threadIdx.x % 128;
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;

  const u32 full = base + BAR_OFFSET;
  const u32 empty = full + STAGES * 8;
  constexpr int kConsumerWarps = PINGPONG ? 4 : 8;

  if (threadIdx.x == 0) {
    prefetch_map(&a_map);
    prefetch_map(&b_map);
    prefetch_map(&y_map);
    for (int s = 0; s < STAGES; ++s) {
      mbar_init(full + s * 8, 1);
      mbar_init(empty + s * 8, kConsumerWarps * CLUSTER);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if constexpr (CLUSTER > 1) cluster_sync(); else __syncthreads();
  // A kernel behind this one that was launched to may set up under its end. This one touches no
  // memory before the kernel ahead of it is done.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");

  // tiles_m counts BM * CLUSTER rows, tiles_n BN columns, k_tiles BK of the reduction
  const int tiles = tiles_m * tiles_n;
  const int first = blockIdx.x / CLUSTER;
  const int step = gridDim.x / CLUSTER;

  // A launch of 384 threads gets 168 registers each; 40 + 2 * 232 = 3 * 168 shares them out anew. A
  // larger sum would wait for ever.
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (thread == 0) {
      int stage = 0;
      u32 phase = 1;  // a fresh barrier counts as "previous phase done"
      for (int t = first; t < tiles; t += step) {
        const Tile tile = tile_at(t, tiles_m, tiles_n);
        const int row = (tile.m * CLUSTER + rank) * BM;
        const int col = tile.n * BN;
        for (int kt = 0; kt < k_tiles; ++kt) {
          mbar_wait(empty + stage * 8, phase);
          const u32 bar = full + stage * 8;
          const u32 a_dst = base + stage * STAGE_BYTES;
          const u32 b_dst = a_dst + A_BYTES + rank * (B_PART * 128);
          mbar_expect(bar, STAGE_BYTES);
          if constexpr (A_MN) {
#pragma unroll
            for (int i = 0; i < BM / 64; ++i)
              tma_load<1>(a_dst + i * (BK * 128), &a_map, bar, row + i * 64, kt * BK);
          } else {
            tma_load<1>(a_dst, &a_map, bar, kt * BK, row);
          }
          if constexpr (B_MN) {
#pragma unroll
            for (int i = 0; i < BN / 64; ++i)
              tma_load<CLUSTER>(b_dst + i * (BK * 128), &b_map, bar, col + i * 64,
                                kt * BK + rank * B_PART);
          } else {
            tma_load<CLUSTER>(b_dst, &b_map, bar, kt * BK, col + rank * B_PART);
          }
          if (++stage == STAGES) { stage = 0; phase ^= 1; }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int consumer = warpgroup - 1;
    const u32 lane = thread & 31;
    const int warp = thread / 32;
    // Rows of 128 bytes, their 16-byte pieces permuted as the 128-byte swizzle of TMA has it
    const u32 piece = (lane >> 4) ^ (lane & 7);
    const Output out{base + OUT_OFFSET + (consumer * 4 + warp) * OUT_BUFS * OUT_BYTES +
                         (lane & 15) * 128 + piece * 16,
                     lane == 0,
#if DIRECT
                     y_ptr, pre_ptr, M, N,
#endif
    };
    const Epilogue epilogue{out, &y_map, &save_map};

    if (PINGPONG && consumer == 1) bar_arrive(1, 256);  // consumer 0 starts

    // The block's tiles are numbered `index`; in pingpong each consumer takes every second one.
    const int count = (tiles - first + step - 1) / step;
    int index = PINGPONG ? consumer : 0;
    for (; index < count; index += PINGPONG ? 2 : 1) {
      const Tile tile = tile_at(first + index * step, tiles_m, tiles_n);
      const int row = (tile.m * CLUSTER + rank) * BM + (PINGPONG ? 0 : consumer * WG_M);
      const int col = tile.n * BN;
      const u32 lane = lane_id();
      float acc[MMA_M][BN / 2];
      u32 bias[BN / 64];
      if (HAS_BIAS) load_bias(bias, bias_ptr, col, lane, N);  // arrives under the products
      const u32 it = index * k_tiles;  // k-tiles that went through the pipeline before this tile
      const u32 a_src = base + (PINGPONG ? 0 : consumer * (A_BYTES / 2));
      Pipe pipe{a_src, base + A_BYTES, full, empty, lane, static_cast<int>(it % STAGES), 0,
                (it / STAGES) & 1};

      // Wait for the other consumer to have issued its tile. This also keeps both within one phase
      // of the pipeline's barriers, which a parity bit cannot tell apart beyond that.
      if constexpr (PINGPONG) bar_sync(1 + consumer, 256);
      pipe.run(acc, k_tiles);
      if constexpr (PINGPONG) bar_arrive(1 + (consumer ^ 1), 256);
      wgmma_wait<0>();
      pipe.release(pipe.previous);
      const bool is_shared = SHARED_LAST && index == count - 1;
      if (SHARED_LAST && index == count - 2) bar_arrive(4, 256);
      if (is_shared) {
        if (index > 0) bar_sync(4, 256);  // both have read all of the pipeline: its memory is free.
        give(base + thread * 16, acc[MMA_M - 1]);
        bar_arrive(3, 256);
        epilogue.finish<1>(acc, bias, row + warp * 16, col);
      } else {
        epilogue.finish<MMA_M>(acc, bias, row + warp * 16, col);
      }
    }
    if (SHARED_LAST && index == count) {  // the last tile is the other consumer's
      const Tile tile = tile_at(first + (count - 1) * step, tiles_m, tiles_n);
      u32 bias[BN / 64];
      if (HAS_BIAS) load_bias(bias, bias_ptr, tile.n * BN, lane_id(), N);
      float half[1][BN / 2];  // not acc: written by loads, it would make ptxas serialise all wgmma
      bar_sync(3, 256);
      take(base + thread * 16, half[0]);
      epilogue.finish<1>(half, bias, (tile.m * CLUSTER + rank) * BM + WG_M - 64 + warp * 16,
                         tile.n * BN);
    }
    if (!DIRECT && out.leader) tma_store_wait_all();
  }
  __syncwarp();
  if constexpr (CLUSTER > 1) cluster_sync();  // no block leaves while a peer may still write to it
}
