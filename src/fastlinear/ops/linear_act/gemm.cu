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
// Macros from the host: BM BN STAGES OUT_BUFS CLUSTER PINGPONG GROUP_M A_MN B_MN IS_BF16 HAS_BIAS
// SAVE DIRECT ACT, a number ACT_<NAME> for every activation, and the generated functions
// wgmma(acc, desc_a, desc_b) for m64 x BN x k16, and wgmma_first, which does not add to acc but
// overwrites it.
//   A_MN / B_MN 1: the operand's M (N) dimension is the contiguous one in memory.
//   SAVE 1: `pre` is written beside Y.
//   DIRECT 1: rows of Y begin anywhere, where TMA cannot store: warps write them element by element,
//             64 contiguous bytes at once, out of the staging buffers.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int BK = 64;                             // one 128-byte swizzle row of 16-bit elements
constexpr int WG_M = PINGPONG ? BM : BM / 2;       // rows of one consumer's accumulator
constexpr int MMA_M = WG_M / 64;                   // wgmma instructions along M
constexpr int A_BYTES = BM * BK * 2;
constexpr int B_BYTES = BN * BK * 2;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int OUT_BYTES = 16 * 64 * 2;             // one staging buffer; OUT_BUFS per warp
constexpr int OUT_OFFSET = STAGES * STAGE_BYTES;
constexpr int BAR_OFFSET = OUT_OFFSET + 8 * OUT_BUFS * OUT_BYTES;
constexpr int B_PART = (B_MN ? BK : BN) / CLUSTER; // rows this block loads of B, or of its K

static_assert(BM % (PINGPONG ? 64 : 128) == 0, "BM");
static_assert(BN % 64 == 0 && B_PART % 8 == 0, "BN");
static_assert(BN / 64 % OUT_BUFS == 0, "OUT_BUFS");
constexpr bool SHARED_LAST = PINGPONG && MMA_M == 2;
// The epilogue does all rows of 64 columns, whose bias it keeps in registers, before the next 64;
// where that would spill, all columns of 64 rows.
constexpr bool BY_COLUMNS = !(SAVE == 1 && ACT == ACT_RELU2) && !(DIRECT && ACT == ACT_GELU);

struct alignas(64) TensorMap { char bytes[128]; };

// ---------------------------------------------------------------- PTX wrappers

__device__ __forceinline__ u32 smem_addr(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void mbar_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

__device__ __forceinline__ void mbar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbar_arrive_cta(u32 bar, u32 cta) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar), "r"(cta)
      : "memory");
}

__device__ __forceinline__ void mbar_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void mbar_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar), "r"(parity)
      : "memory");
}

template <int kPeers>
__device__ __forceinline__ void tma_load(u32 dst, const TensorMap* map, u32 bar, int x, int y) {
  if constexpr (kPeers == 1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(dst), "l"(map), "r"(bar), "r"(x), "r"(y)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst), "l"(map), "r"(bar),
        "r"(x), "r"(y), "h"(static_cast<unsigned short>((1 << kPeers) - 1))
        : "memory");
  }
}

// kStream: the data is not read again soon, let L2 drop it first.
template <bool kStream>
__device__ __forceinline__ void tma_store(const TensorMap* map, u32 src, int x, int y) {
  if constexpr (kStream) {
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint"
        " [%0, {%2, %3}], [%1], policy;\n}" ::"l"(map), "r"(src), "r"(x), "r"(y)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(src), "r"(x), "r"(y)
        : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int kLeft>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

__device__ __forceinline__ unsigned short load_shared16(u32 at) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
  return v;
}

__device__ __forceinline__ void tma_store_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map));
}

__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Volatile: read where it is needed, not kept in a register throughout.
__device__ __forceinline__ u32 lane_id() {
  u32 lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

__device__ __forceinline__ void stmatrix(u32 addr, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 out;
#if IS_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
#endif
  return out;
}

__device__ __forceinline__ void unpack(u32 in, float& lo, float& hi) {
#if IS_BF16
  lo = __uint_as_float(in << 16);
  hi = __uint_as_float(in & 0xffff0000u);
#else
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
      : "=f"(lo), "=f"(hi)
      : "r"(in));
#endif
}

