// The way back through the down projection and the gate for Hopper, as one product with the
// derivatives in its epilogue.
//
//   dH = A Wd (never written),  dG = dH ∘ U ∘ act'(G),  dU = dH ∘ act(G),  H = act(G) ∘ U
//
// Behind hopper_gemm.h, hopper_kernel.h, activations/cuda.h and dy_sums.h. A is dy (M, N), B the down
// weight (N, H) as it lies. Each warp of a consumer reads G and U in blocks of 16 rows by TMA, as many as it
// has sets of buffers for under the products before, writes dG and dU over them and H beside them, and
// sends all three off by TMA. No block is read by two warps, or after it was sent off: in global memory
// dG and dU may lie over G and U, too.
//
// Macros from the host, besides those of the headers:
//   SETS: buffers of a warp for G and U, so many blocks ahead.
//   BLOCK_COLS: columns of a block, 32 or 64.
//   NEED_H 1: H is written, for the gradient of the down weight.
//   SUMS 1: column sums of dG and dU, of MMA_M * 16 rows each, are written for the bias gradients.
//   DOWN_SUMS 1: so are shares of dy's column sums, by the warps that have nothing else to do.

constexpr int H_BUFS = 2;
constexpr int BLOCK_BYTES = 16 * BLOCK_COLS * 2;
constexpr int QUARTERS = BLOCK_COLS / 16;  // of a block: 16 columns each
constexpr int SET_BYTES = 2 * BLOCK_BYTES;  // G and then dG, U and then dU
constexpr int WARP_BYTES = SETS * SET_BYTES + H_BUFS * BLOCK_BYTES;
constexpr int BLOCKS = MMA_M * (BN / BLOCK_COLS);  // of a warp's part of a tile
constexpr int OUT_OFFSET = STAGES * STAGE_BYTES;
constexpr int BAR_OFFSET = OUT_OFFSET + 8 * WARP_BYTES;
constexpr int LOADED_OFFSET = BAR_OFFSET + 2 * STAGES * 8;  // a barrier for each set of each warp
constexpr int B_PART = (B_MN ? BK : BN) / CLUSTER;

static_assert(BN % 64 == 0 && B_PART % 8 == 0, "BN");
static_assert(H_BUFS == 2, "what the waits below count on");
static_assert(!A_MN, "dy is dense");

__device__ __forceinline__ void ldmatrix(u32 addr, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}

__device__ __forceinline__ void store_block(const TensorMap* map, u32 src, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(src), "r"(x), "r"(y)
      : "memory");
}

// Sums over the eight lanes that hold other rows of the same columns: kCount values in, and out of each
// lane kCount / 8 of them. Lanes exchange halves: which one a lane keeps, its bits 4, 3 and 2 say.
template <int kCount, int kFar>
__device__ __forceinline__ void sum_rows(float* v, u32 lane) {
  if constexpr (kFar >= 4) {
    const bool upper = lane & kFar;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float kept = upper ? v[kCount / 2 + i] : v[i], sent = upper ? v[i] : v[kCount / 2 + i];
      v[i] = kept + __shfl_xor_sync(0xffffffffu, sent, kFar);
    }
    sum_rows<kCount / 2, kFar / 2>(v, lane);
  }
}

struct Epilogue {
  static constexpr bool kShared = false;
  u32 at;      // where this lane's row of a block lies in the first set
  u32 loaded;  // barrier of the first set
  bool leader;
  const TensorMap *gate_map, *up_map, *dgate_map, *dup_map, *h_map;
  float* sums;  // (2, sum_rows, columns): of dG, then of dU
  long long sums_apart;
  int columns;
  u32 odd;  // whether an odd number of tiles went before

  // Asks for the i-th block, at (row, col). Its set must have been read out.
  __device__ __forceinline__ void ask(int i, int row, int col) const {
    const int set = i % SETS;
    const u32 to = at + set * SET_BYTES, bar = loaded + set * 8;  // the leader's row is the first
    mbar_expect(bar, 2 * BLOCK_BYTES);
    tma_load<1>(to, gate_map, bar, col, row);
    tma_load<1>(to + BLOCK_BYTES, up_map, bar, col, row);
  }

