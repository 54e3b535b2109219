// Up to 64 rows in bfloat16 or float16, by the matrix units, accumulating in float32.
//
// A cluster of CL blocks owns BN = WN * MT * 16 outputs; block r of it takes the r-th part of K,
// which its WK rows of warps walk through side by side, WN warps sharing each piece. W is the left
// operand: the 8 numbers of a 16-byte piece count as those that m16n8k16 wants of a thread in two
// steps of 16 along K, so that W goes straight from global memory to registers, once, and x (of
// which all pieces are brought to shared memory at the start) is read in the same order. STEPS
// pieces of each row are under way in a thread. Sums over warps and blocks are in a fixed order.
//
// Macros from the host, besides those of few_rows.cu: ROWS, a multiple of 8 that M does not exceed;
// MT tiles of 16 outputs a warp; WN, WK, STEPS; IS_BF16; AHEAD, bytes of W that a block has L2 fetch
// while the launch before is ending.

constexpr int THREADS = WN * WK * 32;
constexpr int T = ROWS / 8;              // tiles of 8 rows of x
constexpr int BN = WN * MT * 16;         // outputs of a block
constexpr int SPAN = WK * STEPS * 32;    // of K, a block's at a time
constexpr int BNP = BN + 4;              // floats from row to row of the sums: no bank conflicts
constexpr int QUADS = ROWS * BN / 4;     // four outputs of a row each
constexpr int SHARE = QUADS / CL;        // which a block of the cluster finishes

static_assert(QUADS % CL == 0 && THREADS % (BN / 4) == 0, "BN");

// Has L2 fetch the 128 bytes around p, which may be changed by then: nothing is read yet.
__device__ __forceinline__ void fetch_ahead(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// d (16 outputs, 8 rows of x) += W piece (16, 16) * x piece (8, 16)^T
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if IS_BF16
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
#else
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float4 load_quad(u32 addr) {
  const uint4 v = load_shared(addr);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                     __uint_as_float(v.w));
}

// Rows of x and W are 16-byte aligned, x_stride and w_stride elements apart; K and N are multiples
// of 8; a block's part of K is `spans` times SPAN.
extern "C" __global__ void __launch_bounds__(THREADS)
linear_act_few_rows(const unsigned short* x, const unsigned short* w, const unsigned short* bias,
                    unsigned short* y, int M, int K, int N, int x_stride, int w_stride, int spans) {
  // [ROWS][x_bytes] of x, or afterwards the warps' sums [WK][ROWS][BNP]; then [CL][SHARE] sums
  extern __shared__ __align__(16) unsigned char shared[];
  cluster_here();
  const int rank = cluster_rank();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, q = lane % 4;
  const int wn = warp % WN, wk = warp / WN;
  const int first = static_cast<int>(blockIdx.x) / CL * BN;
  const int part = spans * SPAN, begin = rank * part;
  const int x_bytes = part * 2 + 64;  // rows are half of all banks apart
  const u32 base = smem_addr(shared);
  const u32 gathered = base + max(ROWS * x_bytes, WK * ROWS * BNP * 4);
  const unsigned short* rows[MT][2];
#pragma unroll
  for (int i = 0; i < MT * 2; ++i) {
    const int row = first + (wn * MT + i / 2) * 16 + i % 2 * 8 + g;
    rows[i / 2][i % 2] = w + static_cast<u64>(min(row, N - 1)) * w_stride;
  }

  const int column = first + (rank * SHARE + static_cast<int>(threadIdx.x)) % (BN / 4) * 4;
  const unsigned short* bias_at = bias + (column < N ? column : 0);

  const auto bring_x = [&](int span) {
    constexpr int kPieces = SPAN / 8;  // of 16 bytes, of each row
#pragma unroll 4
    for (int i = threadIdx.x; i < kPieces * ROWS; i += THREADS) {
      const int row = i / kPieces, k = span * SPAN + i % kPieces * 8;
      const bool real = begin + k < K && row < M;
      copy16(base + row * x_bytes + k * 2,
             x + (real ? static_cast<u64>(row) * x_stride + begin + k : 0), real);
    }
  };
  uint4 held[STEPS][MT][2];
  const auto load = [&](int span, int s) {
    const int k = begin + span * SPAN + (wk * STEPS + s) * 32 + q * 8;
#pragma unroll
    for (int i = 0; i < MT * 2; ++i)
      held[s][i / 2][i % 2] = load_weight(rows[i / 2][i % 2] + (k < K ? k : 0), k < K);
  };

#pragma unroll
  for (int i = 0; i < MT * 2; ++i) settle(rows[i / 2][i % 2]);
  settle(bias_at);
  const int ahead = min(spans, AHEAD / (BN * SPAN * 2));
  for (int span = q; span < ahead; span += 4) {
#pragma unroll
    for (int s = 0; s < STEPS; s += 2) {  // of a line of 64 numbers
      const int k = begin + span * SPAN + (wk * STEPS + s) * 32;
#pragma unroll
      for (int i = 0; i < MT * 2; ++i)
        if (k < K) fetch_ahead(rows[i / 2][i % 2] + k);
    }
  }
  wait_for_last_launch();
  uint2 packed = make_uint2(0, 0);
  if constexpr (HAS_BIAS) {
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(packed.x), "=r"(packed.y) : "l"(bias_at)
                 : "memory");
  }
  bring_x(0);
  copy_commit();
