// Instructions that weight_stationary.cu and wide_backward.cu add to those of hopper_gemm.h, which stands before.
// Macros from the host: CHANNELS 1: tokens of a feature lie side by side, else features of a token.
// K N, of a group. Where one is no multiple of 8 a group's rows need not begin at 16 bytes, as boxes of
// the copy engine must: they come and go BY_WORDS.

// Boxes of 64 features of one group for BK tokens, at (first feature, group, first token): what lies
// beyond the group's features or the last token comes as zeros and does not go out.
template <int kPeers>
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 bar, int feature,
                                         int group, int token) {
  if constexpr (kPeers == 1) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to), "l"(map), "r"(bar), "r"(feature), "r"(group),
        "r"(token)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to), "l"(map), "r"(bar),
        "r"(feature), "r"(group), "r"(token), "h"(static_cast<unsigned short>((1 << kPeers) - 1))
        : "memory");
  }
}

__device__ __forceinline__ void store_box(const TensorMap* map, u32 from, int feature, int group,
                                          int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(from), "r"(feature), "r"(group), "r"(token)
      : "memory");
}

// A group of stores that has none, where these are counted.
__device__ __forceinline__ void commit_no_store() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// The same of tokens, whose maps begin with tokens where these lie side by side. A plane is a group, or
// with CHANNELS a group of one sequence.
template <int kPeers>
__device__ __forceinline__ void load_tokens(u32 to, const TensorMap* map, u32 bar, int feature,
                                            int plane, int token) {
  load_box<kPeers>(to, map, bar, CHANNELS ? token : feature, plane, CHANNELS ? feature : token);
}

__device__ __forceinline__ void store_tokens(const TensorMap* map, u32 from, int feature, int plane,
                                             int token) {
  store_box(map, from, CHANNELS ? token : feature, plane, CHANNELS ? feature : token);
}

// Where the tile-th tile of a group's tokens lies; with CHANNELS a sequence has `each` of them.
struct Where {
  int plane, token;

  __device__ __forceinline__ Where(int tile, int group, int groups, int each) {
    const int sequence = CHANNELS ? tile / each : 0;
    plane = sequence * groups + group;
    token = (tile - sequence * each) * BK;
  }
};

// ---------------------------------------------------------------- rows by words

// Of a tensor of F features a group; words that a copy moves, and lanes that a row of a box takes.
template <int F> constexpr bool BY_WORDS = !CHANNELS && F % 8 != 0;
template <int F> constexpr int WORDS = F % 4 == 0 ? 2 : 1;

static_assert(K % 2 == 0 && N % 2 == 0, "words");

// A tensor of tokens: how many numbers from one to the next, and from a group to the next.
struct Strided {
  char* begin;
  int row, plane;

  __device__ __forceinline__ char* at(int plane_, int token) const {
    return begin + (static_cast<long long>(plane_) * plane + static_cast<long long>(token) * row) * 2;
  }
};

// Where the word-th of a box's row is.
__device__ __forceinline__ u32 word_at(u32 box, int row, int word) {
  return box + row * 128 + ((word / 4 ^ row % 8) * 16 + word % 4 * 4);
}

// Eight rows of a box, of which a warp moves V words of a lane at a time: where this lane's of the first
// row are, and of the i-th turn.
template <int V>
__device__ __forceinline__ u32 lane_word(u32 eight, int lane) {
  return word_at(eight, lane / (32 / V), lane % (32 / V) * V);
}
template <int V>
__device__ __forceinline__ u32 turn_word(u32 mine, int i) { return (mine ^ i * V * 16) + i * V * 128; }

template <int V>
__device__ __forceinline__ void copy_words(u32 to, const char* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(4 * V), "r"(bytes)
               : "memory");
}

// Asks for eight rows of a box of a tensor of F features a group, by one warp: they begin `from` on and are
// `apart` bytes from one to the next. Zeros from row `rows` on, and beyond `own` columns.
template <int F>
__device__ __forceinline__ void copy_rows(u32 eight, const char* from, int apart, int rows, int own,
                                          int lane) {
  constexpr int V = WORDS<F>, LANES = 32 / V;
  const bool mine = lane % LANES * (2 * V) < own;
  const u32 to = lane_word<V>(eight, lane);
  const char* begin = from;
  if (mine) begin += static_cast<long long>(lane / LANES) * apart + lane % LANES * (4 * V);
  const int bytes = mine ? 4 * V : 0;
  if (rows >= 8) {
#pragma unroll
    for (int i = 0; i < 8 / V; ++i, begin += mine ? V * apart : 0)
      copy_words<V>(turn_word<V>(to, i), begin, bytes);
  } else {
#pragma unroll
    for (int i = 0; i < 8 / V; ++i) {
      const bool there = i * V + lane / LANES < rows;
      copy_words<V>(turn_word<V>(to, i), there ? begin : from, there ? bytes : 0);
      begin += mine ? V * apart : 0;
    }
  }
}

