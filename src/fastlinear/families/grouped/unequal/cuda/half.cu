// Products of many groups of unequal sizes in one launch, 16-bit, for sm_80 and later. Behind
// instructions.h, groups.h and shares.h.
//
// A block computes a tile (TILE_M, TILE_N) of one group out of steps of 64 along the depth, of which
// STAGES are in shared memory or on their way there. Tiles lie there as in global memory: lines along
// the depth, or across it where TURNED, in chunks of 16 bytes, of which the eight that lie side by
// side change places with the line's number, so that matrices are read without conflicts. Lines come
// in copies of 16 bytes. Where some begin anywhere (ODD) the chunks of global memory that hold them
// come, one more a line, and numbers are moved into place in shared memory; where only memory begins
// anywhere they come number by number.

constexpr int STEP = 64;                        // numbers along the depth
constexpr int WARPS = WARPS_M * WARPS_N, THREADS = 32 * WARPS;
constexpr int PART_M = TILE_M / WARPS_M, PART_N = TILE_N / WARPS_N;  // of a warp
constexpr int FRAGMENTS_M = PART_M / 16, PAIRS_N = PART_N / 16;      // two fragments of b at once
constexpr int A_BYTES = TILE_M * STEP * 2, B_BYTES = TILE_N * STEP * 2;
constexpr int SAVED_AT = A_BYTES, B_AT = A_BYTES * (DERIVED ? 2 : 1), STAGE_BYTES = B_AT + B_BYTES;
constexpr int SPARE_AT = STAGES * STAGE_BYTES;  // of each line of each stage the chunk behind it
constexpr int PITCH = TILE_N + 8;  // of sums in shared memory: rows of a fragment share no bank

struct Matrix {
  const Number* from;
  int rows, depth;
  int pitch;  // numbers from a line to the next
  bool whole;  // lines begin at 16 bytes
};

// Bytes that may be written at once, to memory at addresses and distances of so many numbers, or'ed.
__device__ __forceinline__ int unit_of(u64 address, int numbers) {
  const u64 both = address | static_cast<u64>(numbers) * 2;
  return both % 16 == 0 ? 16 : both % 4 == 0 ? 4 : 2;
}

template <bool TURNED>
__device__ __forceinline__ Matrix matrix(u64 address, int rows, int depth, int pitch) {
  return {at(address), rows, depth, pitch,
          unit_of(address, (TURNED ? rows : depth) | pitch) == 16};
}

// Where the i-th chunk lies: its line, its first byte there, and its place in a tile.
template <bool TURNED, int TILE>
struct Piece {
  static constexpr int LINE = (TURNED ? TILE : STEP) * 2, COUNT = TILE * STEP * 2 / 16;
  static constexpr int CHUNKS = LINE / 16;  // of a line
  int line, byte, place;
  __device__ __forceinline__ explicit Piece(int i)
      : line(i / CHUNKS), byte(i % CHUNKS * 16), place(line * LINE + (byte / 16 ^ line % 8) * 16) {}
};

template <bool TURNED, int TILE>
__device__ __forceinline__ void copy_tile(u32 tile, const Matrix& m, int row0, int k0) {
  typedef Piece<TURNED, TILE> Here;
  const int lines = TURNED ? m.depth : m.rows, width = TURNED ? m.rows : m.depth;
  const int line0 = TURNED ? k0 : row0, first = TURNED ? row0 : k0;
#pragma unroll 4
  for (int i = threadIdx.x; i < Here::COUNT; i += THREADS) {
    const Here piece(i);
    const int line = line0 + piece.line, col = first + piece.byte / 2;
    const bool there = line < lines && col < width;
    const Number* from = there ? m.from + static_cast<u64>(line) * m.pitch + col : m.from;
    copy_async(tile + piece.place, from, there ? 16 : 0);
  }
}

// The same number by number.
template <bool TURNED, int TILE>
__device__ __forceinline__ void copy_numbers(u32 tile, const Matrix& m, int row0, int k0) {
  typedef Piece<TURNED, TILE> Here;
  const int lines = TURNED ? m.depth : m.rows, width = TURNED ? m.rows : m.depth;
  const int line0 = TURNED ? k0 : row0, first = TURNED ? row0 : k0;
#pragma unroll 1
  for (int i = threadIdx.x; i < Here::COUNT; i += THREADS) {
    const Here piece(i);
    const int line = line0 + piece.line, col = first + piece.byte / 2;
    const int left = line < lines ? width - col : 0;
    const Number* from = m.from + (static_cast<u64>(line) * m.pitch + col);
#pragma unroll 1
    for (int n = 0; n < 8; n += 2) {
      const u32 low = n < left ? from[n] : 0, high = n + 1 < left ? from[n + 1] : 0;
      store_shared(tile + piece.place + 2 * n, low | high << 16);
    }
  }
}

