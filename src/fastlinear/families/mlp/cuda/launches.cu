// One layer y = act(x Wᵀ + b) of few rows for Hopper (sm_90a), launched once a layer, each launch
// begun while the one before still runs (programmatic dependent launch): it brings weights into
// shared memory and only then waits for its input.
//
// A cluster of CLUSTER blocks owns CG * T tiles of 16 columns (rows of W) for ROWS rows of x; block
// r of it multiplies the r-th slice of K. Warps are CG groups along the columns times KG along K; a
// warp brings its own weights through a ring of its own, STAGES blocks of 64 bytes of K deep, so no
// warp waits for another while it multiplies. In the end the blocks of a cluster store their partial
// sums into one another's shared memory, each adds up its share in a fixed order and writes it.
//
// Weights are operand A of mma.sync (16 rows of W), activations operand B (8 rows of x). The k order
// of a thread is that of 16-byte pieces, the same for both. float32: three tf32 products of numbers
// split in two; the two small ones have accumulators of their own, dropped where they are NaN, since
// the second part of an infinity is.
//
// Macros from the host: DTYPE (0 bfloat16, 1 float16, 2 float32) CLUSTER T CG KG STAGES NB (tiles of
// 8 rows of x) XB (64-byte blocks of K of x held at once, a multiple of KG) PER_SM (blocks of a
// multiprocessor) KS (unused, for device.cu), a number ACT_<NAME> for every activation.

constexpr int ES = DTYPE == 2 ? 4 : 2;
constexpr bool SINGLE = DTYPE == 2;
constexpr int ROWS = 8 * NB;
constexpr int WARPS = CG * KG;
constexpr int THREADS = 32 * WARPS;
constexpr int TILES = CG * T;                      // column tiles of a cluster
constexpr int UNITS = NB * TILES;                  // 8 rows of one of them
constexpr int SHARE = (UNITS + CLUSTER - 1) / CLUSTER;  // units a block completes
constexpr int PAIR = 2;                            // row tiles multiplied by turns, float32
constexpr int ROUNDS = (SHARE + WARPS - 1) / WARPS;     // units a warp completes
constexpr int STAGE_BYTES = T * 1024;
constexpr int X_BYTES = XB * ROWS * 64;
constexpr int RING_OFFSET = X_BYTES;
constexpr int SUMS_BYTES = SHARE * CLUSTER * KG * 512;  // in place of all the others
constexpr int USED_BYTES = X_BYTES + WARPS * STAGES * STAGE_BYTES;
constexpr int SHARED_BYTES = USED_BYTES > SUMS_BYTES ? USED_BYTES : SUMS_BYTES;

