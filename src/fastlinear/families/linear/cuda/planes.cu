// Products of float32 by tensor cores of float16, as accurate as float32 itself, on Hopper (sm_90a).
//
//   C[m, n] = sum_k A[m, k] * B[n, k];   pre = C + bias;   Y = act(pre)
//
// Both operands come as two planes of float16 (planes_split.cu): A = 2^e_m (h + l / 2^11), B alike.
//
//   C = 2^(e_m + e_n) (sum h h + (sum h l + sum l h) / 2^11);  l l is below what float32 keeps.
//
// Tensor cores truncate while they add, so sums over BK numbers are promoted: added up in registers, in
// float32. A block is a producer warpgroup and two consumers, of which each has half a tile's rows.
// They issue products by turns (TURNS), so that one promotes while the other multiplies.
// CLUSTER blocks along M share one B tile: each loads 1/CLUSTER of it and multicasts it.
//
// Lines that have no planes (UNSPLIT in place of e): a warp whose rows or columns have one multiplies
// and adds the numbers themselves.
//
// Slices share K out: their sums go to `parts`, and planes_sums adds them in order and finishes them.
// Every sum is added in one order: results are deterministic.
//
// hopper_words.h, activations/cuda.h and hopper_async.h come before this file. Macros from the host: BM
// (128) BN STAGES CLUSTER GROUP_M A_MN B_MN TURNS SAVE HAS_BIAS ACT, IS_BF16 0, and the functions wgmma
// and wgmma_first for accumulators of BN / 2.
//   A_MN / B_MN 1: the operand's M (N) dimension is the contiguous one in memory.
//   SAVE 1: `pre` is written beside Y.

constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2;  // of a plane
constexpr int STAGE_BYTES = 2 * (A_BYTES + B_BYTES);
constexpr int BAR_OFFSET = STAGES * STAGE_BYTES;
constexpr int B_PART = (B_MN ? BK : BN) / CLUSTER;  // rows this block loads of B, or of its K
constexpr int UNSPLIT = 0x7fff;
constexpr u64 A_K_STEP = (A_MN ? 16 * 128 : 32) >> 4;
constexpr u64 B_K_STEP = (B_MN ? 16 * 128 : 32) >> 4;

static_assert(BM == 128 && BN % 64 == 0 && B_PART % 8 == 0, "BM, BN");

struct Params {
  TensorMap a[2], b[2];                    // planes, high first
  const short *a_exponents, *b_exponents;  // (M), (N)
  const float *a_plain, *b_plain;          // the numbers themselves
  const float* bias;                       // (N) or null
  float *y, *pre;                          // (M, N) dense
  float* parts;                            // (slices, M, N), where there are several
  long long a_strides[2], b_strides[2];    // of the numbers: along M (N), along K
  int M, N, K, slices, slice_tiles;        // slice_tiles: k-tiles of a slice
  int tiles_m, tiles_n;                    // of CLUSTER * BM rows, of BN columns
};

struct Tile { int m, n, slice; };

// Columns of GROUP_M row-tiles, so that one wave of blocks reads a compact patch of A and B.
__device__ __forceinline__ Tile tile_at(const Params& p, int t) {
  const int each = p.tiles_m * p.tiles_n, slice = t / each;
  t -= slice * each;
  const int per_group = GROUP_M * p.tiles_n;
  const int group = t / per_group;
  const int rest = t - group * per_group;
  const int rows = min(GROUP_M, p.tiles_m - group * GROUP_M);
  return {group * GROUP_M + rest % rows, rest / rows, slice};
}

__device__ __forceinline__ int k_tiles_of(const Params& p, int slice) {
  return min(p.slice_tiles, (p.K + BK - 1) / BK - slice * p.slice_tiles);
}

// ---------------------------------------------------------------- loads

__device__ __forceinline__ void load_a(const TensorMap* map, u32 to, u32 bar, int row, int k) {
  if constexpr (A_MN) {
#pragma unroll
    for (int i = 0; i < BM / 64; ++i) tma_load<1>(to + i * (BK * 128), map, bar, row + i * 64, k);
  } else {
    tma_load<1>(to, map, bar, k, row);
  }
}

__device__ __forceinline__ void load_b(const TensorMap* map, u32 to, u32 bar, int column, int k,
                                       u32 rank) {
  to += rank * (B_PART * 128);
  if constexpr (B_MN) {
#pragma unroll
    for (int i = 0; i < BN / 64; ++i)
      tma_load<CLUSTER>(to + i * (BK * 128), map, bar, column + i * 64, k + rank * B_PART);
  } else {
    tma_load<CLUSTER>(to, map, bar, k, column + rank * B_PART);
  }
}

