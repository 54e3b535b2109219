// Up to 16 rows in float32, by multiply-adds in float32.
//
// A cluster of CL blocks owns 4 * COLS outputs; its blocks take K in turns, a span at a time, and
// the warps of a block a chunk of the span each. A warp's lanes are 8 along K by 4 along N: a
// thread asks for all of its 16-byte pieces of W at once, straight to registers, and W is read
// once. x goes through shared memory, each warp bringing just what it multiplies with. Sums over
// lanes, warps and blocks are in a fixed order.
//
// Macros from the host, besides those of few_rows.cu: ROWS, a power of two that M does not exceed;
// COLS outputs a thread; WARPS; STEPS pieces of W along K a thread has under way, for each output;
// MANY: whether a block takes more than one span, the next one being loaded under the products.

constexpr int THREADS = WARPS * 32;
constexpr int BN = 4 * COLS;             // outputs of a block
constexpr int CHUNK = STEPS * 32;        // of K, a warp's at a time
constexpr int SPAN = WARPS * CHUNK;      // of K, a block's at a time
constexpr int VALUES = ROWS * BN;
constexpr int SHARE = VALUES / CL;       // which a block of the cluster finishes
constexpr int X_FLOATS = ROWS * CHUNK;   // of a warp
constexpr int PIECES = X_FLOATS / 4;     // of 16 bytes
constexpr int COUNT = ROWS * COLS;       // sums of a thread

static_assert(VALUES % CL == 0 && THREADS % BN == 0, "COLS, WARPS");
static_assert((COUNT & (COUNT - 1)) == 0, "ROWS * COLS");

// Sums of v over the 8 lanes along K. Lane b of them is left with those of COUNT / 8 values, or
// with one where there are fewer; returns the number of the first.
__device__ __forceinline__ int sum_lanes(float (&v)[COUNT], int lane) {
  int first = 0, left = COUNT;
#pragma unroll
  for (int bit = 4; bit > 0; bit /= 2) {
    const bool upper = lane & bit;
    if (left > 1) {
      left /= 2;
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) {
        if (i < left) {
          const float give = upper ? v[i] : v[i + left];
          const float keep = upper ? v[i + left] : v[i];
          v[i] = keep + __shfl_xor_sync(0xffffffffu, give, bit);
        }
      }
      if (upper) first += left;
    } else {
      v[0] += __shfl_xor_sync(0xffffffffu, v[0], bit);
    }
  }
  return first;
}

// Rows of x and W are 16-byte aligned, x_stride and w_stride elements apart; K is a multiple of 4.
extern "C" __global__ void __launch_bounds__(THREADS)
linear_act_few_rows(const float* x, const float* w, const float* bias, float* y, int M, int K,
                    int N, int x_stride, int w_stride) {
  __shared__ float parts[WARPS][VALUES];
  __shared__ float gathered[CL][SHARE];
  extern __shared__ __align__(16) float xs[];  // [warp][1 + MANY][ROWS][CHUNK]
  cluster_here();
  const int rank = cluster_rank();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int lk = lane % 8, ln = lane / 8;
  const int first = static_cast<int>(blockIdx.x) / CL * BN;
  const u32 mine = smem_addr(xs + warp * ((1 + MANY) * X_FLOATS));
  const float* rows[COLS];
#pragma unroll
  for (int c = 0; c < COLS; ++c)
    rows[c] = w + static_cast<u64>(min(first + c * 4 + ln, N - 1)) * w_stride;
  const int column = first + (rank * SHARE + static_cast<int>(threadIdx.x)) % BN;
  const float* bias_at = bias + (column < N ? column : 0);

  const auto bring_x = [&](int k0, u32 to) {
#pragma unroll
    for (int turn = 0; turn < (PIECES + 31) / 32; ++turn) {
      const int i = turn * 32 + lane;
      if (i >= PIECES) break;
      const int row = i / (CHUNK / 4), k = k0 + i % (CHUNK / 4) * 4;
      const bool real = k < K && row < M;
      copy16(to + i * 16, x + (real ? static_cast<u64>(row) * x_stride + k : 0), real);
    }
    copy_commit();
  };
  const auto load = [&](uint4 (&to)[STEPS][COLS], int k0) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int k = k0 + s * 32 + lk * 4;
#pragma unroll
      for (int c = 0; c < COLS; ++c) to[s][c] = load_weight(rows[c] + (k < K ? k : 0), k < K);
    }
  };

