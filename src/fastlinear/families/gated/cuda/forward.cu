// The forward of a gate for Hopper: gate and up projection as one product, what lies behind it in
// the epilogue.
//
//   G = A Wgᵀ + bg,  U = A Wuᵀ + bu,  H = act(G) ∘ U
//
// Behind hopper_gemm.h, hopper_kernel.h and activations/cuda.h. A tile's B holds BN / 2 rows of the
// gate's weight, then as many of the up projection's, so that a thread has both numbers of a pair.
// In a cluster of two, one block loads the gate's half and the other the up projection's for both.
//
// Macros from the host, besides those of the headers:
//   GATE_BIAS UP_BIAS: whether there is such a bias.
//   SAVE 1: G and U are written as well.

constexpr int HALF = BN / 2;             // hidden features of a tile
constexpr int UNITS = HALF / 32;         // the epilogue takes 32 of them at a time
constexpr int OUT_BYTES = 16 * 32 * 2;   // one staging buffer; a warp has UNITS
constexpr int OUT_OFFSET = STAGES * STAGE_BYTES;
constexpr int BAR_OFFSET = OUT_OFFSET + 8 * UNITS * OUT_BYTES;
constexpr int PAIRS = (HALF + 63) / 64;  // registers that hold the tile's bias, 32 pairs each

static_assert(HALF % 32 == 0 && CLUSTER <= 2, "BN");
static_assert(!A_MN && !B_MN, "operands with K contiguous");

// Pairs i, i + 32 ... of the tile's bias for lane i.
__device__ __forceinline__ void load_bias(u32 (&out)[PAIRS], const unsigned short* bias, int col,
                                          int columns) {
#pragma unroll
  for (int c = 0; c < PAIRS; ++c) {
    const int n = col + 64 * c + 2 * lane_id();
    out[c] = n < columns ? *reinterpret_cast<const u32*>(bias + n) : 0;
  }
}

// Adds the bias of 32 columns, the q-th of the tile, to this lane's numbers of 16 rows.
__device__ __forceinline__ void add_bias(float* v, const u32 (&packed)[PAIRS], int q) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 from;  // volatile: not kept in a register throughout
    asm volatile("add.u32 %0, %1, %2;" : "=r"(from) : "r"(lane_id() & 3), "r"(q % 2 * 16 + 4 * j));
    float lo, hi;
    unpack(__shfl_sync(0xffffffffu, packed[q / 2], from), lo, hi);
    v[4 * j] += lo;
    v[4 * j + 1] += hi;
    v[4 * j + 2] += lo;
    v[4 * j + 3] += hi;
  }
}

struct Epilogue {
  static constexpr bool kShared = true;
  u32 at;  // where this lane's stmatrix row lies in the first of the warp's buffers
  bool leader;
  const TensorMap *h_map, *gate_map, *up_map;
  const unsigned short *gate_bias, *up_bias;
  int columns;
  u32 gate_pairs[PAIRS], up_pairs[PAIRS];

  template <int kRows>
  __device__ __forceinline__ void begin(int row, Tile tile) {
    if (GATE_BIAS) load_bias(gate_pairs, gate_bias, tile.n * HALF, columns);
    if (UP_BIAS) load_bias(up_pairs, up_bias, tile.n * HALF, columns);
  }