// Bytes between the last place of 16 bytes in front of a line and its first number.
__device__ __forceinline__ int skipped(const Matrix& m, int line) {
  return (static_cast<u32>(reinterpret_cast<u64>(m.from)) + static_cast<u32>(line) * m.pitch * 2) % 16;
}

// The place of the chunk behind a line of a tile in shared memory.
__device__ __forceinline__ u32 spare_of(u32 tile, u32 start, int line) {
  return start + SPARE_AT + (tile - start) / (STEP * 2) * 16 + line * 16;
}

// The chunks of global memory that hold the numbers of a tile, zeros behind the last. Each warp brings
// the lines whose chunks are its own.
template <bool TURNED, int TILE>
__device__ __forceinline__ void copy_chunks(u32 tile, u32 start, const Matrix& m, int row0, int k0) {
  typedef Piece<TURNED, TILE> Here;
  const int lines = TURNED ? m.depth : m.rows, width = TURNED ? m.rows : m.depth;
  const int line0 = TURNED ? k0 : row0, first = TURNED ? row0 : k0, lane = threadIdx.x % 32;
  const auto copy = [&](u32 to, int line, int byte) {
    const int within = skipped(m, line), left = 2 * (width - first) + within - byte;
    const bool there = line < lines && left > 0 && (byte < Here::LINE || within);
    const u64 begin = reinterpret_cast<u64>(m.from), base = begin - begin % 16;
    const u64 from = begin + (static_cast<u64>(line) * m.pitch + first) * 2 + byte - within;
    copy_async(to, reinterpret_cast<const void*>(there ? from : base), there ? min(left, 16) : 0);
  };
#pragma unroll 2
  for (int i = threadIdx.x; i < Here::COUNT; i += THREADS) {
    const Here piece(i);
    copy(tile + piece.place, line0 + piece.line, piece.byte);
    const int line = i / 32 * (32 / Here::CHUNKS) + lane;
    if (lane < 32 / Here::CHUNKS) copy(spare_of(tile, start, line), line0 + line, Here::LINE);
  }
}

// Those numbers moved to where they belong.
template <bool TURNED, int TILE>
__device__ __forceinline__ void align_tile(unsigned char* memory, u32 at, const Matrix& m, int line0) {
  typedef Piece<TURNED, TILE> Here;
#pragma unroll 1
  for (int i = threadIdx.x; i < Here::COUNT; i += THREADS) {
    const Here piece(i);
    const uint4 v = *reinterpret_cast<const uint4*>(memory + at + piece.place);
    uint4 next = {from_next_lane(v.x), from_next_lane(v.y), from_next_lane(v.z), from_next_lane(v.w)};
    if (piece.byte == Here::LINE - 16)
      next = *reinterpret_cast<const uint4*>(memory + spare_of(at, 0, piece.line));
    u32 words[8] = {v.x, v.y, v.z, v.w, next.x, next.y, next.z, next.w};
    const int within = skipped(m, line0 + piece.line);
#pragma unroll
    for (int w = 0; w < 6; ++w) words[w] = within & 8 ? words[w + 2] : words[w];
#pragma unroll
    for (int w = 0; w < 5; ++w) words[w] = within & 4 ? words[w + 1] : words[w];
#pragma unroll
    for (int w = 0; w < 4; ++w)
      words[w] = (static_cast<u64>(words[w + 1]) << 32 | words[w]) >> (within & 2) * 8;
    *reinterpret_cast<uint4*>(memory + at + piece.place) = {words[0], words[1], words[2], words[3]};
  }
}

// act' applied to two numbers of dy.
__device__ __forceinline__ u32 derived_pair(u32 dy, u32 saved) {
  const float low = wide(static_cast<u16>(saved)), high = wide(static_cast<u16>(saved >> 16));
  if (ACT == ACT_RELU) return dy & ((low <= 0.0f ? 0u : 0xffffu) | (high <= 0.0f ? 0u : 0xffff0000u));
  return pack(graded(wide(static_cast<u16>(dy)), low),
              graded(wide(static_cast<u16>(dy >> 16)), high));
}

__device__ __forceinline__ uint4 derived_chunk(uint4 dy, uint4 saved) {
  return {derived_pair(dy.x, saved.x), derived_pair(dy.y, saved.y), derived_pair(dy.z, saved.z),
          derived_pair(dy.w, saved.w)};
}