// Descriptor of a 128-byte-swizzled operand tile, 1024-byte aligned, 8-row groups 1024 bytes apart.
// K-major: a step of 16 along K is 32 bytes. MN-major: 64-wide blocks of BK rows lie BK*128 bytes
// apart (the leading offset) and a step of 16 along K is 16 rows of 128 bytes.
template <bool kMn>
__device__ __forceinline__ u64 make_desc(u32 addr) {
  constexpr u64 kLead = kMn ? (BK * 128) >> 4 : 1;
  constexpr u64 kStride = 1024 >> 4;
  return static_cast<u64>((addr & 0x3ffff) >> 4) | (kLead << 16) | (kStride << 32) | (1ull << 62);
}

constexpr u64 A_K_STEP = (A_MN ? 16 * 128 : 32) >> 4;
constexpr u64 B_K_STEP = (B_MN ? 16 * 128 : 32) >> 4;

// ---------------------------------------------------------------- activations (float32)

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (1 + exp(-scale * x)), relative error about 1e-6 in either tail.
__device__ __forceinline__ float sigmoid_scaled(float x, float scale) {
  return rcp_approx(1.0f + exp2_approx(x * (-1.4426950408889634f * scale)));
}

// Normal cumulative distribution 0.5 (1 + erf(x / sqrt 2)), absolute error below 1e-7
// (Abramowitz and Stegun 7.1.26), and bell = exp(-x^2 / 2).
__device__ __forceinline__ float normal_cdf(float x, float& bell) {
  bell = exp2_approx(-0.72134752044448170f * x * x);
  const float t = rcp_approx(fmaf(0.23164190f, fabsf(x), 1.0f));
  float poly = fmaf(1.061405429f, t, -1.453152027f);
  poly = fmaf(poly, t, 1.421413741f);
  poly = fmaf(poly, t, -0.284496736f);
  poly = fmaf(poly, t, 0.254829592f);
  const float tail = 0.5f * poly * t * bell;  // the mass beyond |x|
  return x < 0.0f ? tail : 1.0f - tail;
}

__device__ __forceinline__ float act(float x) {
  if constexpr (ACT == ACT_RELU) return x < 0.0f ? 0.0f : x;  // keeps NaN
  if constexpr (ACT == ACT_RELU2) return x < 0.0f ? 0.0f : x * x;
  if constexpr (ACT == ACT_LEAKY_RELU) return x < 0.0f ? 0.01f * x : x;
  if constexpr (ACT == ACT_SILU) return x * sigmoid_scaled(x, 1.0f);
  if constexpr (ACT == ACT_SIGMOID) return sigmoid_scaled(x, 1.0f);
  if constexpr (ACT == ACT_TANH) {
    // Near 0 the difference would cancel: there a Taylor polynomial, relative error below 1e-5.
    const float s = x * x;
    const float poly = fmaf(fmaf(fmaf(-0.053968254f, s, 0.13333333f), s, -0.33333333f), s, 1.0f);
    const float far = fmaf(2.0f, sigmoid_scaled(x, 2.0f), -1.0f);
    return s < 0.125f ? x * poly : far;
  }
  if constexpr (ACT == ACT_QUICK_GELU) return x * sigmoid_scaled(x, 1.702f);
  if constexpr (ACT == ACT_GELU) {
    float bell;
    return x * normal_cdf(x, bell);
  }
  if constexpr (ACT == ACT_GELU_TANH) {
    // 0.5 x (1 + tanh u) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3); the constants
    // carry -2 log2(e). Not tanh.approx: its error of 5e-4 swallows the small negative values.
    const float power = x * fmaf(-0.10294324f, x * x, -2.3022082f);
    return x * rcp_approx(1.0f + exp2_approx(power));
  }
  return x;
}