struct Params {
  const void* x;     // (rows, K), rows x_stride elements apart, on 16 bytes
  const void* w;     // (N, K), on 16 bytes
  const void* bias;  // (N) or null
  void* y;           // (rows, N)
  void* pre;         // (rows, N) or null: act's argument
  long long x_stride;
  int rows, N, K, activation;
};

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void store_peer4(u32 addr, uint4 v) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_x(const char* at) {
  uint4 v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

// Integer rounding in `parts` would turn a NaN of all ones into a zero.
__device__ __forceinline__ u32 plain_nan(u32 v) {
  return (v & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : v;
}

// x = hi + lo: hi in tf32 and rounded; lo's bits beyond tf32 are below 2^-22 of x.
__device__ __forceinline__ void parts(u32 x, u32& hi, u32& lo) {
  hi = (x + 0x1000u) & 0xffffe000u;
  lo = __float_as_uint(__uint_as_float(x) - __uint_as_float(hi));
}

__device__ __forceinline__ void parts4(uint4 x, uint4& hi, uint4& lo) {
  parts(x.x, hi.x, lo.x);
  parts(x.y, hi.y, lo.y);
  parts(x.z, hi.z, lo.z);
  parts(x.w, hi.w, lo.w);
}

__device__ __forceinline__ float activate(int which, float v) {
  switch (which) {
#define CASE(A) case A: return act<A>(v);
    ACT_EACH(CASE)
#undef CASE
    default: return v;
  }
}

__device__ __forceinline__ void store_element(void* out, long long index, float v) {
  if constexpr (SINGLE) {
    static_cast<float*>(out)[index] = v;
  } else {
    static_cast<unsigned short*>(out)[index] = static_cast<unsigned short>(pack(v, 0.0f));
  }
}

// Rows row0 .. row0 + ROWS - 1 of x, `blocks` 64-byte blocks of K from byte `from` on: shared memory
// [block][row] 64 bytes. Rows and columns that do not exist are zero.
__device__ __forceinline__ void bring_x(const Params& p, u32 base, int row0, int from, int blocks) {
  constexpr int EACH = 8;  // pieces under way per thread
  const char* const x = static_cast<const char*>(p.x) + row0 * p.x_stride * ES;
  const int count = blocks * ROWS * 4;
  for (int start = threadIdx.x; start < count; start += EACH * THREADS) {
    uint4 v[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int piece = start + i * THREADS;
      const int row = (piece >> 2) % ROWS, byte = from + (piece >> 2) / ROWS * 64 + (piece & 3) * 16;
      const bool real = piece < count && row0 + row < p.rows && byte < p.K * ES;
      v[i] = real ? load_x(x + row * p.x_stride * ES + byte) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int piece = start + i * THREADS;
      if constexpr (SINGLE) {
        v[i] = make_uint4(plain_nan(v[i].x), plain_nan(v[i].y), plain_nan(v[i].z), plain_nan(v[i].w));
      }
      if (piece < count) store16(base + piece * 16, v[i]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM)
whole_mlp_layer(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const u32 base = smem_addr(shared);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int rank = static_cast<int>(cluster_rank());
  const int cg = warp % CG, kg = warp / CG;
  const int row0 = static_cast<int>(blockIdx.y) * ROWS;
  const int cluster_first = static_cast<int>(blockIdx.x) / CLUSTER * (TILES * 16);  // column
  const int first = cluster_first + cg * (T * 16);
  const int bytes = p.K * ES, blocks = (bytes + 63) / 64;  // of K
  const int begin = blocks * rank / CLUSTER, count = blocks * (rank + 1) / CLUSTER - begin;

  // The warp's ring: [stage][row of W] 64 bytes.
  const u32 ring = base + RING_OFFSET + warp * (STAGES * STAGE_BYTES);
  const auto fetch = [&](int block, int slot) {
    const int byte = (begin + block) * 64 + t * 16;
#pragma unroll
    for (int i = 0; i < 2 * T; ++i) {
      const int row = first + i * 8 + g;
      const bool real = row < p.N && byte < bytes;
      const char* const from = static_cast<const char*>(p.w) +
                               (real ? static_cast<long long>(row) * bytes + byte : 0);
      copy16<16>(ring + slot * STAGE_BYTES + (i * 8 + g) * 64 + t * 16, from, real ? 16 : 0);
    }
  };
  int next = kg;
#pragma unroll 1
  for (int slot = 0; slot < STAGES; ++slot, next += KG) {
    if (next < count) fetch(next, slot);
    copy_commit();
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");

  float acc[T][NB][4], small[SINGLE ? T : 1][NB][4];
#pragma unroll
  for (int i = 0; i < T; ++i) {
#pragma unroll
    for (int j = 0; j < NB; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        acc[i][j][e] = 0.0f;
        if constexpr (SINGLE) small[i][j][e] = 0.0f;
      }
    }
  }
  int slot = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < count; chunk += XB) {
    const int end = min(chunk + XB, count);
    if (chunk > 0) __syncthreads();
    bring_x(p, base, row0, (begin + chunk) * 64, end - chunk);
    __syncthreads();
#pragma unroll 1
    for (int block = chunk + kg; block < end; block += KG) {
      copy_wait<STAGES - 1>();
      __syncwarp();
      uint4 w[2 * T];
#pragma unroll
      for (int i = 0; i < 2 * T; ++i) w[i] = load16(ring + slot * STAGE_BYTES + i * 512 + lane * 16);
      __syncwarp();
      if (next < count) fetch(next, slot);
      copy_commit();
      next += KG;
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      const u32 from = base + (block - chunk) * (ROWS * 64) + lane * 16;
      if constexpr (SINGLE) {
        uint4 hi[2 * T], lo[2 * T];
#pragma unroll
        for (int i = 0; i < 2 * T; ++i) {
          w[i] = make_uint4(plain_nan(w[i].x), plain_nan(w[i].y), plain_nan(w[i].z),
                            plain_nan(w[i].w));
          parts4(w[i], hi[i], lo[i]);
        }
        // Tensor cores truncate while they add: each block has a sum of its own, added in float32.
#pragma unroll
        for (int start = 0; start < NB; start += PAIR) {
          uint4 u[PAIR], v[PAIR];
#pragma unroll
          for (int j = 0; j < PAIR; ++j) {
            if (start + j < NB) parts4(load16(from + (start + j) * 512), u[j], v[j]);
          }
#pragma unroll
          for (int i = 0; i < T; ++i) {
            const uint4 a = hi[2 * i], b = hi[2 * i + 1], c = lo[2 * i], d = lo[2 * i + 1];
            float sum[PAIR][4];
#pragma unroll
            for (int j = 0; j < PAIR; ++j) {
#pragma unroll
              for (int e = 0; e < 4; ++e) sum[j][e] = 0.0f;
            }
#pragma unroll
            for (int step = 0; step < 6; ++step) {  // neighbours do not wait for one another
#pragma unroll
              for (int j = 0; j < PAIR; ++j) {
                if (start + j >= NB) break;
                float(&rest)[4] = small[i][start + j];
                if (step == 0) mma(rest, c.x, d.x, c.y, d.y, u[j].x, u[j].y);
                if (step == 1) mma(sum[j], a.x, b.x, a.y, b.y, u[j].x, u[j].y);
                if (step == 2) mma(rest, a.x, b.x, a.y, b.y, v[j].x, v[j].y);
                if (step == 3) mma(sum[j], a.z, b.z, a.w, b.w, u[j].z, u[j].w);
                if (step == 4) mma(rest, c.z, d.z, c.w, d.w, u[j].z, u[j].w);
                if (step == 5) mma(rest, a.z, b.z, a.w, b.w, v[j].z, v[j].w);
              }
            }
#pragma unroll
            for (int j = 0; j < PAIR; ++j) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                if (start + j < NB) acc[i][start + j][e] += sum[j][e];
              }
            }
          }
        }
      } else {
        constexpr int AT_ONCE = T == 1 || NB < 4 ? NB : 4;  // row tiles, as registers allow
#pragma unroll
        for (int start = 0; start < NB; start += AT_ONCE) {
          uint4 x[AT_ONCE];
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j) {
            if (start + j < NB) x[j] = load16(from + (start + j) * 512);
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < T; ++i) {
              const uint4 a = w[2 * i], b = w[2 * i + 1];
#pragma unroll
              for (int j = 0; j < AT_ONCE; ++j) {
                if (start + j >= NB) break;
                if (half == 0) mma(acc[i][start + j], a.x, b.x, a.y, b.y, x[j].x, x[j].y);
                else mma(acc[i][start + j], a.z, b.z, a.w, b.w, x[j].z, x[j].w);
              }
            }
          }
        }
      }
    }
  }

  float shift[ROUNDS][2];  // biases of what this thread will complete
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int unit = (warp + i * WARPS) * CLUSTER + rank;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int n = cluster_first + unit % TILES * 16 + g + e * 8;
      shift[i][e] = p.bias && n < p.N ? load_element(p.bias, n) : 0.0f;
    }
  }

  // Unit u = (8 rows j, tile) goes to block u % CLUSTER, as its unit u / CLUSTER.
  copy_wait<0>();  // every copy was waited for before it was multiplied; no group is left
  cluster_sync();  // nobody writes or reads weights and activations any more