// The first `count` of eight numbers, by words of memory.
__device__ __forceinline__ void write(Number* to, uint4 v, int count) {
  const u32 words[5] = {v.x, v.y, v.z, v.w, 0};
  const int within = reinterpret_cast<u64>(to) / 2 % 2, left = min(count, 8) - within;
  if (within && count > 0) to[0] = static_cast<u16>(v.x);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const u32 both = (static_cast<u64>(words[w + 1]) << 32 | words[w]) >> within * 16;
    Number* here = to + within + 2 * w;
    if (2 * w + 1 < left)
      *reinterpret_cast<u32*>(here) = both;
    else if (2 * w < left)
      *here = static_cast<u16>(both);
  }
}

// act' applied to those chunks of dy's tile that this thread has brought, which it sees first: several
// at a time, all read before the first is written. They are written to `out` as well, (depth, rows),
// where it is not null.
template <bool TURNED, int TILE>
__device__ __forceinline__ void derive(unsigned char* tile, const Matrix& m, int row0, int k0,
                                       Number* out) {
  typedef Piece<TURNED, TILE> Here;
  constexpr int EACH = Here::COUNT / THREADS;
  constexpr int BATCH = ACT == ACT_RELU || ACT == ACT_LEAKY_RELU ? (EACH < 4 ? EACH : 4) : 1;
  static_assert(Here::COUNT % (THREADS * BATCH) == 0, "whole batches");
#pragma unroll 1
  for (int i = threadIdx.x; i < Here::COUNT; i += THREADS * BATCH) {
    uint4 dy[BATCH], saved[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const unsigned char* place = tile + Here(i + j * THREADS).place;
      dy[j] = *reinterpret_cast<const uint4*>(place);
      saved[j] = *reinterpret_cast<const uint4*>(place + SAVED_AT);
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const Here piece(i + j * THREADS);
      dy[j] = derived_chunk(dy[j], saved[j]);
      *reinterpret_cast<uint4*>(tile + piece.place) = dy[j];
      if (MODE == 2 && WRITES && out) {
        const int line = k0 + piece.line, col = row0 + piece.byte / 2;
        Number* to = out + (static_cast<u64>(line) * m.rows + col);
        if (line >= m.depth || col >= m.rows) continue;
        if (m.rows % 8 == 0)
          *reinterpret_cast<uint4*>(to) = dy[j];
        else
          write(to, dy[j], m.rows - col);
      }
    }
  }
}

template <bool TURNED, int TILE>
__device__ __forceinline__ void fetch(u32 tile, u32 start, const Matrix& m, int row0, int k0) {
  if (m.whole)
    copy_tile<TURNED, TILE>(tile, m, row0, k0);
  else if (ODD)
    copy_chunks<TURNED, TILE>(tile, start, m, row0, k0);
  else
    copy_numbers<TURNED, TILE>(tile, m, row0, k0);
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
  constexpr int PIECES = TILE_N / COUNT, WORDS = COUNT / 2;
#pragma unroll 1
  for (int i = threadIdx.x; i < TILE_M * PIECES; i += THREADS) {
    const int row = i / PIECES, col = i % PIECES * COUNT;
    if (row >= rows || col >= cols) continue;
    float v[COUNT];
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
      else
        *reinterpret_cast<u32*>(to + place) = words[0];
    };
    if (MODE == 0 && SAVE_PRE) put(pre);
    if (MODE == 0) {
#pragma unroll
      for (int n = 0; n < COUNT; ++n) v[n] = act(v[n]);
    }
    put(c);
  }
}

