// Numbers of float32 as two planes of float16, which tensor cores multiply at full speed.
//
//   x = 2^e (h + l / 2^11)
//
// e is one for each row, or for each column, and puts the largest number near 2^15. A number up to
// 2^29 times smaller keeps 22 bits; below that h and l become coarse together: 2^-50 of the largest
// is the last step. A line (row or column) that holds an infinity or NaN, or whose numbers are small
// beside its largest one in the mean, gets no planes but UNSPLIT in place of e: who multiplies then
// reads the numbers themselves.
//
// hopper_words.h, with IS_BF16 0, comes before this file. Macros from the host: LANES that share a row,
// 32 or 256.

constexpr int UNSPLIT = 0x7fff;
constexpr int TOP = 14;            // where the largest number of a line goes: 2^14 to 2^15
constexpr int LEAST = -126;        // the smallest e: 2^e and its inverse are normal
constexpr int MEAN_GAP = 24;       // bits the mean number may lie below the largest
constexpr int THREADS = 256;
constexpr int COLUMNS = 64, FOURS = COLUMNS / 4, STRIPES = THREADS / FOURS;  // of a block of columns

// What is known of the numbers of a line, or of some of them.
struct Line {
  u32 largest;  // of their bits without the sign: the order of magnitudes
  int exponents, count;  // of those that are not 0: the sum of exponents as they are stored, how many

  __device__ __forceinline__ void add(float x) {
    const u32 bits = __float_as_uint(x) & 0x7fffffffu;
    largest = max(largest, bits);
    exponents += bits >> 23;
    count += bits != 0;
  }

  __device__ __forceinline__ void add(float4 v) { add(v.x), add(v.y), add(v.z), add(v.w); }

  __device__ __forceinline__ void add(const Line& other) {
    largest = max(largest, other.largest);
    exponents += other.exponents;
    count += other.count;
  }

  // That of a lane so many from this one.
  __device__ __forceinline__ Line across(int apart) const {
    const auto told = [&](u32 word) { return __shfl_xor_sync(0xffffffffu, word, apart); };
    return {told(largest), static_cast<int>(told(exponents)), static_cast<int>(told(count))};
  }

  // e, or UNSPLIT.
  __device__ __forceinline__ int exponent() const {
    const int top = largest >> 23;
    const bool narrow = static_cast<long long>(top) * count - exponents <= static_cast<long long>(MEAN_GAP) * count;
    return top == 255 || !narrow ? UNSPLIT : max(top - 127 - TOP, LEAST);
  }
};

// Two numbers' planes, a pair in a word each.
__device__ __forceinline__ void split(float2 x, float2 inverse, u32& high, u32& low) {
  x.x *= inverse.x;
  x.y *= inverse.y;
  high = pack(x.x, x.y);
  float a, b;
  unpack(high, a, b);
  low = pack((x.x - a) * 2048.0f, (x.y - b) * 2048.0f);
}

__device__ __forceinline__ float inverse_of(int e) {  // of a line without planes: 0, for zeros
  return e == UNSPLIT ? 0.0f : __uint_as_float(static_cast<u32>(127 - e) << 23);
}

struct Matrix {
  const float* from;           // (rows, columns), columns side by side
  unsigned short *high, *low;  // (rows, pitch)
  short* exponents;            // of lines
  long long stride;            // of rows, in numbers
  int rows, columns, pitch;
  int wide;                    // whether rows of numbers begin on 16 bytes, as those of planes do
  int first;                   // its first block
  int chunk_rows, chunks;      // of columns: rows of a block, blocks of 64 columns
  long long parts_at;          // where the blocks' parts begin

  // Numbers c to c + 3 of a row, 0 behind its end.
  __device__ __forceinline__ float4 four(const float* row, int c) const {
    if (wide && c + 4 <= columns) return *reinterpret_cast<const float4*>(row + c);
    const auto at = [&](int i) { return i < columns ? row[i] : 0.0f; };
    return {at(c), at(c + 1), at(c + 2), at(c + 3)};
  }

  // Their planes; of a line without, zeros and not NaN.
  __device__ __forceinline__ void put(int row, int c, float4 v, const int (&e)[4]) const {
    const auto kept = [](float x, int exponent) { return exponent == UNSPLIT ? 0.0f : x; };
    const float2 left{kept(v.x, e[0]), kept(v.y, e[1])}, right{kept(v.z, e[2]), kept(v.w, e[3])};
    uint2 h, l;
    split(left, {inverse_of(e[0]), inverse_of(e[1])}, h.x, l.x);
    split(right, {inverse_of(e[2]), inverse_of(e[3])}, h.y, l.y);
    const long long at = static_cast<long long>(row) * pitch + c;
    *reinterpret_cast<uint2*>(high + at) = h;
    *reinterpret_cast<uint2*>(low + at) = l;
  }
};

struct Params {
  Matrix of[2];
  Line* parts;   // chunk by chunk of each column, first matrix first
  int matrices;
};