__device__ __forceinline__ void produce(const Params& p, u32 base, u32 rank, int first, int step,
                                        int tiles) {
  int stage = 0;
  u32 phase = 1;  // a fresh barrier counts as "previous phase done"
  for (int t = first; t < tiles; t += step) {
    const Tile tile = tile_at(p, t);
    const int row = (tile.m * CLUSTER + rank) * BM, column = tile.n * BN;
    const int begin = tile.slice * p.slice_tiles, count = k_tiles_of(p, tile.slice);
    for (int kt = begin; kt < begin + count; ++kt) {
      const u32 full = base + BAR_OFFSET + stage * 8, to = base + stage * STAGE_BYTES;
      mbar_wait(full + STAGES * 8, phase);
      mbar_expect(full, STAGE_BYTES);
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        load_a(&p.a[plane], to + plane * A_BYTES, full, row, kt * BK);
        load_b(&p.b[plane], to + 2 * A_BYTES + plane * B_BYTES, full, column, kt * BK, rank);
      }
      if (++stage == STAGES) { stage = 0; phase ^= 1; }
    }
  }
}

// ---------------------------------------------------------------- products
// acc[4j + 2h + e] is at row warp*16 + h*8 + lane/4, column 8j + 2*(lane%4) + e of a consumer's.

__device__ __forceinline__ void begin_turn(int consumer) {
  if (TURNS) bar_sync(1 + consumer, 256);
}

__device__ __forceinline__ void end_turn(int consumer) {
  if (TURNS) bar_arrive(1 + (consumer ^ 1), 256);
}

template <bool kFirst>
__device__ __forceinline__ void multiply(float (&acc)[BN / 2], u64 a, u64 b) {
#pragma unroll
  for (int k = 0; k < BK / 16; ++k) {
    if (kFirst && k == 0) wgmma_first(acc, a, b);
    else wgmma(acc, a + k * A_K_STEP, b + k * B_K_STEP);
  }
}

template <bool kFirst>
__device__ __forceinline__ void promote_low(float (&sum)[BN / 2], const float (&acc)[BN / 2]) {
#pragma unroll
  for (int i = 0; i < BN / 2; ++i)
    sum[i] = kFirst ? acc[i] * (1.0f / 2048.0f) : fmaf(acc[i], 1.0f / 2048.0f, sum[i]);
}

__device__ __forceinline__ void promote(float (&sum)[BN / 2], const float (&acc)[BN / 2]) {
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) sum[i] += acc[i];
}

struct Pipe {
  u32 base;
  int consumer, stage;
  u32 phase;

  __device__ __forceinline__ void release() const {
    const u32 empty = base + BAR_OFFSET + (STAGES + stage) * 8, lane = lane_id();
    if (CLUSTER > 1) {
      if (lane < CLUSTER) mbar_arrive_cta(empty, lane);
    } else if (lane == 0) {
      mbar_arrive(empty);
    }
  }

  // sum += the products of one k-tile. Where registers hold both, the products of high planes are under
  // way while the others are promoted.
  template <bool kFirst>
  __device__ __forceinline__ void step(float (&sum)[BN / 2]) {
    constexpr bool kBoth = BN <= 128;
    const u32 at = base + stage * STAGE_BYTES, a_at = at + consumer * (A_BYTES / 2);
    const u64 a = make_desc<A_MN>(a_at), b = make_desc<B_MN>(at + 2 * A_BYTES);
    constexpr u64 kLowA = A_BYTES >> 4, kLowB = B_BYTES >> 4;
    float acc[BN / 2];
    mbar_wait(base + BAR_OFFSET + stage * 8, phase);
    begin_turn(consumer);
    wgmma_fence();
    multiply<true>(acc, a, b + kLowB);
    multiply<false>(acc, a + kLowA, b);
    wgmma_commit();
    if constexpr (kBoth) {
      float high[BN / 2];
      multiply<true>(high, a, b);
      wgmma_commit();
      end_turn(consumer);
      wgmma_wait<1>();
      promote_low<kFirst>(sum, acc);
      wgmma_wait<0>();
      release();
      promote(sum, high);
    } else {
      end_turn(consumer);
      wgmma_wait<0>();
      promote_low<kFirst>(sum, acc);
      begin_turn(consumer);
      wgmma_fence();
      multiply<true>(acc, a, b);
      wgmma_commit();
      end_turn(consumer);
      wgmma_wait<0>();
      release();
      promote(sum, acc);
    }
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
};

// ---------------------------------------------------------------- results

// v * 2^e: in two steps, of which neither leaves the range where the result does not.
__device__ __forceinline__ float scaled(float v, int e) {
  const int half = e >> 1;
  return v * __uint_as_float(static_cast<u32>(127 + half) << 23) *
         __uint_as_float(static_cast<u32>(127 + e - half) << 23);
}

__device__ __forceinline__ void store(float* to, long long at, float low, float high, int left) {
  to += at;
  if (left > 1 && (reinterpret_cast<u64>(to) & 7) == 0) {
    *reinterpret_cast<float2*>(to) = {low, high};
  } else {
    to[0] = low;
    if (left > 1) to[1] = high;
  }
}

// A warp's 16 rows of a tile, from `row` on.
struct Results {
  const Params& p;
  int row, column, slice;
  u32 lane;

