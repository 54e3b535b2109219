// The gradients of all weights and biases of a chain in one launch for Hopper (sm_90a), and a second
// one that adds up what blocks of different rows have found.
//
//   dW (N, K) = dpreᵀ (N, M) h (M, K),  db (N) = dpreᵀ ones
//
// A block computes 128 x 256 of one dW, or fewer columns, over a slice of the rows. One thread brings 64 rows at a time
// by TMA, two warpgroups multiply, 64 rows of dW each. Sums of slices are float32 and added up in their
// order: results are deterministic.
//
// hopper_words.h, activations/cuda.h and hopper_async.h come before this file. Macros from the host:
// IS_BF16 STAGES MAX_LAYERS, and the functions wgmma and wgmma_first for accumulators of 4 (ones),
// 32, 64, 96 and 128.

constexpr int BLOCK_BYTES = 64 * 128;  // 64 rows of 64 numbers, swizzled
constexpr int TILE_N = 2, TILE_K = 4;  // blocks of 64 columns
constexpr int SLOT_BYTES = (TILE_N + TILE_K) * BLOCK_BYTES;
constexpr int ONES_OFFSET = STAGES * SLOT_BYTES;
constexpr int BAR_OFFSET = ONES_OFFSET + 1024;
constexpr int THREADS = 384;

struct Params {
  TensorMap dpre[MAX_LAYERS];            // (rows, n) in boxes of 64 x 64
  TensorMap input[MAX_LAYERS];           // (rows, k)
  unsigned short* weight[MAX_LAYERS];    // (n, k), dense; null: unwanted
  unsigned short* bias[MAX_LAYERS];      // (n,)
  float* parts;                          // of layers with several slices: slice by slice dW, db
  long long parts_at[MAX_LAYERS];
  int rows, layers;
  int n[MAX_LAYERS], k[MAX_LAYERS];
  int tile[MAX_LAYERS];                  // blocks of 64 columns of a tile, at most TILE_K
  int slices[MAX_LAYERS], slice_rows[MAX_LAYERS];  // rows: a multiple of 64
  int first[MAX_LAYERS + 1];             // a layer's first block
};

__device__ __forceinline__ int blocks_of(int n) { return (n + 63) / 64; }

// What a block computes.
struct Item {
  int layer, n, k, blocks;        // where its tile begins, blocks of columns it has
  int slice, first_row, steps;    // which rows of the products, 64 at a time

  __device__ __forceinline__ explicit Item(const Params& p) {
    layer = 0;
    while (static_cast<int>(blockIdx.x) >= p.first[layer + 1]) ++layer;
    const int at = blockIdx.x - p.first[layer], slices = p.slices[layer];
    const int columns = blocks_of(p.k[layer]), each = p.tile[layer];
    const int tiles_k = (columns + each - 1) / each, tile = at / slices;
    slice = at - tile * slices;
    n = tile / tiles_k * (TILE_N * 64);
    k = tile % tiles_k * (each * 64);
    blocks = min(each, columns - k / 64);
    first_row = slice * p.slice_rows[layer];
    steps = blocks_of(min(p.slice_rows[layer], p.rows - first_row));
  }
};

// Two neighbouring sums at (row, column) of dW.
__device__ __forceinline__ void write(const Params& p, const Item& t, int row, int column, float low,
                                      float high) {
  const int n = p.n[t.layer], k = p.k[t.layer];
  if (row >= n || column >= k) return;
  const long long at = static_cast<long long>(row) * k + column;
  if (p.slices[t.layer] > 1) {
    const long long whole = static_cast<long long>(n) * k + n;
    float* const to = p.parts + p.parts_at[t.layer] + t.slice * whole + at;
    to[0] = low;
    if (column + 1 < k) to[1] = high;
  } else if (p.weight[t.layer] != nullptr) {
    const u32 word = pack(low, high);
    unsigned short* const to = p.weight[t.layer] + at;
    if ((k & 1) == 0) {
      *reinterpret_cast<u32*>(to) = word;
    } else {
      to[0] = static_cast<unsigned short>(word);
      if (column + 1 < k) to[1] = static_cast<unsigned short>(word >> 16);
    }
  }
}

__device__ __forceinline__ void write_bias(const Params& p, const Item& t, int row, float sum) {
  const int n = p.n[t.layer], k = p.k[t.layer];
  if (row >= n) return;
  if (p.slices[t.layer] > 1) {
    const long long whole = static_cast<long long>(n) * k + n;
    p.parts[p.parts_at[t.layer] + t.slice * whole + static_cast<long long>(n) * k + row] = sum;
  } else if (p.bias[t.layer] != nullptr) {
    p.bias[t.layer][row] = static_cast<unsigned short>(pack(sum, 0.0f));
  }
}

