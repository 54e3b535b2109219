// Products of many groups of unequal sizes in one launch, 16-bit, for sm_80 and later. Behind
// instructions.h, groups.h and shares.h.
//
// A block computes a tile (TILE_M, TILE_N) of one group out of steps of 64 along the depth, of which
// STAGES are in shared memory or on their way there. Tiles lie there as in global memory: lines along
// the depth, or across it where TURNED, in chunks of 16 bytes, of which the eight that lie side by
// side change places with the line's number, so that matrices are read without conflicts. Lines come
// in copies of 16 bytes, of 4 where they begin at no more than 4, or number by number.

constexpr int STEP = 64;                        // numbers along the depth
constexpr int WARPS = WARPS_M * WARPS_N, THREADS = 32 * WARPS;
constexpr int PART_M = TILE_M / WARPS_M, PART_N = TILE_N / WARPS_N;  // of a warp
constexpr int FRAGMENTS_M = PART_M / 16, PAIRS_N = PART_N / 16;      // two fragments of b at once
constexpr int A_BYTES = TILE_M * STEP * 2, B_BYTES = TILE_N * STEP * 2;
constexpr int SAVED_AT = A_BYTES, B_AT = A_BYTES * (DERIVED ? 2 : 1), STAGE_BYTES = B_AT + B_BYTES;
constexpr int SPARE_AT = STAGES * STAGE_BYTES;  // of each line of each stage the word behind it
constexpr int PITCH = TILE_N + 8;  // of sums in shared memory: rows of a fragment share no bank

struct Matrix {
  const Number* from;
  int rows, depth;
  int pitch;  // numbers from a line to the next
  int unit;   // bytes of a copy; 2: words, which hold numbers of two lines
};

// Bytes that may be copied at once, of memory at addresses and distances of so many numbers, or'ed.
__device__ __forceinline__ int unit_of(u64 address, int numbers) {
  const u64 both = address | static_cast<u64>(numbers) * 2;
  return both % 16 == 0 ? 16 : both % 4 == 0 ? 4 : 2;
}

template <bool TURNED>
__device__ __forceinline__ Matrix matrix(u64 address, int rows, int depth, int pitch) {
  return {at(address), rows, depth, pitch, unit_of(address, (TURNED ? rows : depth) | pitch)};
}

// Where the i-th piece of BYTES lies: its line, its first byte there, and its place in a tile.
template <bool TURNED, int TILE, int BYTES>
struct Piece {
  static constexpr int LINE = (TURNED ? TILE : STEP) * 2, COUNT = TILE * STEP * 2 / BYTES;
  int line, byte, place;
  __device__ __forceinline__ explicit Piece(int i)
      : line(i / (LINE / BYTES)),
        byte(i % (LINE / BYTES) * BYTES),
        place(line * LINE + (byte / 16 ^ line % 8) * 16 + byte % 16) {}
};

template <bool TURNED, int TILE, int BYTES>
__device__ __forceinline__ void copy_tile(u32 tile, const Matrix& m, int row0, int k0) {
  typedef Piece<TURNED, TILE, BYTES> Here;
  const int lines = TURNED ? m.depth : m.rows, width = TURNED ? m.rows : m.depth;
  const int line0 = TURNED ? k0 : row0, first = TURNED ? row0 : k0;
#pragma unroll BYTES == 16 ? 4 : BYTES == 4 ? 1 : 2
  for (int i = threadIdx.x; i < Here::COUNT; i += THREADS) {
    const Here piece(i);
    const int line = line0 + piece.line, col = first + piece.byte / 2;
    const bool there = line < lines && col < width;
    const Number* from = there ? m.from + static_cast<u64>(line) * m.pitch + col : m.from;
    copy_async<BYTES>(tile + piece.place, from, there ? BYTES : 0);
  }
}

// The word that holds a number.
__device__ __forceinline__ const Number* even(const Number* from) {
  return from - reinterpret_cast<u64>(from) / 2 % 2;
}

// Whether a line begins within a word, at its second number.
__device__ __forceinline__ int begins_within(const Matrix& m, int line) {
  return (reinterpret_cast<u64>(m.from) / 2 + static_cast<u64>(line) * m.pitch) % 2;
}

// The place of the word behind a line of a tile in shared memory.
__device__ __forceinline__ u32 spare_of(u32 tile, u32 start, int line) {
  return start + SPARE_AT + (tile - start) / (STEP * 2) * 4 + line * 4;
}

