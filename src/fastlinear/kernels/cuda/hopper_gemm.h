// What GEMMs for Hopper (sm_90a) share: PTX wrappers, the pipeline that TMA fills and wgmma empties,
// the order of tiles. A block is a producer warpgroup and two consumers.
//
// Macros from the host: BM BN STAGES CLUSTER PINGPONG GROUP_M A_MN B_MN IS_BF16, and the generated
// functions wgmma(acc, desc_a, desc_b) for m64 x BN x k16, and wgmma_first, which does not add to acc
// but overwrites it.
//   CLUSTER: blocks along M that share one B tile.
//   PINGPONG 1: each consumer owns whole BM x BN tiles, alternately; 0: both share one, BM/2 rows each.
//   A_MN / B_MN 1: the operand's M (N) dimension is the contiguous one in memory.

constexpr int BK = 64;                             // one 128-byte swizzle row of 16-bit elements
constexpr int WG_M = PINGPONG ? BM : BM / 2;       // rows of one consumer's accumulator
constexpr int MMA_M = WG_M / 64;                   // wgmma instructions along M
constexpr int A_BYTES = BM * BK * 2;
constexpr int B_BYTES = BN * BK * 2;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;

static_assert(BM % (PINGPONG ? 64 : 128) == 0, "BM");

struct alignas(64) TensorMap { char bytes[128]; };

// ---------------------------------------------------------------- PTX wrappers

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

// ---------------------------------------------------------------- products
// acc[mi][4j + 2h + e] is at row mi*64 + warp*16 + h*8 + lane/4, column 8j + 2*(lane%4) + e.

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