// Rows of up to two matrices, LANES of a block to each.
extern "C" __global__ void __launch_bounds__(THREADS) planes_split_rows(const __grid_constant__ Params p) {
  __shared__ Line parts[THREADS / 32];
  wait_for_previous();
  let_next_start();
  const Matrix& m = p.of[p.matrices > 1 && static_cast<int>(blockIdx.x) >= p.of[1].first];
  const int lane = threadIdx.x % LANES;
  const int row = (blockIdx.x - m.first) * (THREADS / LANES) + threadIdx.x / LANES;
  const int columns = row < m.rows ? m.columns : 0;
  const float* const from = m.from + (columns ? row : 0) * m.stride;
  Line line{0, 0, 0};
#pragma unroll 2
  for (int c = 4 * lane; c < columns; c += 4 * LANES) line.add(m.four(from, c));
#pragma unroll
  for (int apart = 16; apart; apart /= 2) line.add(line.across(apart));
  if constexpr (LANES > 32) {
    if (lane % 32 == 0) parts[threadIdx.x / 32] = line;
    __syncthreads();
    line = parts[0];
    for (int i = 1; i < THREADS / 32; ++i) line.add(parts[i]);
  }
  const int e = line.exponent(), same[4] = {e, e, e, e};
  if (columns && lane == 0) m.exponents[row] = static_cast<short>(e);
#pragma unroll 2
  for (int c = 4 * lane; c < columns; c += 4 * LANES) m.put(row, c, m.four(from, c), same);
}

// ---------------------------------------------------------------- one e for each column

// A block's 64 columns of some rows, of which a thread has four.
struct Patch {
  const Matrix& m;
  int column, begin, end, four, stripe, chunk;

  __device__ __forceinline__ Patch(const Params& p, int block)
      : m(p.of[p.matrices > 1 && block >= p.of[1].first]) {
    const int at = block - m.first;
    four = threadIdx.x % FOURS;
    stripe = threadIdx.x / FOURS;
    chunk = at % m.chunks;
    column = at / m.chunks * COLUMNS + 4 * four;
    begin = chunk * m.chunk_rows + stripe;
    end = column < m.columns ? min((chunk + 1) * m.chunk_rows, m.rows) : 0;
  }

  __device__ __forceinline__ float4 row(int r) const { return m.four(m.from + r * m.stride, column); }
};

// What a block's threads know together of column `column` of its 64; with __syncthreads.
__device__ __forceinline__ Line together(Line (&parts)[STRIPES][COLUMNS], int column) {
  __syncthreads();
  Line line = parts[0][column];
  for (int i = 1; i < STRIPES; ++i) line.add(parts[i][column]);
  return line;
}

// The first launch: what each block knows of its columns.
extern "C" __global__ void __launch_bounds__(THREADS) planes_columns(const __grid_constant__ Params p) {
  __shared__ Line parts[STRIPES][COLUMNS];
  wait_for_previous();
  let_next_start();
  const Patch t(p, blockIdx.x);
  Line lines[4] = {};
#pragma unroll 4
  for (int r = t.begin; r < t.end; r += STRIPES) {
    const float4 v = t.row(r);
    lines[0].add(v.x), lines[1].add(v.y), lines[2].add(v.z), lines[3].add(v.w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) parts[t.stripe][4 * t.four + i] = lines[i];
  const int own = threadIdx.x % COLUMNS, column = t.column - 4 * t.four + own;
  const Line line = together(parts, own);
  if (threadIdx.x < COLUMNS && column < t.m.columns)
    p.parts[t.m.parts_at + static_cast<long long>(t.chunk) * t.m.columns + column] = line;
}

// The second: their planes, the last block's first, which may still be in L2.
extern "C" __global__ void __launch_bounds__(THREADS) planes_split_columns(const __grid_constant__ Params p) {
  __shared__ Line parts[STRIPES][COLUMNS];
  __shared__ int exponents[COLUMNS];
  wait_for_previous();
  let_next_start();
  const Patch t(p, gridDim.x - 1 - blockIdx.x);
  Line lines[4] = {};
  for (int c = t.stripe; c < t.m.chunks; c += STRIPES) {
    const Line* from = p.parts + t.m.parts_at + static_cast<long long>(c) * t.m.columns + t.column;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (t.column + i < t.m.columns) lines[i].add(from[i]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) parts[t.stripe][4 * t.four + i] = lines[i];
  const int own = threadIdx.x % COLUMNS, column = t.column - 4 * t.four + own;
  const int found = together(parts, own).exponent();
  if (threadIdx.x < COLUMNS) {
    exponents[own] = found;
    if (t.chunk == 0 && column < t.m.columns) t.m.exponents[column] = static_cast<short>(found);
  }
  __syncthreads();
  const int* const of = exponents + 4 * t.four;
  const int e[4] = {of[0], of[1], of[2], of[3]};
#pragma unroll 4
  for (int r = t.begin; r < t.end; r += STRIPES) t.m.put(r, t.column, t.row(r), e);
}