  // Waits for the i-th block: its set has had (blocks of a tile in it) times (tiles before), and of
  // this tile's every SETS-th.
  __device__ __forceinline__ void wait(int i) const {
    const int set = i % SETS, of_tile = (BLOCKS - set + SETS - 1) / SETS;
    mbar_wait(loaded + set * 8, ((odd & of_tile) ^ (i / SETS)) & 1);
  }

  // A block's sums, of dG and then of dU, from column `col` on.
  __device__ __forceinline__ void put_sums(float (&sums_of)[8 * QUARTERS], int row, int col) const {
    const u32 lane = lane_id();
    sum_rows<8 * QUARTERS, 16>(sums_of, lane);
    const int sum_row = row / (64 * MMA_M) * 4 + row % 64 / 16;
    float* to = sums + (lane >> 4) * sums_apart + static_cast<long long>(sum_row) * columns;
#pragma unroll
    for (int i = 0; i < QUARTERS; i += 2) {  // 8 columns of four lanes
      const int own = col + (lane >> 2 & 3) * (BLOCK_COLS / 4) + i * 4 + (lane & 3) * 2;
      if (own < columns) *reinterpret_cast<float2*>(to + own) = make_float2(sums_of[i], sums_of[i + 1]);
    }
  }

  // A tile's blocks: of the first columns, its rows; `i` is a constant once unrolled.
  template <int kRows>
  static __device__ __forceinline__ int row_of(int i) { return i % kRows * 64; }
  template <int kRows>
  static __device__ __forceinline__ int col_of(int i) { return i / kRows * BLOCK_COLS; }

  template <int kRows>
  __device__ __forceinline__ void begin(int row, Tile tile) const {
    if (leader) {
      tma_store_wait_read<0>();
#pragma unroll
      for (int i = 0; i < min(SETS, BLOCKS); ++i)
        ask(i, row + row_of<kRows>(i), tile.n * BN + col_of<kRows>(i));
    }
    __syncwarp();
  }