// The words that hold the numbers of a tile. Each warp brings the lines whose pieces of 16 bytes are
// its own.
template <bool TURNED, int TILE>
__device__ __forceinline__ void copy_words(u32 tile, u32 start, const Matrix& m, int row0, int k0) {
  typedef Piece<TURNED, TILE, 16> Here;
  constexpr int WORDS = Here::LINE / 4, LINES = 128 / WORDS;  // lines of a warp at once
  const int lines = TURNED ? m.depth : m.rows, width = TURNED ? m.rows : m.depth;
  const int line0 = TURNED ? k0 : row0, first = TURNED ? row0 : k0;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto copy = [&](u32 to, int line, int word) {
    const int within = begins_within(m, line), number = first + 2 * word - within;
    const bool there = line < lines && max(number, first) < width && (word < WORDS || within);
    const Number* from = there ? m.from + (static_cast<u64>(line) * m.pitch + number) : even(m.from);
    copy_async<4>(to, from, there ? 4 : 0);
  };
#pragma unroll 1
  for (int begin = warp * LINES; begin < Here::COUNT * 16 / Here::LINE; begin += WARPS * LINES) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int line = begin + i * 32 / WORDS, word = (i * 32 + lane) % WORDS, byte = word * 4;
      copy(tile + line * Here::LINE + (byte / 16 ^ line % 8) * 16 + byte % 16, line0 + line, word);
    }
    if (lane < LINES) copy(spare_of(tile, start, begin + lane), line0 + begin + lane, WORDS);
  }
}

// Those words moved to where the numbers of their lines belong, zeros behind the last.
template <bool TURNED, int TILE>
__device__ __forceinline__ void align_tile(unsigned char* memory, u32 at, const Matrix& m, int row0,
                                           int k0) {
  typedef Piece<TURNED, TILE, 16> Here;
  constexpr int CHUNKS = Here::LINE / 16, BATCH = TILE_N == 128 && BLOCKS == 2 ? 1 : 4;  // registers
  static_assert(Here::COUNT % (THREADS * BATCH) == 0, "whole batches");
  const int width = TURNED ? m.rows : m.depth;
  const int line0 = TURNED ? k0 : row0, first = TURNED ? row0 : k0;
#pragma unroll 1
  for (int i = threadIdx.x; i < Here::COUNT; i += THREADS * BATCH) {
    uint4 v[BATCH];
    u32 spare[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const Here piece(i + j * THREADS);
      v[j] = *reinterpret_cast<const uint4*>(memory + at + piece.place);
      spare[j] = *reinterpret_cast<const u32*>(memory + spare_of(at, 0, piece.line));
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const Here piece(i + j * THREADS);
      const u32 beside = from_next_lane(v[j].x);
      const u32 behind = piece.byte / 16 == CHUNKS - 1 ? spare[j] : beside;
      const bool within = begins_within(m, line0 + piece.line);
      const int left = width - first - piece.byte / 2;
      const auto word = [&](u32 low, u32 high, int number) {
        const u32 both = within ? low >> 16 | high << 16 : low;
        return number + 1 < left ? both : number < left ? both & 0xffffu : 0u;
      };
      *reinterpret_cast<uint4*>(memory + at + piece.place) = {
          word(v[j].x, v[j].y, 0), word(v[j].y, v[j].z, 2), word(v[j].z, v[j].w, 4),
          word(v[j].w, behind, 6)};
    }
  }
}

// act' applied to two numbers of dy.
__device__ __forceinline__ u32 derived_pair(u32 dy, u32 saved) {
  const float low = wide(static_cast<u16>(saved)), high = wide(static_cast<u16>(saved >> 16));
  if (ACT == RELU) return dy & ((low <= 0.0f ? 0u : 0xffffu) | (high <= 0.0f ? 0u : 0xffff0000u));
  return pack(derived(wide(static_cast<u16>(dy)), low),
              derived(wide(static_cast<u16>(dy >> 16)), high));
}

template <bool WIDE>
struct Unit {
  typedef u32 Type;
};
template <>
struct Unit<true> {
  typedef uint4 Type;
};