#pragma unroll
  for (int s = 0; s < STEPS; ++s) load(0, s);
  for (int span = 1; span < spans; ++span) {
    bring_x(span);
    copy_commit();
  }
  float acc[MT][T][4] = {};
#pragma unroll 1
  for (int span = 0; span < spans; ++span) {
    const int later = spans - 1 - span;  // pieces of x that may still be under way
    if (later > 2) {
      copy_wait<3>();
    } else if (later == 2) {
      copy_wait<2>();
    } else if (later == 1) {
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();
    const u32 from = base + (span * SPAN + wk * STEPS * 32 + q * 8) * 2 + g * x_bytes;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      uint4 v[T];
#pragma unroll
      for (int t = 0; t < T; ++t) v[t] = load_shared(from + s * 64 + t * 8 * x_bytes);
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        const uint4 top = held[s][i][0], low = held[s][i][1];
#pragma unroll
        for (int t = 0; t < T; ++t) mma(acc[i][t], top.x, low.x, top.y, low.y, v[t].x, v[t].y);
#pragma unroll
        for (int t = 0; t < T; ++t) mma(acc[i][t], top.z, low.z, top.w, low.w, v[t].z, v[t].w);
      }
      if (span + 1 < spans) load(span + 1, s);
    }
  }

  __syncthreads();  // x has been read: its memory takes the sums
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int t = 0; t < T; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = t * 8 + q * 2 + e % 2, col = (wn * MT + i) * 16 + e / 2 * 8 + g;
        const u32 to = base + ((wk * ROWS + row) * BNP + col) * 4;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(acc[i][t][e]) : "memory");
      }
    }
  }
  __syncthreads();

  float b[4];
  unpack(packed.x, b[0], b[1]);
  unpack(packed.y, b[2], b[3]);
  const auto finish = [&](int quad, float4 v) {
    const int row = quad / (BN / 4);
    if (row < M && column < N) {
      const u64 at = static_cast<u64>(row) * N + column;
      const float sum[4] = {v.x + b[0], v.y + b[1], v.z + b[2], v.w + b[3]};
      *reinterpret_cast<uint2*>(y + at) =
          make_uint2(pack(act(sum[0]), act(sum[1])), pack(act(sum[2]), act(sum[3])));
    }
  };
  cluster_wait();
  for (int quad = threadIdx.x; quad < QUADS; quad += THREADS) {
    const int row = quad / (BN / 4);
    if (row >= M) break;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < WK; ++i) {
      const float4 more = load_quad(base + ((i * ROWS + row) * BNP + quad % (BN / 4) * 4) * 4);
      v = make_float4(v.x + more.x, v.y + more.y, v.z + more.z, v.w + more.w);
    }
    if constexpr (CL > 1) {
      const u32 to = in_block(gathered + (rank * SHARE + quad % SHARE) * 16, quad / SHARE);
      asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v.x),
                   "f"(v.y), "f"(v.z), "f"(v.w)
                   : "memory");
    } else {
      finish(quad, v);
    }
  }
  if constexpr (CL > 1) {
    cluster_meet();
    for (int i = threadIdx.x; i < SHARE; i += THREADS) {
      const int quad = rank * SHARE + i;
      if (quad / (BN / 4) >= M) break;
      float4 v = load_quad(gathered + i * 16);
#pragma unroll
      for (int block = 1; block < CL; ++block) {
        const float4 more = load_quad(gathered + (block * SHARE + i) * 16);
        v = make_float4(v.x + more.x, v.y + more.y, v.z + more.z, v.w + more.w);
      }
      finish(quad, v);
    }
  }
}
