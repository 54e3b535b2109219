// All bias gradients of a gated MLP in one launch, behind backward.cu. The text of dy_sums.h stands
// before this one.
//
// A block adds up 64 columns: of what backward.cu left of the gate's gradient, of the up projection's,
// or of the shares of dy. Every sum is float32 in a fixed order: the same bit for bit at every run.
//
// Macro from the host: IS_BF16.

constexpr int THREADS = 512;
constexpr int COLS = 64;  // of a block: half a warp reads a row of them
constexpr int SLICES = THREADS / (COLS / 4);  // rows that the threads read at once
constexpr int AHEAD = 4;                      // times as many are under way

struct Four { u32 v[4]; };

__device__ __forceinline__ Four load(const void* from) {
  Four r;  // volatile, not as constant memory and past L1: never from before it was written
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3])
               : "l"(from)
               : "memory");
  return r;
}

// parts (2, rows, columns) into gate and up (columns,), shares (share_rows, n) into down (n,). A
// gradient that is not wanted is null; columns and n are multiples of 8.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
gated_bias_sums(const float* parts, unsigned short* gate, unsigned short* up, const float* shares,
                unsigned short* down, int rows, int columns, int share_rows, int n) {
  __shared__ alignas(16) float part[SLICES / 2][COLS];
  const int of_half = (columns + COLS - 1) / COLS, block = blockIdx.x;
  const int which = block < of_half ? 0 : block < 2 * of_half ? 1 : 2;
  const int width = which < 2 ? columns : n, height = which < 2 ? rows : share_rows;
  const int first = (block - which * of_half) * COLS;
  const int x = threadIdx.x % (COLS / 4) * 4, slice = threadIdx.x / (COLS / 4);
  unsigned short* const out = which == 0 ? gate : which == 1 ? up : down;
  wait_for_previous();
  if (out == nullptr) return;
  const float* of = which < 2 ? parts + static_cast<u64>(which) * rows * columns : shares;
  const float* from = of + first + x;
  float sum[4] = {};
  if (first + x < width) {
    for (int row = slice; row < height; row += AHEAD * SLICES) {
      Four v[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        v[i] = {};
        if (row + i * SLICES < height) v[i] = load(from + static_cast<u64>(row + i * SLICES) * width);
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] += __uint_as_float(v[i].v[k]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], COLS / 4);
  if (slice % 2 == 0)
    *reinterpret_cast<float4*>(&part[slice / 2][x]) = make_float4(sum[0], sum[1], sum[2], sum[3]);
  __syncthreads();
  const int column = first + threadIdx.x;
  if (threadIdx.x >= COLS || column >= width) return;
  float all = 0.0f;
#pragma unroll
  for (int s = 0; s < SLICES / 2; ++s) all += part[s][threadIdx.x];
  out[column] = static_cast<unsigned short>(pack(all, 0.0f));
}

// The shares of dy by themselves, a warp a task, where backward.cu does not run.
extern "C" __global__ void __launch_bounds__(THREADS)
gated_dy_sums(const unsigned short* dy, float* shares, int m, int n, int stride, int each) {
  const DySums sums{dy, shares, m, n, stride, each};
  const int task = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (task < sums.tasks()) sums.add(task, threadIdx.x % 32);
}