__device__ __forceinline__ uint4 derived_unit(uint4 dy, uint4 saved) {
  return {derived_pair(dy.x, saved.x), derived_pair(dy.y, saved.y), derived_pair(dy.z, saved.z),
          derived_pair(dy.w, saved.w)};
}
__device__ __forceinline__ u32 derived_unit(u32 dy, u32 saved) { return derived_pair(dy, saved); }

// act' applied to those numbers of dy's tile that this thread has brought, which it sees first: several
// at a time, all read before the first is written. They are written to `out` as well, (depth, rows),
// where it is not null.
template <bool TURNED, int TILE, int BYTES>
__device__ __forceinline__ void derive_tile(unsigned char* tile, const Matrix& m, int row0, int k0,
                                            Number* out) {
  typedef Piece<TURNED, TILE, BYTES> Here;
  typedef typename Unit<BYTES == 16>::Type Type;
  constexpr int EACH = Here::COUNT / THREADS;
  constexpr int BATCH = ACT == RELU || ACT == LEAKY_RELU ? (EACH < 4 ? EACH : 4) : 1;
  static_assert(Here::COUNT % (THREADS * BATCH) == 0, "whole batches");
#pragma unroll 1
  for (int i = threadIdx.x; i < Here::COUNT; i += THREADS * BATCH) {
    Type dy[BATCH], saved[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const unsigned char* place = tile + Here(i + j * THREADS).place;
      dy[j] = *reinterpret_cast<const Type*>(place);
      saved[j] = *reinterpret_cast<const Type*>(place + SAVED_AT);
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const Here piece(i + j * THREADS);
      dy[j] = derived_unit(dy[j], saved[j]);
      *reinterpret_cast<Type*>(tile + piece.place) = dy[j];
      if (MODE == 2 && out) {
        const int line = k0 + piece.line, col = row0 + piece.byte / 2;
        Number* to = out + (static_cast<u64>(line) * m.rows + col);
        if (line >= m.depth || col >= m.rows) continue;
        if (BYTES == 4 || m.unit == 16) {
          *reinterpret_cast<Type*>(to) = dy[j];
          continue;
        }
        const Number* numbers = reinterpret_cast<const Number*>(tile + piece.place);
        for (int n = 0; n < 8; ++n)
          if (col + n < m.rows) to[n] = numbers[n];
      }
    }
  }
}

template <bool TURNED, int TILE>
__device__ __forceinline__ void fetch(u32 tile, u32 start, const Matrix& m, int row0, int k0) {
  if (m.unit == 16)
    copy_tile<TURNED, TILE, 16>(tile, m, row0, k0);
  else if (m.unit == 4)
    copy_tile<TURNED, TILE, 4>(tile, m, row0, k0);
  else
    copy_words<TURNED, TILE>(tile, start, m, row0, k0);
}

template <bool TURNED, int TILE>
__device__ __forceinline__ void derive(unsigned char* tile, const Matrix& m, int row0, int k0,
                                       Number* out) {
  if (m.unit == 4)
    derive_tile<TURNED, TILE, 4>(tile, m, row0, k0, out);
  else
    derive_tile<TURNED, TILE, 16>(tile, m, row0, k0, out);
}

// 16 rows from `row` and 16 numbers of the depth from `k` as four matrices: those of k to k + 8 first
// where ROWS_FIRST is false, else those of row to row + 8.
template <bool TURNED, int TILE, bool ROWS_FIRST>
__device__ __forceinline__ void fragment(u32 (&v)[4], u32 tile, int row, int k) {
  const int lane = threadIdx.x % 32, inner = lane % 8;
  const int one = lane / 8 % 2 * 8, two = lane / 16 * 8;  // of the second and of the third matrix
  row += ROWS_FIRST ? one : two;
  k += ROWS_FIRST ? two : one;
  const int line = (TURNED ? k : row) + inner, chunk = (TURNED ? row : k) / 8;
  load_matrices<TURNED>(v, tile + line * (TURNED ? TILE : STEP) * 2 + (chunk ^ line % 8) * 16);
}

__device__ __forceinline__ float both(u32 v) {
  return wide(static_cast<u16>(v)) + wide(static_cast<u16>(v >> 16));
}

