// How tiles of 16-bit products for Hopper (sm_90a) leave: bias, activation, and each warp's way from its
// accumulators through shared memory. Behind hopper_gemm.h and activations/cuda.h.
//
// Macros from the host:
//   OUT_BUFS: staging buffers of a warp. HAS_BIAS.
//   SAVE 1: `pre` is written beside Y.
//   DIRECT 1: no store is TMA's; there may be an odd number of columns.
//   BY_ROWS 1: all columns of 64 rows are done before the next 64: fewer registers, more shuffles.

constexpr int OUT_BYTES = 16 * 64 * 2;             // one staging buffer; OUT_BUFS per warp

static_assert(BN % 64 == 0, "BN");
static_assert(BN / 64 % OUT_BUFS == 0, "OUT_BUFS");
// The epilogue does all rows of 64 columns, whose bias it keeps in registers, before the next 64;
// where that would spill, all columns of 64 rows.
constexpr bool BY_COLUMNS =
    !BY_ROWS && !(SAVE == 1 && ACT == ACT_RELU2) && !(DIRECT && ACT == ACT_GELU);

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
    const u32 from = add_here(lane & 3, 4 * j);
    unpack(__shfl_sync(0xffffffffu, packed, from), out[2 * j], out[2 * j + 1]);
  }
}

// Adds it to the accumulators of 64 rows.
__device__ __forceinline__ void add_bias(float* acc, const float (&bias)[16]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) acc[i] += bias[i / 4 * 2 + i % 2];
}

// 64 columns of 64 rows, packed as Staging::stage takes them, with the activation or before it.
template <bool kAct>
__device__ __forceinline__ void convert(const float* acc, u32 (&r)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float lo = acc[2 * i], hi = acc[2 * i + 1];
    r[i] = kAct ? pack(act(lo), act(hi)) : pack(lo, hi);
  }
}

// ---------------------------------------------------------------- epilogue

// Where a lane's stmatrix row lies in the first of a warp's buffers. Rows of 128 bytes, their 16-byte
// pieces permuted as the 128-byte swizzle of TMA has it.
__device__ __forceinline__ u32 staged(u32 buffers, int warp, u32 lane) {
  const u32 piece = (lane >> 4) ^ (lane & 7);
  return buffers + warp * OUT_BUFS * OUT_BYTES + (lane & 15) * 128 + piece * 16;
}

// One warp's way to memory: 16 rows x 64 columns at a time, waiting for no other warp.
struct Staging {
  u32 at;  // where this lane's stmatrix row lies in the first of OUT_BUFS staging buffers
  bool leader;

  // Puts 64 columns of 16 rows into buffer `count` modulo OUT_BUFS, a constant once unrolled. Of 16
  // columns q, r[4q] and r[4q + 1] pack column pair 2q of rows 0-7 and 8-15, r[4q + 2] and
  // r[4q + 3] pair 2q + 1.
  __device__ __forceinline__ void stage(int count, const u32 (&r)[16]) const {
    if (!DIRECT && leader) tma_store_wait_read<OUT_BUFS - 1>();  // its last store is read out
    __syncwarp();
#pragma unroll
    for (int q = 0; q < 4; ++q)
      stmatrix(xor_here(at, q * 32) + count % OUT_BUFS * OUT_BYTES, r[4 * q], r[4 * q + 1],
               r[4 * q + 2], r[4 * q + 3]);
  }

  // Where it begins, from where this lane's stmatrix row lies.
  __device__ __forceinline__ u32 buffer(int count, u32 lane) const {
    return at - (lane & 15) * 128 - ((lane >> 4) ^ (lane & 7)) * 16 + count % OUT_BUFS * OUT_BYTES;
  }

  // Stores what was staged to (row, col).
  template <bool kStream>
  __device__ __forceinline__ void send(int count, const TensorMap* map, int row, int col) const {
    fence_async();
    __syncwarp();
    // The leader is lane 0, whose row is the buffer's first.
    if (leader) tma_store<kStream>(map, at + count % OUT_BUFS * OUT_BYTES, col, row);
  }
};

// The i-th block of 64 x 64 of the epilogue: in which 64 columns, in which 64 rows.
__device__ __forceinline__ int column(int i, int rows) {
  return BY_COLUMNS ? i / rows : i % (BN / 64);
}

__device__ __forceinline__ int block_row(int i, int rows) {
  return BY_COLUMNS ? i % rows : i / (BN / 64);
}

// Bias, activation and store of kRows * 64 rows; this warp's first is `row`. A store is sent off only
// when the next one's values are there: what was staged has arrived by then. `out` is a Staging with
// y(count, row, col) and pre(count, row, col), which send what was staged to there.
template <int kRows, class Out, int kAccs>
__device__ __forceinline__ void finish(const Out& out, float (&acc)[kAccs][BN / 2],
                                       const u32 (&bias)[BN / 64], int row, int col) {
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
    if (i > 0) out.y(2 * i - 1, before_row, before_col);
    out.stage(2 * i, r);
    convert<true>(p, r);
    out.pre(2 * i, row + mi * 64, col + c * 64);
    out.stage(2 * i + 1, r);
#else
    convert<true>(p, r);
    if (i > 0) out.y(i - 1, before_row, before_col);
    out.stage(i, r);
#endif
  }
  out.y(kRows * (BN / 64) * (1 + SAVE) - 1, row + (kRows - 1) * 64, col + BN - 64);
}
