// Matrices of float32 as planes of float16 (planes.h).
//
// A block has 64 rows and 64 columns, 4 by 4 in each thread's registers. It splits them by rows, by
// columns, or both ways. A matrix may be derived from others, with the activation ACT (planes.h).
// Sums over rows, a bias' gradient, are those of 64 rows here, of all in planes_bias.
//
// hopper_words.h, with IS_BF16 0, activations/cuda.h and planes.h come before this file.

constexpr int THREADS = 256, WARPS = THREADS / 32, FOURS = SEGMENT / 4;

__device__ __forceinline__ float4 scaled(float4 v, float4 s) {
  return {scaled(v.x, s.x), scaled(v.y, s.y), scaled(v.z, s.z), scaled(v.w, s.w)};
}

// Where planes of one way go.
struct Side {
  unsigned short* planes[4];  // (rows, pitch): high, low, and those of the second level
  float* scales;              // (segments, lines), lines a multiple of 64; null: this way is not wanted
  int* small;                 // (segments, lines / 64): whether there are planes of the second level
  long long lines;
};

struct Matrix {
  const float* from[3];  // x, saved, other: (rows, columns), columns side by side; null where not read
  float* sums;           // (blocks of 64 rows, columns) or null
  Side by_rows, by_columns;
  long long strides[3];  // of rows, in numbers
  int rows, columns, pitch;
  int wide;              // whether rows of numbers begin on 16 bytes, as those of planes do
  int first, across;     // its first block; its blocks beside each other
  int derivation;        // how it is derived
  int together;          // matrices up to the last with this first block, which take their blocks by turns

  // Numbers c to c + 3 of a row, 0 behind its end.
  __device__ __forceinline__ float4 four(const float* numbers, int c) const {
    if (wide && c + 4 <= columns) return *reinterpret_cast<const float4*>(numbers + c);
    const auto at = [&](int i) { return i < columns ? numbers[i] : 0.0f; };
    return {at(c), at(c + 1), at(c + 2), at(c + 3)};
  }

  __device__ __forceinline__ float4 read(int row, int c) const {
    if (row >= rows) return {0.0f, 0.0f, 0.0f, 0.0f};
    const float4 x = four(from[0] + row * strides[0], c);
    if (derivation == DERIVED_NONE) return x;
    const float4 s = four(from[1] + row * strides[1], c);
    float4 o{};
    if (derivation == DERIVED_GATE_GRADIENT) o = four(from[2] + row * strides[2], c);
    return {derived(derivation, x.x, s.x, o.x), derived(derivation, x.y, s.y, o.y),
            derived(derivation, x.z, s.z, o.z), derived(derivation, x.w, s.w, o.w)};
  }

  // Planes of such numbers on their scales: of those of the second level, or of the others.
  __device__ __forceinline__ void put(const Side& to, int row, int c, float4 v, bool second) const {
    if (row >= rows || c >= columns) return;
    const auto of_level = [&](float x) {
      if (is_small(x) != second) return 0.0f;
      return second ? x * (1 << LEVEL) : x;
    };
    uint2 h, l;
    split(of_level(v.x), of_level(v.y), h.x, l.x);
    split(of_level(v.z), of_level(v.w), h.y, l.y);
    const long long at = static_cast<long long>(row) * pitch + c;
    *reinterpret_cast<uint2*>(to.planes[2 * second] + at) = h;
    *reinterpret_cast<uint2*>(to.planes[2 * second + 1] + at) = l;
  }

  // A thread's numbers, on their scales.
  __device__ __forceinline__ void put(const Side& to, int segment, int line, int row, int c,
                                      const float4 (&v)[4]) const {
    bool found = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      put(to, row + i, c, v[i], false);
      found |= is_small(v[i].x) || is_small(v[i].y) || is_small(v[i].z) || is_small(v[i].w);
    }
    found = __syncthreads_or(found);
    if (threadIdx.x == 0) to.small[segment * (to.lines / SEGMENT) + line] = found;
    if (!found) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) put(to, row + i, c, v[i], true);
  }
};

struct Params {
  Matrix of[5];
  int matrices;
};

// The scale of a thread's row, which 16 lanes share.
__device__ __forceinline__ float of_row(float4 v) {
  Known row{0, 0};
  row.add(v.x), row.add(v.y), row.add(v.z), row.add(v.w);
#pragma unroll
  for (int apart = FOURS / 2; apart; apart /= 2) row.add_across(apart);
  return row.scale();
}