// The sums in shared memory as results of rows (rows, cols) of `pitch` numbers, COUNT at once.
template <int COUNT>
__device__ __forceinline__ void finish(const float* sums, const Number* bias, Number* c, Number* pre,
                                       int rows, int cols, int pitch) {
  constexpr int PIECES = TILE_N / COUNT, WORDS = (COUNT + 1) / 2;
#pragma unroll COUNT == 1 && TILE_N < 128 ? 4 : 1
  for (int i = threadIdx.x; i < TILE_M * PIECES; i += THREADS) {
    const int row = i / PIECES, col = i % PIECES * COUNT;
    if (row >= rows || col >= cols) continue;
    float v[2 * WORDS] = {};
#pragma unroll
    for (int n = 0; n < COUNT; ++n)
      v[n] = sums[row * PITCH + col + n] + (MODE == 0 && bias ? wide(bias[col + n]) : 0.0f);
    const u64 place = static_cast<u64>(row) * pitch + col;
    const auto put = [&](Number* to) {
      u32 words[WORDS];
#pragma unroll
      for (int w = 0; w < WORDS; ++w) words[w] = pack(v[2 * w], v[2 * w + 1]);
      if constexpr (COUNT == 8)
        *reinterpret_cast<uint4*>(to + place) = {words[0], words[1], words[2], words[3]};
      else if constexpr (COUNT == 2)
        *reinterpret_cast<u32*>(to + place) = words[0];
      else
        to[place] = static_cast<u16>(words[0]);
    };
    if (MODE == 0 && SAVE_PRE) put(pre);
    if (MODE == 0) {
#pragma unroll
      for (int n = 0; n < COUNT; ++n) v[n] = activated(v[n]);
    }
    put(c);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
unequal_linear(const __grid_constant__ Groups groups, int count) {
  SHARED_MEMORY;
#if MODE == 1
  const int behind = static_cast<int>(blockIdx.x) - groups.tiles;
  if (behind >= 0) return add_shares<THREADS>(groups.shares, groups.shared, behind);
#endif
  const int g = group_of(groups, count, blockIdx.x);
  const int rows = groups.rows[g], cols = groups.cols[g], depth = groups.depth[g];
  const int across = max(1, (cols + TILE_N - 1) / TILE_N), down = (rows + TILE_M - 1) / TILE_M;
  const int number = blockIdx.x - groups.first[g], parts = MODE == 2 ? groups.parts[g] : 1;
  const int part = MODE == 2 ? number / (across * down) : 0, tile = number - part * across * down;
  const int row0 = tile / across * TILE_M, col0 = tile % across * TILE_N;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_w = warp / WARPS_N * PART_M, col_w = warp % WARPS_N * PART_N;

  const u32 start = shared_address(memory);
  const int a_width = A_TURNED ? rows : depth, b_width = B_TURNED ? cols : depth;
  Matrix a = matrix<A_TURNED>(groups.a[g], rows, depth, PITCH_OF(a, a_width)), saved = a;
  if (DERIVED) {  // both in the same pieces, by the same threads
    saved = matrix<A_TURNED>(groups.saved[g], rows, depth, a_width);
    a.unit = saved.unit = a.unit < saved.unit ? a.unit : saved.unit;
  }
  const Matrix b = matrix<B_TURNED>(groups.b[g], cols, depth, PITCH_OF(b, b_width));
  const int all = (depth + STEP - 1) / STEP, each = (all + parts - 1) / parts;
  const int step0 = part * each, steps = max(0, min(all - step0, each));
  Number* const out = MODE == 2 && DERIVED && col0 == 0 ? to(groups.bias[g]) : nullptr;
  const auto bring = [&](int step) {
    if (step < steps) {
      const u32 stage = start + step % STAGES * STAGE_BYTES;
      const int k0 = (step0 + step) * STEP;
      fetch<A_TURNED, TILE_M>(stage, start, a, row0, k0);
      if (DERIVED) fetch<A_TURNED, TILE_M>(stage + SAVED_AT, start, saved, row0, k0);
      fetch<B_TURNED, TILE_N>(stage + B_AT, start, b, col0, k0);
    }
    commit();
  };

  float acc[FRAGMENTS_M][2 * PAIRS_N][4] = {};
  const bool summing = MODE == 2 && col0 == 0 && col_w == 0 && groups.more[g];
  double sums[FRAGMENTS_M][2] = {};  // many numbers, of which little may be left
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) bring(step);
  for (int step = 0; step < steps; ++step) {
    wait<STAGES - 2>();
    const int at = step % STAGES * STAGE_BYTES, k0 = (step0 + step) * STEP;
    if (a.unit == 2 || b.unit == 2) __syncwarp();
    if (a.unit == 2) {
      align_tile<A_TURNED, TILE_M>(memory, at, a, row0, k0);
      if (DERIVED) align_tile<A_TURNED, TILE_M>(memory, at + SAVED_AT, saved, row0, k0);
    }
    if (b.unit == 2) align_tile<B_TURNED, TILE_N>(memory, at + B_AT, b, col0, k0);
    if (DERIVED) derive<A_TURNED, TILE_M>(memory + at, a, row0, k0, out);
    __syncthreads();
    bring(step + STAGES - 1);
    const u32 stage = start + at;
    float some[FRAGMENTS_M][2] = {};
#pragma unroll
    for (int k = 0; k < STEP; k += 16) {
      u32 left[FRAGMENTS_M][4], right[PAIRS_N][4];
#pragma unroll
      for (int i = 0; i < FRAGMENTS_M; ++i) {
        fragment<A_TURNED, TILE_M, true>(left[i], stage, row_w + 16 * i, k);
        if (summing) {  // over what the products see
          some[i][0] += both(left[i][0]) + both(left[i][2]);
          some[i][1] += both(left[i][1]) + both(left[i][3]);
        }
      }
#pragma unroll
      for (int j = 0; j < PAIRS_N; ++j)
        fragment<B_TURNED, TILE_N, false>(right[j], stage + B_AT, col_w + 16 * j, k);
#pragma unroll
      for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
        for (int j = 0; j < PAIRS_N; ++j) {
          multiply(acc[i][2 * j], left[i], right[j][0], right[j][1]);
          multiply(acc[i][2 * j + 1], left[i], right[j][2], right[j][3]);
        }
      }
    }
    if (summing) {
#pragma unroll
      for (int i = 0; i < FRAGMENTS_M; ++i) {
        sums[i][0] += some[i][0];
        sums[i][1] += some[i][1];
      }
    }
  }
  wait<0>();
  float* const share = reinterpret_cast<float*>(groups.c[g]) + part * share_of(rows, cols);
  if (summing) {  // four lanes hold the sums of a row
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        double sum = sums[i][half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const int row = row0 + row_w + 16 * i + 8 * half + lane / 4;
        if (lane % 4 == 0 && row < rows) {
          if (parts > 1)
            share[share_of_dw(rows, cols) + row] = static_cast<float>(sum);
          else
            to(groups.more[g])[row] = static_cast<u16>(pack(static_cast<float>(sum), 0.0f));
        }
      }
    }
  }
  if (MODE == 2 && parts > 1) {
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * PAIRS_N; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = row0 + row_w + 16 * i + 8 * half + lane / 4;
          const int col = col0 + col_w + 8 * j + lane % 4 * 2;
          float* at = share + static_cast<u64>(row) * cols + col;
          if (row >= rows || col >= cols) continue;
          if (cols % 2 == 0) {
            *reinterpret_cast<float2*>(at) = {acc[i][j][2 * half], acc[i][j][2 * half + 1]};
          } else {
            at[0] = acc[i][j][2 * half];
            if (col + 1 < cols) at[1] = acc[i][j][2 * half + 1];
          }
        }
      }
    }
    return;
  }

  __syncthreads();
  float* found = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * PAIRS_N; ++j) {
      float* at = found + (row_w + 16 * i + lane / 4) * PITCH + col_w + 8 * j + lane % 4 * 2;
      *reinterpret_cast<float2*>(at) = {acc[i][j][0], acc[i][j][1]};
      *reinterpret_cast<float2*>(at + 8 * PITCH) = {acc[i][j][2], acc[i][j][3]};
    }
  }
  __syncthreads();
  const u64 first = static_cast<u64>(row0) * cols + col0;
  const Number* bias = MODE == 0 && groups.bias[g] ? at(groups.bias[g]) + col0 : nullptr;
  Number *c = to(groups.c[g]) + first, *pre = to(groups.more[g]) + first;
  const int unit = unit_of(groups.c[g] | (SAVE_PRE ? groups.more[g] : 0), cols);
  if (unit == 16)
    finish<8>(found, bias, c, pre, rows - row0, cols - col0, cols);
  else if (unit == 4)
    finish<2>(found, bias, c, pre, rows - row0, cols - col0, cols);
  else
    finish<1>(found, bias, c, pre, rows - row0, cols - col0, cols);
}
