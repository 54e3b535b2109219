// All bias gradients of a gated MLP in one launch, behind backward.cu.
//
// The first `down_blocks` blocks add up dy (m, n), rows `stride` apart: each cluster 64 columns, each
// of its blocks a share of the rows. They begin while the kernel before this one ends. The others add
// up, 64 columns each, what backward.cu left of the gate's and then of the up projection's gradient:
// `parts` (2, rows, columns). Every sum is float32 in a fixed order: the same bit for bit at every
// run. A gradient that is not wanted is null.
//
// n and columns are multiples of 8, rows of dy begin at multiples of 16 bytes. Macro from the host:
// IS_BF16.

constexpr int THREADS = 512;
constexpr int COLS = 64;  // of a block
constexpr int WAYS = THREADS / COLS;
constexpr int AHEAD = 8;  // rows of dy that a thread has under way

struct Four { u32 v[4]; };

__device__ __forceinline__ Four load(const void* from) {
  Four r;  // volatile, not as constant memory and past L1: never from before it was written
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
               : "l"(from)
               : "memory");
  return r;
}

__device__ __forceinline__ void wait_for_the_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void put(float* to, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
}

// The sum of column threadIdx.x, below COLS, of kSlices rows of `part`, which is overwritten.
template <int kSlices>
__device__ __forceinline__ float slices_of(float (&part)[COLS][COLS]) {
  static_assert(kSlices % WAYS == 0 && kSlices <= COLS, "kSlices");
  const int column = threadIdx.x % COLS, way = threadIdx.x / COLS;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kSlices / WAYS; ++s) sum += part[s * WAYS + way][column];
  __syncthreads();
  part[way][column] = sum;
  __syncthreads();
  sum = 0.0f;
  if (way == 0) {
#pragma unroll
    for (int s = 0; s < WAYS; ++s) sum += part[s][column];
  }
  return sum;
}

__device__ __forceinline__ void add_dy(float (&part)[COLS][COLS], const unsigned short* dy,
                                       unsigned short* down, int m, int n, int stride) {
  constexpr int kSlices = THREADS / (COLS / 8);
  __shared__ float total[COLS];
  u32 rank, blocks;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  const int first = blockIdx.x / blocks * COLS;
  const int x = threadIdx.x % (COLS / 8) * 8, slice = threadIdx.x / (COLS / 8);
  float sum[8] = {};
  if (first + x < n) {
    const int share = (m + blocks - 1) / blocks;
    const int end = min(m, static_cast<int>(rank + 1) * share);
    for (int row = rank * share + slice; row < end; row += AHEAD * kSlices) {
      Four v[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        v[i] = {};
        if (row + i * kSlices < end)
          v[i] = load(dy + static_cast<u64>(row + i * kSlices) * stride + first + x);
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float a, b;
          unpack(v[i].v[k], a, b);
          sum[2 * k] += a;
          sum[2 * k + 1] += b;
        }
      }
    }
  }
  put(&part[slice][x], sum[0], sum[1], sum[2], sum[3]);
  put(&part[slice][x + 4], sum[4], sum[5], sum[6], sum[7]);
  const float mine = slices_of<kSlices>(part);
  if (threadIdx.x < COLS) total[threadIdx.x] = mine;
  cluster_sync();
  const int share = COLS / blocks, own = rank * share + threadIdx.x;
  wait_for_the_kernel_before();  // whose memory `down` may have been
  if (threadIdx.x < share && first + own < n) {
    const u32 at = smem_addr(total + own);
    float all = 0.0f;
    for (u32 block = 0; block < blocks; ++block) {
      float v;
      asm volatile(
          "{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %1, %2;\nld.shared::cluster.f32 %0, [a];\n}"
          : "=f"(v)
          : "r"(at), "r"(block)
          : "memory");
      all += v;
    }
    down[first + own] = static_cast<unsigned short>(pack(all, 0.0f));
  }
  cluster_sync();  // no block leaves while another reads its total
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
gated_bias_sums(const float* parts, unsigned short* gate, unsigned short* up,
                const unsigned short* dy, unsigned short* down, int rows, int columns, int m, int n,
                int stride, int down_blocks) {
  __shared__ alignas(16) float part[COLS][COLS];
  if (static_cast<int>(blockIdx.x) < down_blocks) {
    add_dy(part, dy, down, m, n, stride);
    return;
  }
  constexpr int kSlices = THREADS / (COLS / 4), kAhead = 4;
  const int index = blockIdx.x - down_blocks, of_half = (columns + COLS - 1) / COLS;
  const int half = index / of_half, first = index % of_half * COLS;
  const int x = threadIdx.x % (COLS / 4) * 4, slice = threadIdx.x / (COLS / 4);
  unsigned short* const out = half == 0 ? gate : half == 1 ? up : nullptr;
  wait_for_the_kernel_before();
  if (out == nullptr) return;  // not wanted, or what fills up the last cluster
  const float* from = parts + static_cast<u64>(half) * rows * columns + first + x;
  float sum[4] = {};
  if (first + x < columns) {
    for (int row = slice; row < rows; row += kAhead * kSlices) {
      Four v[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        v[i] = {};
        if (row + i * kSlices < rows)
          v[i] = load(from + static_cast<u64>(row + i * kSlices) * columns);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] += __uint_as_float(v[i].v[k]);
      }
    }
  }
  put(&part[slice][x], sum[0], sum[1], sum[2], sum[3]);
  const float mine = slices_of<kSlices>(part);
  if (threadIdx.x < COLS && first + static_cast<int>(threadIdx.x) < columns)
    out[first + threadIdx.x] = static_cast<unsigned short>(pack(mine, 0.0f));
}