// What a thread's rows tell of one of its columns, and those of the other half of the warp.
__device__ __forceinline__ Known of_warp(float x, float y, float z, float w) {
  Known column{0, 0};
  column.add(x), column.add(y), column.add(z), column.add(w);
  column.add_across(FOURS);
  return column;
}

// The sum of a thread's four rows in one of its columns, and of those of the other half of the warp.
__device__ __forceinline__ float sum_of_warp(float x, float y, float z, float w) {
  const float sum = (x + y) + (z + w);
  return sum + __shfl_xor_sync(0xffffffffu, sum, FOURS);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) planes_split(const __grid_constant__ Params p) {
  __shared__ Known known[WARPS][SEGMENT];
  __shared__ __align__(16) float sums[WARPS][SEGMENT];
  __shared__ float4 scales[FOURS];
  wait_for_previous();
  let_next_start();
  int which = 0;
  while (which + 1 < p.matrices && static_cast<int>(blockIdx.x) >= p.of[which + 1].first) ++which;
  int tile = blockIdx.x - p.of[which].first;
  const int together = p.of[which].together;
  which -= tile % together;
  tile /= together;
  const Matrix& m = p.of[which];
  const int down = tile / m.across, right = tile - down * m.across;
  const int own = threadIdx.x, warp = own / 32, four = own % FOURS;
  const int row = down * SEGMENT + own / FOURS * 4, column = right * SEGMENT + 4 * four;
  const bool first_half = own % 32 < FOURS;
  float4 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = m.read(row + i, column);
  if (m.by_columns.scales) {
    const Known columns[4] = {
        of_warp(v[0].x, v[1].x, v[2].x, v[3].x), of_warp(v[0].y, v[1].y, v[2].y, v[3].y),
        of_warp(v[0].z, v[1].z, v[2].z, v[3].z), of_warp(v[0].w, v[1].w, v[2].w, v[3].w)};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first_half) known[warp][4 * four + i] = columns[i];
  }
  if (m.sums) {
    const float4 s = {
        sum_of_warp(v[0].x, v[1].x, v[2].x, v[3].x), sum_of_warp(v[0].y, v[1].y, v[2].y, v[3].y),
        sum_of_warp(v[0].z, v[1].z, v[2].z, v[3].z), sum_of_warp(v[0].w, v[1].w, v[2].w, v[3].w)};
    if (first_half) *reinterpret_cast<float4*>(&sums[warp][4 * four]) = s;
  }
  if (m.by_rows.scales) {
    const float s[4] = {of_row(v[0]), of_row(v[1]), of_row(v[2]), of_row(v[3])};
    float* const to = m.by_rows.scales + right * m.by_rows.lines + row;
    if (four == 0) *reinterpret_cast<float4*>(to) = {s[0], s[1], s[2], s[3]};
    float4 on_scale[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) on_scale[i] = scaled(v[i], {s[i], s[i], s[i], s[i]});
    m.put(m.by_rows, right, down, row, column, on_scale);
  }
  if (!m.by_columns.scales && !m.sums) return;
  __syncthreads();
  const int place = right * SEGMENT + own;
  if (own < SEGMENT && m.sums && place < m.columns) {
    float sum = 0.0f;
    for (int i = 0; i < WARPS; ++i) sum += sums[i][own];
    m.sums[static_cast<long long>(down) * m.columns + place] = sum;
  }
  if (!m.by_columns.scales) return;
  if (own < SEGMENT) {
    Known all = known[0][own];
    for (int i = 1; i < WARPS; ++i) all.add(known[i][own]);
    const float s = all.scale();
    reinterpret_cast<float*>(scales)[own] = m.by_columns.scales[down * m.by_columns.lines + place] = s;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = scaled(v[i], scales[four]);
  m.put(m.by_columns, down, right, row, column, v);
}

struct Bias {
  const float* sums;  // (blocks, columns)
  float* to;          // (columns)
  int blocks, columns;
};

// A bias' gradient: of 32 columns a block, each warp every eighth of the blocks' sums.
extern "C" __global__ void __launch_bounds__(THREADS) planes_bias(const __grid_constant__ Bias p) {
  __shared__ float sums[WARPS][32];
  wait_for_previous();
  let_next_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (column < p.columns) {
#pragma unroll 4
    for (int i = warp; i < p.blocks; i += WARPS)
      sum += p.sums[static_cast<long long>(i) * p.columns + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp || column >= p.columns) return;
  for (int i = 1; i < WARPS; ++i) sum += sums[i][lane];
  p.to[column] = sum;
}
