// Matrices of float32 as planes of float16 (planes.h).
//
// A block has 64 rows and 64 columns, 4 by 4 in each thread's registers. It splits them by rows, by
// columns, or both ways. A matrix may be derived from others, with the activation ACT (planes.h). It may be
// of several groups of rows, each of which begins with a block of its own: zeros lie between their planes.
// Of groups whose sizes only the device knows, a table says which rows a block has (Ragged).
// Sums over rows, a bias' gradient, are those of 64 rows here, of all in planes_bias.
//
// hopper_words.h, with IS_BF16 0, activations/cuda.h, hopper_async.h and planes.h come before this file.
// GROUPED 1: of several groups. RAGGED 1: some matrices' sizes are in the table.

constexpr int THREADS = 256, WARPS = THREADS / 32, FOURS = SEGMENT / 4;

__device__ __forceinline__ float4 scaled(float4 v, float4 s) {
  return {scaled(v.x, s.x), scaled(v.y, s.y), scaled(v.z, s.z), scaled(v.w, s.w)};
}

// Where planes of one way go.
struct Side {
  unsigned short* planes[4];  // (rows, pitch): high, low, and those of the second level
  float* scales;              // (segments, lines), lines a multiple of 64; null: this way is not wanted
  int* small;                 // (segments, lines / 64): HAS_SMALL, UNIFORM, SHARED
  long long lines;
};

struct Matrix {
  const float* from[3];  // x, saved, other: (rows, columns), columns side by side; null where not read
  float* sums;           // (blocks of 64 rows, columns) or null
  Side by_rows, by_columns;
  long long strides[3];  // of rows, in numbers
  long long groups_apart[3];
  int rows, columns, pitch;  // rows: of a group
  int wide;              // whether rows of numbers begin on 16 bytes, as those of planes do
  int first, across;     // its first block; its blocks beside each other
  int derivation;        // how it is derived
  int together;          // matrices up to the last with this first block, which take their blocks by turns
  int down;              // a group's blocks below each other
  int made;              // rows of planes: of several groups all that their blocks have
  int ragged;            // whether the table says which rows a block has

  // Numbers c to c + 3 of four rows of one of the matrices, 0 behind its ends. All are under way before the
  // first is looked at: no branch lies between.
  __device__ __forceinline__ void read(int which, Lines lines, int row, int c, float4 (&v)[4]) const {
    const long long stride = strides[which];
    const long long apart = GROUPED ? lines.group * groups_apart[which] : 0;
    const float* const numbers = from[which] + apart + (lines.first + row) * stride + c;
    const int rows = lines.rows;
    if (wide && c + 4 <= columns && row + 4 <= rows) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = *reinterpret_cast<const float4*>(numbers + i * stride);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto at = [&](int j) {
        return row + i < rows && c + j < columns ? numbers[i * stride + j] : 0.0f;
      };
      v[i] = {at(0), at(1), at(2), at(3)};
    }
  }

  // A thread's numbers.
  __device__ __forceinline__ void read(Lines lines, int row, int c, float4 (&v)[4]) const {
    read(0, lines, row, c, v);
    if (derivation == DERIVED_NONE) return;
    float4 more[4];
    if (derivation == DERIVED_GATE_GRADIENT) {
      read(2, lines, row, c, more);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        v[i] = {v[i].x * more[i].x, v[i].y * more[i].y, v[i].z * more[i].z, v[i].w * more[i].w};
    }
    read(1, lines, row, c, more);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = {derived(derivation, v[i].x, more[i].x, 1.0f), derived(derivation, v[i].y, more[i].y, 1.0f),
              derived(derivation, v[i].z, more[i].z, 1.0f), derived(derivation, v[i].w, more[i].w, 1.0f)};
  }

  // Planes of a level of such numbers on their scales.
  template <int kLevel>
  __device__ __forceinline__ void put(const Side& to, int row, int c, const float4 (&v)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + i >= made || c >= columns) continue;
      uint2 high, low;
      split<kLevel>(v[i].x, v[i].y, v[i].z, v[i].w, high, low);
      const long long at = static_cast<long long>(row + i) * pitch + c;
      *reinterpret_cast<uint2*>(to.planes[kLevel / 2 * 2] + at) = high;
      *reinterpret_cast<uint2*>(to.planes[kLevel / 2 * 2 + 1] + at) = low;
    }
  }

  // All planes of a thread's numbers, of which some may be `small`.
  __device__ __forceinline__ void put(const Side& to, int segment, int line, int row, int c,
                                      const float4 (&v)[4], bool small) const {
    if (small) put<1>(to, row, c, v);
    else put<0>(to, row, c, v);
    const bool found = __syncthreads_or(small);
    if (threadIdx.x == 0) to.small[segment * (to.lines / SEGMENT) + line] = found ? HAS_SMALL : 0;
    if (found) put<2>(to, row, c, v);
  }

  // All planes of a block on one scale.
  __device__ __forceinline__ void put_uniform(int down, int right, int row, int c, float s,
                                              float4 (&v)[4]) const {
    const int own = threadIdx.x;
    const bool shared = by_rows.scales;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = scaled(v[i], {s, s, s, s});
    if (by_rows.scales) {
      if (own < SEGMENT) by_rows.scales[right * by_rows.lines + down * SEGMENT + own] = s;
      if (own == 0) by_rows.small[right * (by_rows.lines / SEGMENT) + down] = UNIFORM;
      put<0>(by_rows, row, c, v);
    }
    if (by_columns.scales) {
      if (own < SEGMENT) by_columns.scales[down * by_columns.lines + right * SEGMENT + own] = s;
      if (own == 0)
        by_columns.small[down * (by_columns.lines / SEGMENT) + right] = UNIFORM | (shared ? SHARED : 0);
      if (!shared) put<0>(by_columns, row, c, v);
    }
  }
};