// ---------------------------------------------------------------- accumulators
// acc[mi][4j + 2h + e] is at row mi*64 + warp*16 + h*8 + lane/4, column 8j + 2*(lane%4) + e.

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

// Half a consumer's accumulators to and from shared memory, 16 bytes of each thread side by side.
__device__ __forceinline__ void give(u32 to, const float (&acc)[BN / 2]) {
#pragma unroll
  for (int i = 0; i < BN / 8; ++i)
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 2048), "f"(acc[4 * i]),
                 "f"(acc[4 * i + 1]), "f"(acc[4 * i + 2]), "f"(acc[4 * i + 3])
                 : "memory");
}

__device__ __forceinline__ void take(u32 from, float (&acc)[BN / 2]) {
#pragma unroll
  for (int i = 0; i < BN / 8; ++i)
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(acc[4 * i]), "=f"(acc[4 * i + 1]), "=f"(acc[4 * i + 2]),
                   "=f"(acc[4 * i + 3])
                 : "r"(from + i * 2048)
                 : "memory");
}

// ---------------------------------------------------------------- products

// One k-tile's products. kFirst: they overwrite the accumulators. That says that the old values are
// dead, so the epilogue before may use their registers: without, it has two elements under way.
template <bool kFirst>
__device__ __forceinline__ void products(float (&acc)[MMA_M][BN / 2], u32 a_src, u32 b_src) {
  const u64 a_desc = make_desc<A_MN>(a_src);
  const u64 b_desc = make_desc<B_MN>(b_src);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BK / 16; ++k) {
#pragma unroll
    for (int mi = 0; mi < MMA_M; ++mi) {
      // 64 rows further down A: 8192 bytes in either layout
      const u64 a = a_desc + k * A_K_STEP + mi * (8192 >> 4), b = b_desc + k * B_K_STEP;
      if (kFirst && k == 0) wgmma_first(acc[mi], a, b); else wgmma(acc[mi], a, b);
    }
  }
  wgmma_commit();
}

// A consumer's way through the pipeline.
struct Pipe {
  u32 a, b;         // where its rows of A, and B, lie in the first stage
  u32 full, empty;  // the first stage's barriers
  u32 lane;
  int stage, previous;
  u32 phase;

  // The k-tile's reads are done: lets the blocks that fill this stage know.
  __device__ __forceinline__ void release(int which) const {
    if (CLUSTER > 1) {
      if (lane < CLUSTER) mbar_arrive_cta(empty + which * 8, lane);
    } else if (lane == 0) {
      mbar_arrive(empty + which * 8);
    }
  }

  template <bool kFirst>
  __device__ __forceinline__ void step(float (&acc)[MMA_M][BN / 2]) {
    mbar_wait(full + stage * 8, phase);
    products<kFirst>(acc, a + stage * STAGE_BYTES, b + stage * STAGE_BYTES);
    if (!kFirst) {
      wgmma_wait<1>();  // all but the step just issued
      release(previous);
    }
    previous = stage;
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }

  // Issues all k-tiles of one tile; the last, in stage `previous`, may still be under way.
  __device__ __forceinline__ void run(float (&acc)[MMA_M][BN / 2], int k_tiles) {
    step<true>(acc);
    for (int kt = 1; kt < k_tiles; ++kt) step<false>(acc);
  }
};

// ---------------------------------------------------------------- tile order

struct Tile { int m, n; };  // in units of BM * CLUSTER rows and BN columns

// Columns of GROUP_M row-tiles, so that one wave of blocks reads a compact patch of A and B.
__device__ __forceinline__ Tile tile_at(int t, int tiles_m, int tiles_n) {
  const int per_group = GROUP_M * tiles_n;
  const int group = t / per_group;
  const int rest = t - group * per_group;
  const int rows = min(GROUP_M, tiles_m - group * GROUP_M);
  return {group * GROUP_M + rest % rows, rest / rows};
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