  template <int kRows, int kAccs>
  __device__ __forceinline__ void finish(float (&acc)[kAccs][BN / 2], int row, Tile tile) {
    const int col = tile.n * BN;
    float sums_of[8 * QUARTERS];  // of a block's columns, its rows so far
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      const int mi = i % kRows;
      const int here = row + row_of<kRows>(i), at_col = col + col_of<kRows>(i);
      float* dh = acc[mi] + i / kRows * (BLOCK_COLS / 2);
      const u32 block = at + i % SETS * SET_BYTES;
      const u32 h_block = at + SETS * SET_BYTES + i % H_BUFS * BLOCK_BYTES;
      wait(i);
      if (NEED_H && i >= H_BUFS) {  // the store before the last is read out
        if (leader) tma_store_wait_read<1>();
        __syncwarp();
      }
#pragma unroll
      for (int q = 0; q < QUARTERS; ++q) {
        u32 where, to;  // volatile: worked out here, not kept in a register throughout
        asm volatile("xor.b32 %0, %1, %2;" : "=r"(where) : "r"(block), "r"(q * 32));
        asm volatile("xor.b32 %0, %1, %2;" : "=r"(to) : "r"(h_block), "r"(q * 32));
        u32 g[4], u[4], h[4];
        ldmatrix(where, g);
        ldmatrix(where + BLOCK_BYTES, u);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float d0 = dh[8 * q + 2 * k], d1 = dh[8 * q + 2 * k + 1];
          float g0, g1, u0, u1, dg0, dg1;
          unpack(g[k], g0, g1);
          unpack(u[k], u0, u1);
          const float a0 = act_and_grad(g0, d0 * u0, dg0), a1 = act_and_grad(g1, d1 * u1, dg1);
          const float du0 = d0 * a0, du1 = d1 * a1;
          if (SUMS) {
            float* of = sums_of + 4 * q + k / 2 * 2;
            const bool first = mi == 0 && k % 2 == 0;
            of[0] = first ? dg0 : of[0] + dg0;
            of[1] = first ? dg1 : of[1] + dg1;
            of[4 * QUARTERS] = first ? du0 : of[4 * QUARTERS] + du0;
            of[4 * QUARTERS + 1] = first ? du1 : of[4 * QUARTERS + 1] + du1;
          }
          g[k] = pack(dg0, dg1);
          u[k] = pack(du0, du1);
          h[k] = pack(a0 * u0, a1 * u1);
        }
        stmatrix(where, g[0], g[1], g[2], g[3]);
        stmatrix(where + BLOCK_BYTES, u[0], u[1], u[2], u[3]);
        if (NEED_H) stmatrix(to, h[0], h[1], h[2], h[3]);
        // Well into the block the store before is read out: its set takes the next block to come.
        if (q == min(SETS, QUARTERS) - 1 && i > 0 && i + SETS - 1 < BLOCKS && leader) {
          tma_store_wait_read<0>();
          const int next = i + SETS - 1;
          ask(next, row + row_of<kRows>(next), col + col_of<kRows>(next));
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (leader) {
        store_block(dgate_map, block, at_col, here);
        store_block(dup_map, block + BLOCK_BYTES, at_col, here);
        if (NEED_H) store_block(h_map, h_block, at_col, here);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
      if (SUMS && mi == kRows - 1) put_sums(sums_of, row, at_col);
    }
    odd ^= 1;
  }

  __device__ __forceinline__ void end() const {
    if (leader) tma_store_wait_all();
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
gated_backward(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
               const __grid_constant__ TensorMap gate_map,
               const __grid_constant__ TensorMap up_map,
               const __grid_constant__ TensorMap dgate_map,
               const __grid_constant__ TensorMap dup_map, const __grid_constant__ TensorMap h_map,
               float* __restrict__ sums, const unsigned short* __restrict__ dy,
               float* __restrict__ shares, int sum_rows, int columns, int dy_rows, int dy_columns,
               int dy_stride, int share_rows, int tiles_m, int tiles_n, int k_tiles) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = smem_addr(smem), full = base + BAR_OFFSET;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int thread = threadIdx.x % 128;
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    prefetch_map(&a_map);
    prefetch_map(&b_map);
    prefetch_map(&gate_map);
    prefetch_map(&up_map);
    for (int i = 0; i < 8 * SETS; ++i) mbar_init(base + LOADED_OFFSET + i * 8, 1);
  }
  init_pipeline(full);
  let_next_start();
  const Work work(tiles_m, tiles_n, k_tiles);

  // As in the forward: 40 + 2 * 232 registers for what 3 * 168 were.
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (thread == 0) {
      produce(work, base, full, rank, [&](u32 a_dst, u32 bar, int row, Tile tile, int kt) {
        const u32 b_dst = a_dst + A_BYTES + rank * (B_PART * 128);
        tma_load<1>(a_dst, &a_map, bar, kt * BK, row);
        if constexpr (B_MN) {
#pragma unroll
          for (int i = 0; i < BN / 64; ++i)
            tma_load<CLUSTER>(b_dst + i * (BK * 128), &b_map, bar, tile.n * BN + i * 64,
                              kt * BK + rank * B_PART);
        } else {
          tma_load<CLUSTER>(b_dst, &b_map, bar, kt * BK, tile.n * BN + rank * B_PART);
        }
      });
    } else if (DOWN_SUMS && thread >= 32) {
      const DySums own{dy, shares, dy_rows, dy_columns, dy_stride, share_rows};
      for (int task = blockIdx.x * 3 + thread / 32 - 1; task < own.tasks(); task += gridDim.x * 3)
        own.add(task, thread % 32);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int consumer = warpgroup - 1, warp = consumer * 4 + thread / 32;
    const u32 lane = thread & 31;
    // Rows of a block, their 16-byte pieces permuted as TMA's swizzle of 128 or 64 bytes has it
    const u32 row = lane & 15;
    const u32 piece = (lane >> 4) ^ (BLOCK_COLS == 64 ? row & 7 : (row >> 1) & 3);
    Epilogue epilogue{base + OUT_OFFSET + warp * WARP_BYTES + row * (BLOCK_COLS * 2) + piece * 16,
                      base + LOADED_OFFSET + warp * SETS * 8,
                      lane == 0,
                      &gate_map,
                      &up_map,
                      &dgate_map,
                      &dup_map,
                      &h_map,
                      sums,
                      static_cast<long long>(sum_rows) * columns,
                      columns,
                      0};
    consume(work, base, full, rank, consumer, thread, epilogue);
  }
  __syncwarp();
  if constexpr (CLUSTER > 1) cluster_sync();  // no block leaves while a peer may still write to it
}
