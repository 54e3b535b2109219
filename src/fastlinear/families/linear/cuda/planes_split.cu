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
constexpr int COLUMNS = 64, STRIPES = THREADS / COLUMNS;  // of a block of columns

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

  __device__ __forceinline__ void add(const Line& other) {
    largest = max(largest, other.largest);
    exponents += other.exponents;
    count += other.count;
  }

  // e, or UNSPLIT.
  __device__ __forceinline__ int exponent() const {
    const int top = largest >> 23;
    const bool narrow = static_cast<long long>(top) * count - exponents <= static_cast<long long>(MEAN_GAP) * count;
    return top == 255 || !narrow ? UNSPLIT : max(top - 127 - TOP, LEAST);
  }
};

// Two numbers' planes, a pair in a word each.
__device__ __forceinline__ void split(float x, float y, float inverse, u32& high, u32& low) {
  x *= inverse;
  y *= inverse;
  high = pack(x, y);
  float a, b;
  unpack(high, a, b);
  low = pack((x - a) * 2048.0f, (y - b) * 2048.0f);
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
  int wide;                    // whether rows begin on 16 bytes, of numbers and of planes
  int first;                   // its first block
  int chunk_rows, chunks;      // of columns: rows of a block, blocks of 64 columns
  long long parts_at;          // where the blocks' parts begin
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
  const bool exists = row < m.rows;
  const float* const from = m.from + (exists ? row : 0) * m.stride;
  Line line{0, 0, 0};
  if (exists) {
    if (m.wide) {
      for (int c = 4 * lane; c < m.columns; c += 4 * LANES) {
        if (c + 4 <= m.columns) {
          const float4 v = *reinterpret_cast<const float4*>(from + c);
          line.add(v.x), line.add(v.y), line.add(v.z), line.add(v.w);
        } else {
          for (int i = c; i < m.columns; ++i) line.add(from[i]);
        }
      }
    } else {
      for (int c = lane; c < m.columns; c += LANES) line.add(from[c]);
    }
  }
#pragma unroll
  for (int apart = 16; apart; apart /= 2)
    line.add(Line{__shfl_xor_sync(0xffffffffu, line.largest, apart),
                  static_cast<int>(__shfl_xor_sync(0xffffffffu, static_cast<u32>(line.exponents), apart)),
                  static_cast<int>(__shfl_xor_sync(0xffffffffu, static_cast<u32>(line.count), apart))});
  if constexpr (LANES > 32) {
    if (lane % 32 == 0) parts[threadIdx.x / 32] = line;
    __syncthreads();
    line = parts[0];
    for (int i = 1; i < THREADS / 32; ++i) line.add(parts[i]);
  }
  if (!exists) return;
  const int e = line.exponent();
  const float inverse = inverse_of(e);
  if (lane == 0) m.exponents[row] = static_cast<short>(e);
  unsigned short* const high = m.high + static_cast<long long>(row) * m.pitch;
  unsigned short* const low = m.low + static_cast<long long>(row) * m.pitch;
  if (m.wide) {
    for (int c = 4 * lane; c + 4 <= m.columns; c += 4 * LANES) {
      float4 v = *reinterpret_cast<const float4*>(from + c);
      if (e == UNSPLIT) v = {0.0f, 0.0f, 0.0f, 0.0f};  // and not NaN
      uint2 h, l;
      split(v.x, v.y, inverse, h.x, l.x);
      split(v.z, v.w, inverse, h.y, l.y);
      *reinterpret_cast<uint2*>(high + c) = h;
      *reinterpret_cast<uint2*>(low + c) = l;
    }
  }
  for (int c = (m.wide ? m.columns / 4 * 4 : 0) + lane; c < m.columns; c += LANES) {
    u32 h, l;
    split(e == UNSPLIT ? 0.0f : from[c], 0.0f, inverse, h, l);
    high[c] = static_cast<unsigned short>(h);
    low[c] = static_cast<unsigned short>(l);
  }
}

// ---------------------------------------------------------------- one e for each column

// A block's 64 columns of some rows.
struct Patch {
  const Matrix& m;
  int column, begin, end, stripe, chunk;

  __device__ __forceinline__ explicit Patch(const Params& p)
      : m(p.of[p.matrices > 1 && static_cast<int>(blockIdx.x) >= p.of[1].first]) {
    const int at = blockIdx.x - m.first;
    chunk = at % m.chunks;
    column = at / m.chunks * COLUMNS + threadIdx.x % COLUMNS;
    stripe = threadIdx.x / COLUMNS;
    begin = chunk * m.chunk_rows;
    end = min(begin + m.chunk_rows, m.rows);
  }
};

// The first launch: what each block knows of its columns.
extern "C" __global__ void __launch_bounds__(THREADS) planes_columns(const __grid_constant__ Params p) {
  __shared__ Line parts[THREADS];
  wait_for_previous();
  let_next_start();
  const Patch t(p);
  Line line{0, 0, 0};
  if (t.column < t.m.columns) {
    const float* from = t.m.from + t.column;
#pragma unroll 4
    for (int r = t.begin + t.stripe; r < t.end; r += STRIPES) line.add(from[r * t.m.stride]);
  }
  parts[threadIdx.x] = line;
  __syncthreads();
  if (t.stripe > 0 || t.column >= t.m.columns) return;
  for (int i = 1; i < STRIPES; ++i) line.add(parts[i * COLUMNS + threadIdx.x]);
  p.parts[t.m.parts_at + static_cast<long long>(t.chunk) * t.m.columns + t.column] = line;
}

// The second: their planes.
extern "C" __global__ void __launch_bounds__(THREADS) planes_split_columns(const __grid_constant__ Params p) {
  __shared__ Line parts[THREADS];
  wait_for_previous();
  let_next_start();
  const Patch t(p);
  const bool exists = t.column < t.m.columns;
  Line line{0, 0, 0};
  if (exists) {
    const Line* from = p.parts + t.m.parts_at + t.column;
    for (int i = t.stripe; i < t.m.chunks; i += STRIPES)
      line.add(from[static_cast<long long>(i) * t.m.columns]);
  }
  parts[threadIdx.x] = line;
  __syncthreads();
  if (!exists) return;
  line = parts[threadIdx.x % COLUMNS];
  for (int i = 1; i < STRIPES; ++i) line.add(parts[i * COLUMNS + threadIdx.x % COLUMNS]);
  const int e = line.exponent();
  const float inverse = inverse_of(e);
  if (t.chunk == 0 && t.stripe == 0) t.m.exponents[t.column] = static_cast<short>(e);
#pragma unroll 4
  for (int r = t.begin + t.stripe; r < t.end; r += STRIPES) {
    const float v = e == UNSPLIT ? 0.0f : t.m.from[r * t.m.stride + t.column];
    u32 h, l;
    split(v, 0.0f, inverse, h, l);
    const long long at = static_cast<long long>(r) * t.m.pitch + t.column;
    t.m.high[at] = static_cast<unsigned short>(h);
    t.m.low[at] = static_cast<unsigned short>(l);
  }
}