// The same where rows begin anywhere: a word of memory a thread, always the same of a row. Where that
// holds the row's first number behind another's, it stands for the last of the tile as well.
__device__ __forceinline__ void finish_words(const float* sums, const Number* bias, Number* c,
                                             Number* pre, int rows, int cols, int pitch) {
  constexpr int WORDS = TILE_N / 2;
  static_assert(THREADS % WORDS == 0, "whole rows");
  const int word = threadIdx.x % WORDS;
  if (2 * word > cols) return;
  const auto put = [&](Number* to, const float* from, int col, int count) {
    const auto value = [&](int n) {
      return from[n] + (MODE == 0 && bias ? wide(bias[col + n]) : 0.0f);
    };
    float v[2] = {value(0), count > 1 ? value(1) : 0.0f};
    const auto store = [&](Number* at) {
      const u32 both = pack(v[0], v[1]);
      if (count > 1)
        *reinterpret_cast<u32*>(at) = both;
      else
        *at = static_cast<u16>(both);
    };
    if (MODE == 0 && SAVE_PRE) store(pre + (to - c));
    if (MODE == 0) v[0] = act(v[0]), v[1] = act(v[1]);
    store(to);
  };
#pragma unroll 1
  for (int row = threadIdx.x / WORDS; row < min(rows, TILE_M); row += THREADS / WORDS) {
    Number* to = c + static_cast<u64>(row) * pitch;
    const int within = reinterpret_cast<u64>(to) / 2 % 2, col = max(0, 2 * word - within);
    const int count = min(within && !word ? 1 : 2, cols - col);
    if (count > 0) put(to + col, sums + row * PITCH + col, col, count);
    if (within && !word && cols >= TILE_N)
      put(to + TILE_N - 1, sums + row * PITCH + TILE_N - 1, TILE_N - 1, 1);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
unequal_linear(const __grid_constant__ Groups groups, int count) {
  SHARED_MEMORY;
  if (EARLY && MODE == 2) let_next_start();
#if MODE == 1 && ADDS
  const int behind = static_cast<int>(blockIdx.x) - groups.tiles;
  if (behind >= 0) {
    if (EARLY) wait_for_previous();
    return add_shares<THREADS>(groups.shares, groups.shared, behind);
  }
#endif
  const int g = group_of(groups, count, blockIdx.x);
  const int rows = groups.rows[g], cols = groups.cols[g], depth = groups.depth[g];
  const int across = max(1, (cols + TILE_N - 1) / TILE_N), down = (rows + TILE_M - 1) / TILE_M;
  const int number = blockIdx.x - groups.first[g], parts = PARTS_OF;
  const int part = PARTS ? number / (across * down) : 0, tile = number - part * across * down;
  const int row0 = tile / across * TILE_M, col0 = tile % across * TILE_N;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_w = warp / WARPS_N * PART_M, col_w = warp % WARPS_N * PART_N;

  const u32 start = shared_address(memory);
  const int a_width = A_TURNED ? rows : depth, b_width = B_TURNED ? cols : depth;
  const Matrix a = matrix<A_TURNED>(groups.a[g], rows, depth, PITCH_OF(a, a_width));
  Matrix saved = a;
  if (DERIVED) saved = matrix<A_TURNED>(groups.saved[g], rows, depth, a_width);
  const Matrix b = matrix<B_TURNED>(groups.b[g], cols, depth, PITCH_OF(b, b_width));
  const int all = (depth + STEP - 1) / STEP, each = (all + parts - 1) / parts;
  const int step0 = part * each, steps = max(0, min(all - step0, each));
  Number* const out = MODE == 2 && WRITES && DERIVED && col0 == 0 ? to(groups.bias[g]) : nullptr;
  constexpr bool AHEAD = EARLY && MODE == 1;  // weights come while the launch before ends
  const auto bring_a = [&](u32 stage, int k0) {
    fetch<A_TURNED, TILE_M>(stage, start, a, row0, k0);
    if (DERIVED) fetch<A_TURNED, TILE_M>(stage + SAVED_AT, start, saved, row0, k0);
  };
  const auto bring_b = [&](u32 stage, int k0) {
    fetch<B_TURNED, TILE_N>(stage + B_AT, start, b, col0, k0);
  };
  const auto bring = [&](int step, bool with_b) {
    if (step < steps) {
      const u32 stage = start + step % STAGES * STAGE_BYTES;
      const int k0 = (step0 + step) * STEP;
      bring_a(stage, k0);
      if (with_b) bring_b(stage, k0);
    }
    commit();
  };
  if (AHEAD) {
#pragma unroll 1
    for (int step = 0; step < min(steps, STAGES - 1); ++step)
      bring_b(start + step * STAGE_BYTES, step * STEP);
    wait_for_previous();
  }

  float acc[FRAGMENTS_M][2 * PAIRS_N][4] = {};
  const bool summing = MODE == 2 && col0 == 0 && col_w == 0 && groups.more[g];
  double sums[FRAGMENTS_M][2] = {};  // many numbers, of which little may be left
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) bring(step, !AHEAD);
  for (int step = 0; step < steps; ++step) {
    wait<STAGES - 2>();
    const int at = step % STAGES * STAGE_BYTES, k0 = (step0 + step) * STEP;
    if (ODD) {
      __syncwarp();
      const int a_line = A_TURNED ? k0 : row0, b_line = B_TURNED ? k0 : col0;
      if (!a.whole) align_tile<A_TURNED, TILE_M>(memory, at, a, a_line);
      if (DERIVED && !saved.whole) align_tile<A_TURNED, TILE_M>(memory, at + SAVED_AT, saved, a_line);
      if (!b.whole) align_tile<B_TURNED, TILE_N>(memory, at + B_AT, b, b_line);
    }
    if (DERIVED) derive<A_TURNED, TILE_M>(memory + at, a, row0, k0, out);
    __syncthreads();
    bring(step + STAGES - 1, true);
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
          if (PARTS && parts > 1)
            share[share_of_dw(rows, cols) + row] = static_cast<float>(sum);
          else
            to(groups.more[g])[row] = static_cast<u16>(pack(static_cast<float>(sum), 0.0f));
        }
      }
    }
  }
  if (PARTS && parts > 1) {
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
    finish_words(found, bias, c, pre, rows - row0, cols - col0, cols);
}