#pragma unroll
  for (int j = 0; j < NB; ++j) {
#pragma unroll
    for (int i = 0; i < T; ++i) {
      const int unit = j * TILES + cg * T + i;
      const u32 to = base + ((unit / CLUSTER * CLUSTER + rank) * KG + kg) * 512 + lane * 16;
      float v[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        v[e] = acc[i][j][e];
        if constexpr (SINGLE) {
          const float rest = small[i][j][e];
          v[e] += rest == rest ? rest : 0.0f;
        }
      }
      store_peer4(peer_addr(to, unit % CLUSTER),
                  make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                             __float_as_uint(v[3])));
    }
  }
  cluster_sync();
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int own = warp + i * WARPS, unit = own * CLUSTER + rank;
    if (unit >= UNITS) break;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < CLUSTER * KG; ++s) {
      const uint4 v = load16(base + (own * CLUSTER * KG + s) * 512 + lane * 16);
      sum[0] += __uint_as_float(v.x);
      sum[1] += __uint_as_float(v.y);
      sum[2] += __uint_as_float(v.z);
      sum[3] += __uint_as_float(v.w);
    }
    const int column = cluster_first + unit % TILES * 16 + g;
    const int row = row0 + unit / TILES * 8 + 2 * t;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int n = column + (e >> 1) * 8, m = row + (e & 1);
      if (n >= p.N || m >= p.rows) continue;
      const float v = sum[e] + shift[i][e >> 1];
      const long long index = static_cast<long long>(m) * p.N + n;
      if (p.pre) store_element(p.pre, index, v);
      store_element(p.y, index, activate(p.activation, v));
    }
  }
}
