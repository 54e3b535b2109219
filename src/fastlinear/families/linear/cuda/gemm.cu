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
// hopper_gemm.h, activations/cuda.h and hopper_epilogue.h, with macros of its own, come before this file.
//   DIRECT 1: rows of Y begin anywhere, where TMA cannot store: warps write them element by element,
//             64 contiguous bytes at once, out of the staging buffers.

constexpr int OUT_OFFSET = STAGES * STAGE_BYTES;
constexpr int BAR_OFFSET = OUT_OFFSET + 8 * OUT_BUFS * OUT_BYTES;
constexpr int B_PART = (B_MN ? BK : BN) / CLUSTER; // rows this block loads of B, or of its K

static_assert(B_PART % 8 == 0, "BN");
constexpr bool SHARED_LAST = PINGPONG && MMA_M == 2;

// What the epilogue needs besides the accumulators.
struct Epilogue : Staging {
  const TensorMap *y_map, *save_map;
#if DIRECT
  unsigned short *y_ptr, *pre_ptr;
  int rows, columns;  // of both

  // Stores what was staged to (row, col) of `matrix`.
  __device__ __forceinline__ void send(int count, unsigned short* matrix, int row, int col) const {
    __syncwarp();
    const u32 lane = lane_id(), from = buffer(count, lane) + (lane & 7) * 2;
    unsigned short* to = matrix + static_cast<long long>(row) * columns + col + lane;
    const int left = min(rows - row, 16), width = columns - col - lane;
#pragma unroll 1
    for (int r = 0; r < left; ++r, to += columns) {
      const u32 piece = (lane >> 3) ^ (r & 7);  // of columns 0-31; of the others bit 2 differs
      if (width > 0) *to = load_shared16(from + r * 128 + piece * 16);
      if (width > 32) to[32] = load_shared16(from + r * 128 + (piece ^ 4) * 16);
    }
  }

  __device__ __forceinline__ void y(int i, int row, int col) const { send(i, y_ptr, row, col); }
  __device__ __forceinline__ void pre(int i, int row, int col) const { send(i, pre_ptr, row, col); }
#else
  __device__ __forceinline__ void y(int i, int row, int col) const {
    send<false>(i, y_map, row, col);
  }
  __device__ __forceinline__ void pre(int i, int row, int col) const {
    send<true>(i, save_map, row, col);
  }
#endif
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
    const Epilogue epilogue{{staged(base + OUT_OFFSET, consumer * 4 + warp, lane), lane == 0},
                            &y_map,
                            &save_map,
#if DIRECT
                            y_ptr,
                            pre_ptr,
                            M,
                            N,
#endif
    };

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
        finish<1>(epilogue, acc, bias, row + warp * 16, col);
      } else {
        finish<MMA_M>(epilogue, acc, bias, row + warp * 16, col);
      }
    }
    if (SHARED_LAST && index == count) {  // the last tile is the other consumer's
      const Tile tile = tile_at(first + (count - 1) * step, tiles_m, tiles_n);
      u32 bias[BN / 64];
      if (HAS_BIAS) load_bias(bias, bias_ptr, tile.n * BN, lane_id(), N);
      float half[1][BN / 2];  // not acc: written by loads, it would make ptxas serialise all wgmma
      bar_sync(3, 256);
      take(base + thread * 16, half[0]);
      finish<1>(epilogue, half, bias, (tile.m * CLUSTER + rank) * BM + WG_M - 64 + warp * 16,
                tile.n * BN);
    }
    if (!DIRECT && epilogue.leader) tma_store_wait_all();
  }
  __syncwarp();
  if constexpr (CLUSTER > 1) cluster_sync();  // no block leaves while a peer may still write to it
}