// One slot's products: acc (64, 64 NB) += its rows of dpreᵀ times h, sums += those times ones.
template <int NB, bool kFirst>
__device__ __forceinline__ void products(float (&acc)[32 * NB], float (&sums)[4], u32 slot, u32 ones_at,
                                         int consumer) {
  const u64 a = make_desc<true>(slot + consumer * BLOCK_BYTES);
  const u64 b = make_desc<true>(slot + TILE_N * BLOCK_BYTES), ones = make_desc<false>(ones_at);
  constexpr u64 kStep = (16 * 128) >> 4;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (kFirst && k == 0) {
      wgmma_first(acc, a, b);
      wgmma_first(sums, a, ones);
    } else {
      wgmma(acc, a + k * kStep, b + k * kStep);
      wgmma(sums, a + k * kStep, ones);
    }
  }
  wgmma_commit();
}

// A consumer's 64 rows of the tile, NB blocks of 64 columns.
template <int NB>
__device__ __forceinline__ void multiply(const Params& p, const Item& t, u32 base, int consumer,
                                         int thread) {
  float acc[32 * NB], sums[4];
  const u32 full = base + BAR_OFFSET, empty = full + STAGES * 8, ones = base + ONES_OFFSET;
  const u32 lane = lane_id();
  mbar_wait(full, 0);
  products<NB, true>(acc, sums, base, ones, consumer);
  int stage = 1, previous = 0;
  u32 phase = 0;
  for (int i = 1; i < t.steps; ++i) {
    mbar_wait(full + stage * 8, phase);
    products<NB, false>(acc, sums, base + stage * SLOT_BYTES, ones, consumer);
    wgmma_wait<1>();  // all but the slot just read
    if (lane == 0) mbar_arrive(empty + previous * 8);
    previous = stage;
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
  wgmma_wait<0>();
  const int row = t.n + consumer * 64 + thread / 32 * 16 + (lane >> 2);
#pragma unroll
  for (int j = 0; j < 8 * NB; ++j) {
    const int column = t.k + 8 * j + 2 * (lane & 3);
    write(p, t, row, column, acc[4 * j], acc[4 * j + 1]);
    write(p, t, row + 8, column, acc[4 * j + 2], acc[4 * j + 3]);
  }
  if (t.k == 0 && (lane & 3) == 0) {
    write_bias(p, t, row, sums[0]);
    write_bias(p, t, row + 8, sums[2]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
whole_mlp_row_grads(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = smem_addr(smem);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int thread = threadIdx.x % 128;
  const u32 full = base + BAR_OFFSET, empty = full + STAGES * 8;

  for (int i = threadIdx.x; i < 512; i += THREADS)
    store_shared16(base + ONES_OFFSET + 2 * i, IS_BF16 ? 0x3f80 : 0x3c00);
  fence_async();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(full + i * 8, 1);
      mbar_init(empty + i * 8, 8);  // a consumer's warps each
    }
    fence_barriers();
  }
  __syncthreads();
  wait_for_previous();
  let_next_start();

  const Item t(p);
  if (warpgroup == 0) {
    fewer_registers<40>();
    if (thread == 0) {
      int stage = 0;
      u32 phase = 1;  // a fresh barrier counts as "previous phase done"
      const TensorMap *const dpre = &p.dpre[t.layer], *const input = &p.input[t.layer];
      for (int i = 0; i < t.steps; ++i) {
        const int row = t.first_row + i * 64;
        const u32 slot = base + stage * SLOT_BYTES, bar = full + stage * 8;
        mbar_wait(empty + stage * 8, phase);
        mbar_expect(bar, (TILE_N + t.blocks) * BLOCK_BYTES);
        for (int b = 0; b < TILE_N; ++b)
          tma_load<1>(slot + b * BLOCK_BYTES, dpre, bar, t.n + b * 64, row);
        for (int b = 0; b < t.blocks; ++b)
          tma_load<1>(slot + (TILE_N + b) * BLOCK_BYTES, input, bar, t.k + b * 64, row);
        if (++stage == STAGES) { stage = 0; phase ^= 1; }
      }
    }
  } else {
    more_registers<232>();
    if (t.blocks == 1) multiply<1>(p, t, base, warpgroup - 1, thread);
    else if (t.blocks == 2) multiply<2>(p, t, base, warpgroup - 1, thread);
    else if (t.blocks == 3) multiply<3>(p, t, base, warpgroup - 1, thread);
    else multiply<4>(p, t, base, warpgroup - 1, thread);
  }
}

// Layer blockIdx.y: its slices added up.
extern "C" __global__ void __launch_bounds__(256)
whole_mlp_row_sums(const __grid_constant__ Params p) {
  wait_for_previous();
  let_next_start();
  const int layer = blockIdx.y, slices = p.slices[layer];
  const long long weights = static_cast<long long>(p.n[layer]) * p.k[layer];
  const long long whole = weights + p.n[layer];
  const long long at = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  if (slices == 1 || at >= whole) return;
  const float* from = p.parts + p.parts_at[layer] + at;
  float sum = 0.0f;
#pragma unroll 4
  for (int i = 0; i < slices; ++i, from += whole) sum += *from;
  unsigned short* const to = at < weights ? p.weight[layer] : p.bias[layer];
  if (to != nullptr)
    to[at < weights ? at : at - weights] = static_cast<unsigned short>(pack(sum, 0.0f));
}