struct Params {
  Matrix of[5];
  Ragged groups;
  int matrices;
};

// Of a thread's row, which 16 lanes share.
template <class Fact>
__device__ __forceinline__ Fact of_row(float4 v) {
  Fact row;
  row.add(v.x), row.add(v.y), row.add(v.z), row.add(v.w);
#pragma unroll
  for (int apart = FOURS / 2; apart; apart /= 2) row.add_across(apart);
  return row;
}

// Of a thread's columns in its warp's rows, for other warps to read.
template <class Fact>
__device__ __forceinline__ void tell_columns(uint2 (&told)[SEGMENT], const float4 (&v)[4]) {
  const int lane = threadIdx.x % 32;
  Fact columns[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    columns[0].add(v[i].x), columns[1].add(v[i].y);
    columns[2].add(v[i].z), columns[3].add(v[i].w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    columns[i].add_across(FOURS);
    if (lane < FOURS) reinterpret_cast<Fact*>(told)[4 * lane + i] = columns[i];
  }
}

// Of a column, from what all warps told.
template <class Fact>
__device__ __forceinline__ Fact of_column(const uint2 (&told)[WARPS][SEGMENT], int column) {
  Fact all;
#pragma unroll
  for (const auto& warp : told) all.add(reinterpret_cast<const Fact*>(warp)[column]);
  return all;
}

// Of the block, from what its warps found.
__device__ __forceinline__ Span of_block(const uint2 (&found)[WARPS]) {
  Span all;
#pragma unroll
  for (const auto& warp : found) all.add(reinterpret_cast<const Span&>(warp));
  return all;
}

// The sum of a thread's four rows in one of its columns, and of those of the other half of the warp.
__device__ __forceinline__ float sum_of_warp(float x, float y, float z, float w) {
  const float sum = (x + y) + (z + w);
  return sum + __shfl_xor_sync(0xffffffffu, sum, FOURS);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) planes_split(const __grid_constant__ Params p) {
  __shared__ uint2 told[WARPS][SEGMENT];
  __shared__ __align__(16) float sums[WARPS][SEGMENT];
  __shared__ float4 scales[FOURS];
  __shared__ uint2 of_warps[WARPS];
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
  float4 v[4];
  if (RAGGED && m.ragged) {
    const Lines lines = p.groups.of_blocks()[down];
    if (lines.group < 0) {
      if (m.by_rows.scales && own == 0)
        m.by_rows.small[right * (m.by_rows.lines / SEGMENT) + down] = UNIFORM;
      return;
    }
    m.read(lines, own / FOURS * 4, column, v);
  } else {
    const int group = GROUPED ? down / m.down : 0;
    m.read({0, m.rows, group, 0}, row - group * m.down * SEGMENT, column, v);
  }
  settle(reinterpret_cast<float(&)[16]>(v));  // what made them needs no registers
  {
    Span own_span;
#pragma unroll
    for (const float4& x : v) own_span.add(x.x), own_span.add(x.y), own_span.add(x.z), own_span.add(x.w);
#pragma unroll
    for (int apart = 16; apart; apart /= 2) own_span.add_across(apart);
    if (own % 32 == 0) reinterpret_cast<Span*>(of_warps)[warp] = own_span;
  }
  if (m.sums) {
    const float4 s = {
        sum_of_warp(v[0].x, v[1].x, v[2].x, v[3].x), sum_of_warp(v[0].y, v[1].y, v[2].y, v[3].y),
        sum_of_warp(v[0].z, v[1].z, v[2].z, v[3].z), sum_of_warp(v[0].w, v[1].w, v[2].w, v[3].w)};
    if (own % 32 < FOURS) *reinterpret_cast<float4*>(&sums[warp][4 * four]) = s;
  }
  __syncthreads();
  const int place = right * SEGMENT + own;
  if (own < SEGMENT && m.sums && place < m.columns) {
    float sum = 0.0f;
    for (int i = 0; i < WARPS; ++i) sum += sums[i][own];
    m.sums[static_cast<long long>(down) * m.columns + place] = sum;
  }
  const Span all = of_block(of_warps);
  if (all.is_uniform()) {
    m.put_uniform(down, right, row, column, all.scale(), v);
    return;
  }
  if (m.by_columns.scales) tell_columns<Span>(told[warp], v);
  if (m.by_rows.scales) {
    float s[4];
    u32 least[4];
    bool tells = true, small = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Span span = of_row<Span>(v[i]);
      tells &= span.tells();
      s[i] = span.scale(), least[i] = span.least;
    }
    if (__any_sync(0xffffffffu, !tells)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i] = of_row<Known>(v[i]).scale();
    }
    float* const to = m.by_rows.scales + right * m.by_rows.lines + row;
    if (four == 0) *reinterpret_cast<float4*>(to) = {s[0], s[1], s[2], s[3]};
    float4 on_scale[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      small |= s[i] >= 0.0f && below(least[i], s[i]);
      on_scale[i] = scaled(v[i], {s[i], s[i], s[i], s[i]});
    }
    m.put(m.by_rows, right, down, row, column, on_scale, small);
  }
  if (!m.by_columns.scales) return;
  __syncthreads();
  Span span;
  if (own < SEGMENT) span = of_column<Span>(told, own);
  float s = span.scale();
  if (__syncthreads_or(!span.tells())) {
    tell_columns<Known>(told[warp], v);
    __syncthreads();
    if (own < SEGMENT) s = of_column<Known>(told, own).scale();
  }
  if (own < SEGMENT)
    reinterpret_cast<float*>(scales)[own] = m.by_columns.scales[down * m.by_columns.lines + place] = s;
  const bool small = __syncthreads_or(s >= 0.0f && below(span.least, s));
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = scaled(v[i], scales[four]);
  m.put(m.by_columns, down, right, row, column, v, small);
}

struct Bias {
  const float* sums;  // (groups, blocks, columns)
  float* to;          // (groups, columns)
  Ragged ragged;
  int blocks, columns, across;  // blocks: of a group; across: of this launch for a group
};

// A bias' gradient: of 32 columns a block, each warp every eighth of the blocks' sums.
extern "C" __global__ void __launch_bounds__(THREADS) planes_bias(const __grid_constant__ Bias p) {
  __shared__ float sums[WARPS][32];
  wait_for_previous();
  let_next_start();
  const int group = blockIdx.x / p.across, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = (blockIdx.x - group * p.across) * 32 + lane;
  const long long first = RAGGED ? p.ragged.blocks()[group] : static_cast<long long>(group) * p.blocks;
  const int blocks = RAGGED ? p.ragged.blocks()[group + 1] - static_cast<int>(first) : p.blocks;
  float sum = 0.0f;
  if (column < p.columns) {
#pragma unroll 4
    for (int i = warp; i < blocks; i += WARPS)
      sum += p.sums[(first + i) * p.columns + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp || column >= p.columns) return;
  for (int i = 1; i < WARPS; ++i) sum += sums[i][lane];
  p.to[static_cast<long long>(group) * p.columns + column] = sum;
}
