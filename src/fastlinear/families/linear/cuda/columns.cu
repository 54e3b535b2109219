// db: column sums of dy (M, N) in one launch, for many rows on Hopper.
//
// A cluster of CL blocks owns COLS columns; block r of it takes the r-th part of the rows. Each thread
// walks down 8 columns and adds in float32; the block's threads, then the cluster's blocks, are added
// in order, so that db is the same bit for bit at every run.
//
// Macros from the host: COLS CL THREADS UNROLL IS_BF16.

constexpr int LANES = COLS / 8;        // threads side by side on a row
constexpr int ROWS = THREADS / LANES;  // rows a block reads at once

static_assert(COLS % CL == 0 && COLS / CL <= THREADS, "COLS");

struct alignas(16) Eight { u32 pair[4]; };

__device__ __forceinline__ Eight load(const unsigned short* from) {
  Eight v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.pair[0]), "=r"(v.pair[1]), "=r"(v.pair[2]), "=r"(v.pair[3])
               : "l"(from));
  return v;
}

// N is a multiple of 8, rows of dy are 16-byte aligned and `stride` elements apart.
extern "C" __global__ void __launch_bounds__(THREADS)
linear_act_columns(const unsigned short* __restrict__ dy, unsigned short* __restrict__ db, int M,
                   int N, int stride) {
  __shared__ float part[ROWS][COLS];
  __shared__ float total[COLS];
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int x = threadIdx.x % LANES, y = threadIdx.x / LANES;
  const int first = blockIdx.x / CL * COLS;
  const int col = first + x * 8;
  float sum[8] = {};

  const auto take = [&](const Eight& v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float a, b;
      unpack(v.pair[i], a, b);
      sum[2 * i] += a;
      sum[2 * i + 1] += b;
    }
  };

  if (col < N) {
    const int chunk = (M + CL - 1) / CL;
    const int end = min(M, static_cast<int>(rank + 1) * chunk);
    int row = rank * chunk + y;
    for (; row + (UNROLL - 1) * ROWS < end; row += UNROLL * ROWS) {
      Eight v[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; ++i)
        v[i] = load(dy + static_cast<u64>(row + i * ROWS) * stride + col);
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) take(v[i]);
    }
    for (; row < end; row += ROWS) take(load(dy + static_cast<u64>(row) * stride + col));
  }

#pragma unroll
  for (int i = 0; i < 8; ++i) part[y][x * 8 + i] = sum[i];
  __syncthreads();
  for (int c = threadIdx.x; c < COLS; c += THREADS) {
    float t = 0.0f;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) t += part[i][c];
    total[c] = t;
  }
  cluster_sync();
  const int c = rank * (COLS / CL) + threadIdx.x;  // this block finishes its share of the columns
  if (threadIdx.x < COLS / CL && first + c < N) {
    const u32 mine = smem_addr(total + c);
    float t = 0.0f;
#pragma unroll
    for (int block = 0; block < CL; ++block) {
      float v;
      asm volatile(
          "{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %1, %2;\nld.shared::cluster.f32 %0, [a];\n}"
          : "=f"(v)
          : "r"(mine), "r"(block)
          : "memory");
      t += v;
    }
    db[first + c] = static_cast<unsigned short>(pack(t, 0.0f));
  }
  cluster_sync();  // no block leaves while another still reads its total
}