  // Puts 32 columns of 16 rows into buffer `count` modulo UNITS, a constant once unrolled.
  __device__ __forceinline__ void stage(int count, const u32 (&r)[8]) const {
    if (leader) tma_store_wait_read<UNITS - 1>();  // its last store is read out
    __syncwarp();
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      u32 to;  // volatile: worked out here, not kept in a register throughout
      asm volatile("xor.b32 %0, %1, %2;" : "=r"(to) : "r"(at), "r"(q * 32));
      stmatrix(to + count % UNITS * OUT_BYTES, r[4 * q], r[4 * q + 1], r[4 * q + 2], r[4 * q + 3]);
    }
  }

  template <bool kStream>
  __device__ __forceinline__ void send(int count, const TensorMap* map, int row, int col) const {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    // The leader is lane 0, whose row is the buffer's first.
    if (leader) tma_store<kStream>(map, at + count % UNITS * OUT_BYTES, col, row);
  }

  // A store is sent off only when the next one's values are there: what was staged has arrived by
  // then. The gate and up projection are not read again soon.
  template <int kRows, int kAccs>
  __device__ __forceinline__ void finish(float (&acc)[kAccs][BN / 2], int row, Tile tile) const {
    const int col = tile.n * HALF;
#pragma unroll
    for (int i = 0; i < kRows * UNITS; ++i) {
      const int q = i / kRows, mi = i % kRows;
      const int here = row + mi * 64, at_col = col + q * 32;
      const int before = row + (i - 1) % kRows * 64, before_col = col + (i - 1) / kRows * 32;
      float *g = acc[mi] + q * 16, *u = acc[mi] + BN / 4 + q * 16;
      if (GATE_BIAS) add_bias(g, gate_pairs, q);
      if (UP_BIAS) add_bias(u, up_pairs, q);
      u32 r[8];
#if SAVE
#pragma unroll
      for (int k = 0; k < 8; ++k) r[k] = pack(g[2 * k], g[2 * k + 1]);
      if (i > 0) send<false>(3 * i - 1, h_map, before, before_col);
      stage(3 * i, r);
#pragma unroll
      for (int k = 0; k < 8; ++k) r[k] = pack(u[2 * k], u[2 * k + 1]);
      send<true>(3 * i, gate_map, here, at_col);
      stage(3 * i + 1, r);
#pragma unroll
      for (int k = 0; k < 8; ++k)
        r[k] = pack(act(g[2 * k]) * u[2 * k], act(g[2 * k + 1]) * u[2 * k + 1]);
      send<true>(3 * i + 1, up_map, here, at_col);
      stage(3 * i + 2, r);
#else
#pragma unroll
      for (int k = 0; k < 8; ++k)
        r[k] = pack(act(g[2 * k]) * u[2 * k], act(g[2 * k + 1]) * u[2 * k + 1]);
      if (i > 0) send<false>(i - 1, h_map, before, before_col);
      stage(i, r);
#endif
    }
    send<false>(kRows * UNITS * (1 + 2 * SAVE) - 1, h_map, row + (kRows - 1) * 64,
                col + HALF - 32);
  }

  __device__ __forceinline__ void end() const {
    if (leader) tma_store_wait_all();
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
gated_forward(const __grid_constant__ TensorMap a_map,
              const __grid_constant__ TensorMap gate_weight_map,
              const __grid_constant__ TensorMap up_weight_map,
              const __grid_constant__ TensorMap h_map, const __grid_constant__ TensorMap gate_map,
              const __grid_constant__ TensorMap up_map,
              const unsigned short* __restrict__ gate_bias,
              const unsigned short* __restrict__ up_bias, int columns, int tiles_m, int tiles_n,
              int k_tiles) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = smem_addr(smem), full = base + BAR_OFFSET;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int thread = threadIdx.x % 128;
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    prefetch_map(&a_map);
    prefetch_map(&gate_weight_map);
    prefetch_map(&up_weight_map);
    prefetch_map(&h_map);
  }
  init_pipeline(full);
  const Work work(tiles_m, tiles_n, k_tiles);

  // A launch of 384 threads gets 168 registers each; 40 + 2 * 232 = 3 * 168 shares them out anew. A
  // larger sum would wait for ever.
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (thread == 0) {
      produce(work, base, full, rank, [&](u32 a_dst, u32 bar, int row, Tile tile, int kt) {
        const u32 b_dst = a_dst + A_BYTES;
        tma_load<1>(a_dst, &a_map, bar, kt * BK, row);
        if (CLUSTER == 1 || rank == 0)
          tma_load<CLUSTER>(b_dst, &gate_weight_map, bar, kt * BK, tile.n * HALF);
        if (CLUSTER == 1 || rank == 1)
          tma_load<CLUSTER>(b_dst + HALF * BK * 2, &up_weight_map, bar, kt * BK, tile.n * HALF);
      });
      let_next_start();  // begun with the first block, it measured slower
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int consumer = warpgroup - 1;
    const u32 lane = thread & 31;
    // Rows of 64 bytes, their 16-byte pieces permuted as the 64-byte swizzle of TMA has it
    const u32 row = lane & 15, piece = (lane >> 4) ^ ((row >> 1) & 3);
    Epilogue epilogue{base + OUT_OFFSET + (consumer * 4 + thread / 32) * UNITS * OUT_BYTES +
                          row * 64 + piece * 16,
                      lane == 0, &h_map, &gate_map, &up_map, gate_bias, up_bias, columns};
    consume(work, base, full, rank, consumer, thread, epilogue);
  }
  __syncwarp();
  if constexpr (CLUSTER > 1) cluster_sync();  // no block leaves while a peer may still write to it
}