// The barrier, which counts every lane, is told when what the lane has asked for is there.
__device__ __forceinline__ void arrive_with_rows(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void commit_rows() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last kLeft groups of what a lane has asked for are there.
template <int kLeft>
__device__ __forceinline__ void wait_rows() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Eight rows of a box go to where they belong, `to` on, by one warp: the first `rows` of them, `own` columns.
template <int F>
__device__ __forceinline__ void put_rows(char* to, int apart, u32 eight, int rows, int own, int lane) {
  constexpr int V = WORDS<F>, LANES = 32 / V;
  if (lane % LANES * (2 * V) >= own) return;
  const u32 from = lane_word<V>(eight, lane);
  char* out = to + static_cast<long long>(lane / LANES) * apart + lane % LANES * (4 * V);
#pragma unroll
  for (int i = 0; i < 8 / V; ++i, out += V * apart) {
    u32 v[2];
    if constexpr (V == 2)
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(v[0]), "=r"(v[1])
                   : "r"(turn_word<V>(from, i))
                   : "memory");
    else
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v[0]) : "r"(turn_word<V>(from, i)) : "memory");
    if (i * V + lane / LANES >= rows) continue;
    if constexpr (V == 2)
      *reinterpret_cast<uint2*>(out) = make_uint2(v[0], v[1]);
    else
      *reinterpret_cast<u32*>(out) = v[0];
  }
}

// Four matrices of 8 x 8, turned: lanes 8i to 8i + 7 have the addresses of the i-th's columns.
__device__ __forceinline__ void store_turned(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Whether a phase of a barrier is over.
__device__ __forceinline__ bool mbar_test(u32 bar, u32 parity) {
  u32 over;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(over)
      : "r"(bar), "r"(parity)
      : "memory");
  return over;
}

__device__ __forceinline__ void load_pair(float (&v)[2], u32 at) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(at) : "memory");
}

__device__ __forceinline__ void store_float(u32 at, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}

// The same place in the shared memory of a block of the cluster.
__device__ __forceinline__ void store_float_cta(u32 at, u32 cta, float v) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.f32 [there], %2;\n}" ::"r"(at),
      "r"(cta), "f"(v)
      : "memory");
}

// Copies what lies at an address to the same of another block, and tells the barrier there.
__device__ __forceinline__ void send_to_cta(u32 at, u32 bytes, u32 bar, u32 cta) {
  asm volatile(
      "{\n.reg .b32 there, told;\nmapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 told, %2, %3;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
      " [there], [%0], %1, [told];\n}" ::"r"(at),
      "r"(bytes), "r"(bar), "r"(cta)
      : "memory");
}

// What threads wrote to shared memory is seen by the copy engine and by wgmma.
__device__ __forceinline__ void publish() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Registers of each thread of 384 at launch; what some leave others can take.
constexpr int LAUNCHED = 168;

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Volatile: worked out where it is needed, not kept in a register throughout.
__device__ __forceinline__ u32 block_id() {
  u32 block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// acc (64, 64) += A (64, 16) B (64, 16)^T; kFirst: acc = A B^T. A is in registers as mma.sync has it.
// With CHANNELS B's 64 rows are the contiguous dimension.
#define OLD(i) "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3])
#define NEW(i) "=f"(acc[i]), "=f"(acc[i + 1]), "=f"(acc[i + 2]), "=f"(acc[i + 3])
#define WGMMA_64(type, add, OUT, operands, ...)                                                    \
  asm volatile(                                                                                    \
      "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\n"                                             \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {%0, %1, %2, %3, %4, %5, %6, " \
      "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "    \
      "%25, %26, %27, %28, %29, %30, %31}, " operands ";\n}"                                       \
      : OUT(0), OUT(4), OUT(8), OUT(12), OUT(16), OUT(20), OUT(24), OUT(28)                        \
      : __VA_ARGS__)
#if IS_BF16
#define WGMMA_TYPE "bf16"
#else
#define WGMMA_TYPE "f16"
#endif
#if CHANNELS
#define TURNED_B "1"
#else
#define TURNED_B "0"
#endif
#define HELD_A "{%32, %33, %34, %35}, %36, p, 1, 1, " TURNED_B
#define TURNED_A "%32, %33, p, 1, 1, 1, " TURNED_B

template <bool kFirst>
__device__ __forceinline__ void wgmma_held(float (&acc)[32], const u32 (&a)[4], u64 b) {
  if constexpr (kFirst)
    WGMMA_64(WGMMA_TYPE, "0", NEW, HELD_A, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else
    WGMMA_64(WGMMA_TYPE, "1", OLD, HELD_A, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The same with A in shared memory, its 64 rows the contiguous dimension.
template <bool kFirst>
__device__ __forceinline__ void wgmma_turned(float (&acc)[32], u64 a, u64 b) {
  if constexpr (kFirst)
    WGMMA_64(WGMMA_TYPE, "0", NEW, TURNED_A, "l"(a), "l"(b));
  else
    WGMMA_64(WGMMA_TYPE, "1", OLD, TURNED_A, "l"(a), "l"(b));
}