  // Whether a row or column has no planes.
  __device__ __forceinline__ bool unsplit() const {
    bool found = lane < 16 && row + static_cast<int>(lane) < p.M && p.a_exponents[row + lane] == UNSPLIT;
#pragma unroll
    for (int i = 0; i < BN / 32; ++i) {
      const int n = column + i * 32 + lane;
      found |= n < p.N && p.b_exponents[n] == UNSPLIT;
    }
    return __any_sync(0xffffffffu, found);
  }

  // sum = the numbers' own products.
  __device__ __forceinline__ void multiply_plain(float (&sum)[BN / 2]) const {
    const int begin = slice * p.slice_tiles * BK, end = min(begin + p.slice_tiles * BK, p.K);
    const int r = row + (lane >> 2), c = column + 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) sum[i] = 0.0f;
#pragma unroll 1
    for (int k = begin; k < end; ++k) {
      float a[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        a[h] = p.a_plain[min(r + 8 * h, p.M - 1) * p.a_strides[0] + k * p.a_strides[1]];
#pragma unroll
      for (int i = 0; i < BN / 4; ++i) {
        const int n = min(c + 8 * (i >> 1) + (i & 1), p.N - 1);
        const float b = p.b_plain[n * p.b_strides[0] + k * p.b_strides[1]];
        const int at = 4 * (i >> 1) + (i & 1);
        sum[at] = fmaf(a[0], b, sum[at]);
        sum[at + 2] = fmaf(a[1], b, sum[at + 2]);
      }
    }
  }

  __device__ __forceinline__ void finish(float (&sum)[BN / 2], bool plain) const {
    const int r = row + (lane >> 2), c = column + 2 * (lane & 3);
    int of_row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) of_row[h] = plain || r + 8 * h >= p.M ? 0 : p.a_exponents[r + 8 * h];
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
      const int n = c + 8 * j, left = p.N - n;
      if (left <= 0) break;
      const int e = plain ? 0 : p.b_exponents[n], f = plain || left < 2 ? 0 : p.b_exponents[n + 1];
      const bool biased = HAS_BIAS && p.slices == 1;
      const float low = biased ? p.bias[n] : 0.0f, high = biased && left > 1 ? p.bias[n + 1] : 0.0f;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (r + 8 * h >= p.M) continue;
        const long long at = static_cast<long long>(r + 8 * h) * p.N + n;
        float v = sum[4 * j + 2 * h], w = sum[4 * j + 2 * h + 1];
        if (!plain) v = scaled(v, of_row[h] + e), w = scaled(w, of_row[h] + f);
        if (p.slices > 1) {
          store(p.parts + slice * (static_cast<long long>(p.M) * p.N), at, v, w, left);
          continue;
        }
        if (HAS_BIAS) v += low, w += high;
        if (SAVE) store(p.pre, at, v, w, left);
        store(p.y, at, act(v), act(w), left);
      }
    }
  }
};

// ---------------------------------------------------------------- the kernel

extern "C" __global__ void __launch_bounds__(384, 1) planes_product(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = smem_addr(smem);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbar_init(base + BAR_OFFSET + s * 8, 1);
      mbar_init(base + BAR_OFFSET + (STAGES + s) * 8, 8 * CLUSTER);
    }
    fence_barriers();
  }
  if constexpr (CLUSTER > 1) cluster_sync(); else __syncthreads();
  wait_for_previous();
  let_next_start();

  const int tiles = p.tiles_m * p.tiles_n * p.slices;
  const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  if (warpgroup == 0) {
    fewer_registers<40>();
    if (threadIdx.x == 0) produce(p, base, rank, first, step, tiles);
  } else {
    more_registers<232>();
    const int consumer = warpgroup - 1, warp = threadIdx.x % 128 / 32;
    if (TURNS && consumer == 1) bar_arrive(1, 256);  // consumer 0 starts
    Pipe pipe{base, consumer, 0, 0};
    for (int t = first; t < tiles; t += step) {
      const Tile tile = tile_at(p, t);
      const int row = (tile.m * CLUSTER + rank) * BM + consumer * (BM / 2) + warp * 16;
      const Results results{p, row, tile.n * BN, tile.slice, lane_id()};
      const bool plain = results.unsplit();
      float sum[BN / 2];
      pipe.step<true>(sum);
      for (int kt = k_tiles_of(p, tile.slice); kt > 1; --kt) pipe.step<false>(sum);
      if (plain) results.multiply_plain(sum);
      results.finish(sum, plain);
    }
  }
  __syncwarp();
  if constexpr (CLUSTER > 1) cluster_sync();  // no block leaves while a peer may still write to it
}

// The slices' sums, added up in their order and finished.
extern "C" __global__ void __launch_bounds__(256) planes_sums(const __grid_constant__ Params p) {
  wait_for_previous();
  let_next_start();
  const long long all = static_cast<long long>(p.M) * p.N;
  const long long at = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= all) return;
  float v = 0.0f;
#pragma unroll 4
  for (int i = 0; i < p.slices; ++i) v += p.parts[i * all + at];
  if (HAS_BIAS) v += p.bias[at % p.N];
  if (SAVE) p.pre[at] = v;
  p.y[at] = act(v);
}