#pragma unroll
  for (int c = 0; c < COLS; ++c) settle(rows[c]);
  settle(bias_at);
  wait_for_last_launch();
  float b = 0.0f;
  if constexpr (HAS_BIAS) {
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(b) : "l"(bias_at) : "memory");
  }
  int k0 = rank * SPAN + warp * CHUNK;
  uint4 held[STEPS][COLS];
  bring_x(k0, mine);
  load(held, k0);

  float acc[COUNT] = {};  // [row][output]
  const auto multiply = [&](u32 from) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const uint4 v = load_shared(from + (r * CHUNK + s * 32 + lk * 4) * 4);
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
          float& sum = acc[r * COLS + c];
          sum = fmaf(__uint_as_float(v.x), __uint_as_float(held[s][c].x), sum);
          sum = fmaf(__uint_as_float(v.y), __uint_as_float(held[s][c].y), sum);
          sum = fmaf(__uint_as_float(v.z), __uint_as_float(held[s][c].z), sum);
          sum = fmaf(__uint_as_float(v.w), __uint_as_float(held[s][c].w), sum);
        }
      }
    }
  };
  if constexpr (MANY) {
    u32 here = 0;
#pragma unroll 1
    for (;;) {
      const int next = k0 + CL * SPAN;
      uint4 more[STEPS][COLS];
      bring_x(next, mine + (here ^ 1) * (X_FLOATS * 4));  // zeros beyond K, and no reads
      load(more, next);
      copy_wait<1>();
      __syncwarp();
      multiply(mine + here * (X_FLOATS * 4));
      __syncwarp();  // all have read what the next span but one will overwrite
      if (next - warp * CHUNK >= K) break;
      k0 = next;
      here ^= 1;
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
#pragma unroll
        for (int c = 0; c < COLS; ++c) held[s][c] = more[s][c];
      }
    }
  } else {
    copy_wait<0>();
    __syncwarp();
    multiply(mine);
  }

  const int start = sum_lanes(acc, lk);
  constexpr int LEFT = COUNT > 8 ? COUNT / 8 : 1;
  constexpr int REPEATS = COUNT >= 8 ? 1 : 8 / COUNT;  // lanes with the same sum
  if (lk % REPEATS == 0) {
#pragma unroll
    for (int i = 0; i < LEFT; ++i) {
      const int value = start + i;
      parts[warp][value / COLS * BN + value % COLS * 4 + ln] = acc[i];
    }
  }
  __syncthreads();

  const auto finish = [&](int value, float v) {
    const int row = value / BN, col = first + value % BN;
    if (row < M && col < N) {
      y[static_cast<u64>(row) * N + col] = act(v + b);
    }
  };
  if constexpr (CL > 1) cluster_wait();
#pragma unroll
  for (int turn = 0; turn < (VALUES + THREADS - 1) / THREADS; ++turn) {
    const int t = turn * THREADS + threadIdx.x;
    if (t >= VALUES) break;
    float v = parts[0][t];
#pragma unroll
    for (int i = 1; i < WARPS; ++i) v += parts[i][t];
    if constexpr (CL > 1) {
      const u32 to = in_block(smem_addr(&gathered[rank][t % SHARE]), t / SHARE);
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
    } else {
      finish(t, v);
    }
  }
  if constexpr (CL > 1) {
    cluster_meet();
#pragma unroll
    for (int turn = 0; turn < (SHARE + THREADS - 1) / THREADS; ++turn) {
      const int t = turn * THREADS + threadIdx.x;
      if (t >= SHARE) break;
      float v = gathered[0][t];
#pragma unroll
      for (int i = 1; i < CL; ++i) v += gathered[i][t];
      finish(rank * SHARE + t, v);
    }
  }
}
