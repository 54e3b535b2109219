// All layers of a chain in one kernel for Hopper (sm_90a), forward or backward, for many rows: rows
// stay in shared memory from the first layer to the last, weights come through a ring by TMA.
//
// A block is a producer warpgroup and CONSUMERS others, each of which carries 64 rows. Step s takes
// its rows from width[s] to width[s + 1] numbers: one consumer multiplies all of its rows by wgmma,
// finishes them in registers, and puts them where they were. Blocks go on to the next rows until
// there are none (a persistent launch). Every element is written by one thread, after sums in one
// order: results are deterministic.
//
//   forward:  h = act(h Wᵀ + b); what is kept of a step is its output, or what the activation reads.
//   backward: g = g W, times the derivative of the activation below. The first rows are dy times the
//             derivative of the last activation. Beside g, what the layer below gave may be written,
//             as the gradients of weights read it: recomputed, or in rows that begin on 16 bytes.
//
// Two consumers issue their products by turns, so that one finishes rows while the other multiplies.
// RESIDENT: the ring holds all tiles, which are loaded once. Blocks share nothing: those of a cluster
// that did waited for each other (docs/facts.md).
//
// Padding: columns are padded to 64 with zeros, of weights by TMA; results beyond the width are
// set to zero, so that no NaN of theirs meets a weight.
//
// hopper_words.h, activations/cuda.h and hopper_async.h come before this file. Macros from the host:
// IS_BF16 BACKWARD CONSUMERS STAGES SLOT_BLOCKS (blocks of 64 columns in a slot of the ring)
// ROW_BLOCKS (the same of the widest rows) RESIDENT STAGED (whether anything is written aside)
// RECOMPUTE (backward: what is kept is what activations read) BIASES (numbers of all biases, each padded to 64) MAX_STEPS ACT FINAL, bits of the column blocks that hidden steps have (HIDDEN) and
// that the last one has (LAST), CONSUMER_REGISTERS, PRODUCER_REGISTERS (0: as launched), and the
// functions wgmma and wgmma_first for accumulators of 32, 64, 96 and 128.

constexpr int BLOCK_BYTES = 64 * 128;  // 64 rows of 64 numbers, swizzled
constexpr int SLOT_BYTES = SLOT_BLOCKS * BLOCK_BYTES;
constexpr int CHUNK = 4;               // blocks of 64 columns that accumulators hold at most
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr bool TURNS = CONSUMERS == 2;

constexpr int ROWS_OFFSET = STAGES * SLOT_BYTES;
constexpr int STAGED_OFFSET = ROWS_OFFSET + CONSUMERS * ROW_BLOCKS * BLOCK_BYTES;
constexpr int BIAS_OFFSET = STAGED_OFFSET + (STAGED ? CONSUMERS * BLOCK_BYTES : 0);
constexpr int BAR_OFFSET = BIAS_OFFSET + 2 * BIASES;
constexpr int TURN = STAGES > 1 ? STAGES - 1 : 1;  // tiles of a turn, where a layer has more than the ring

struct Params {
  TensorMap weight[MAX_STEPS];          // in boxes of 64 numbers and 64 rows
  const unsigned short* in;             // (rows, width[0]): x or dy
  const unsigned short* bias[MAX_STEPS];   // forward: (width[s + 1]) or null
  unsigned short* out[MAX_STEPS];       // the step's results (rows, width[s + 1]) or null
  unsigned short* aside[MAX_STEPS];     // of the same shape, or null: forward, what the activation
                                        // reads; backward, what its layer gave
  const unsigned short* saved[MAX_STEPS];  // backward: (rows, width[s + 1]) that the derivative
                                           // reads, or null
  const unsigned short* in_saved;       // backward: what the last activation's derivative reads
  unsigned short* in_out;               // backward: dy times that derivative, or null
  long long in_stride;
  int rows, steps;
  int width[MAX_STEPS + 1];
  int pitch[MAX_STEPS + 1];             // from row to row of in_out, then of each out and aside
};

__device__ __forceinline__ int blocks_of(int n) { return (n + 63) / 64; }

// ---------------------------------------------------------------- the ring

struct Ring {
  u32 base;   // of shared memory
  int stage;
  u32 phase;

  __device__ __forceinline__ u32 full() const { return base + BAR_OFFSET + stage * 8; }
  __device__ __forceinline__ u32 empty(int which) const {
    return base + BAR_OFFSET + (STAGES + which) * 8;
  }
  __device__ __forceinline__ u32 slot() const { return base + stage * SLOT_BYTES; }

  // The slot behind this one; which this one is.
  __device__ __forceinline__ int advance() {
    const int before = stage;
    if (++stage == STAGES) {
      stage = 0;
      if (!RESIDENT) phase ^= 1;
    }
    return before;
  }

  // A warp's reads of a slot are done.
  __device__ __forceinline__ void release(int which) const {
    if (RESIDENT) return;
    if (lane_id() == 0) mbar_arrive(empty(which));
  }
};

// One thread fills the ring with the tiles of all steps, in the order of their use, over and over.
__device__ __forceinline__ void produce(const Params& p, u32 base, int rounds) {
  Ring ring{base, 0, 1};  // a fresh barrier counts as "previous phase done"
  for (int round = 0; round < (RESIDENT ? 1 : rounds); ++round) {
    for (int s = 0; s < p.steps; ++s) {
      const int k_tiles = blocks_of(p.width[s]), blocks = blocks_of(p.width[s + 1]);
      for (int first = 0; first < blocks; first += CHUNK) {
        const int count = min(CHUNK, blocks - first);
        for (int kt = 0; kt < k_tiles; ++kt) {
          if (!RESIDENT) mbar_wait(ring.empty(ring.stage), ring.phase);
          mbar_expect(ring.full(), count * BLOCK_BYTES);
          for (int b = 0; b < count; ++b) {
            const int out = (first + b) * 64, in = kt * 64;
            tma_load<1>(ring.slot() + b * BLOCK_BYTES, &p.weight[s], ring.full(),
                        BACKWARD ? out : in, BACKWARD ? in : out);
          }
          ring.advance();
        }
      }
    }
  }
}

// ---------------------------------------------------------------- rows in shared memory
// 64 rows are blocks of 64 columns, each row of a block 128 bytes, whose 16-byte pieces are permuted
// as the 128-byte swizzle has it: as wgmma reads its operand A.

__device__ __forceinline__ u32 piece_at(u32 rows, int block, int row, int piece) {
  return rows + block * BLOCK_BYTES + row * 128 + ((piece ^ (row & 7)) << 4);
}

// Eight neighbouring numbers from between 16 bytes: of two aligned pieces, of which each has one of
// them at least.
__device__ __forceinline__ uint4 read_between(const unsigned short* from) {
  const u64 at = reinterpret_cast<u64>(from);
  const u32 bytes = at & 15;
  const uint4* const pieces = reinterpret_cast<const uint4*>(at - bytes);
  const uint4 a = pieces[0], b = pieces[bytes != 0];
  const u32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  u32 twos[6], ones[5];
#pragma unroll
  for (int i = 0; i < 6; ++i) twos[i] = bytes & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) ones[i] = bytes & 4 ? twos[i + 1] : twos[i];
  const u32 bits = (bytes & 2) * 8;
  return {__funnelshift_r(ones[0], ones[1], bits), __funnelshift_r(ones[1], ones[2], bits),
          __funnelshift_r(ones[2], ones[3], bits), __funnelshift_r(ones[3], ones[4], bits)};
}

// Eight neighbouring numbers, zeros beyond the width.
__device__ __forceinline__ uint4 read_piece(const unsigned short* from, int left, bool aligned) {
  if (left >= 8)
    return aligned ? *reinterpret_cast<const uint4*>(from) : read_between(from);
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 low = 2 * i < left ? from[2 * i] : 0, high = 2 * i + 1 < left ? from[2 * i + 1] : 0;
    words[i] = low | high << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ void write_piece(unsigned short* to, uint4 v, int left, bool aligned) {
  if (aligned && left >= 8) {
    *reinterpret_cast<uint4*>(to) = v;
    return;
  }
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (2 * i < left) to[2 * i] = static_cast<unsigned short>(words[i]);
    if (2 * i + 1 < left) to[2 * i + 1] = static_cast<unsigned short>(words[i] >> 16);
  }
}

__device__ __forceinline__ bool on_16_bytes(const void* at, long long stride) {
  return ((reinterpret_cast<u64>(at) | (stride * 2)) & 15) == 0;
}

template <int A>
__device__ __forceinline__ u32 graded_word(u32 dy, u32 saved) {
  float a, b, s, t;
  unpack(dy, a, b);
  unpack(saved, s, t);
  return pack(graded<A>(a, s), graded<A>(b, t));
}

// Eight numbers of dy times the last activation's derivative.
__device__ __forceinline__ uint4 graded_piece(uint4 v, uint4 s, int left) {
  v = {graded_word<FINAL>(v.x, s.x), graded_word<FINAL>(v.y, s.y), graded_word<FINAL>(v.z, s.z),
       graded_word<FINAL>(v.w, s.w)};
  u32* const words = &v.x;
#pragma unroll
  for (int e = 0; e < 4; ++e) {  // of what does not exist the derivative may be anything
    if (2 * e >= left) words[e] = 0;
    else if (2 * e + 1 >= left) words[e] &= 0xffff;
  }
  return v;
}

// The first rows of a round: x, or dy times the derivative of the last activation.
__device__ __forceinline__ void load_rows(const Params& p, u32 rows, int first_row, int thread) {
  const int n = p.width[0], blocks = blocks_of(n), piece = thread & 7;
  const bool aligned = on_16_bytes(p.in, p.in_stride);
  const bool graded_too = BACKWARD && FINAL != ACT_NONE && p.in_saved != nullptr;
  const bool dense = on_16_bytes(p.in_saved, n), wide = on_16_bytes(p.in_out, p.pitch[0]);
  for (int first = 0; first < blocks; first += CHUNK) {
    uint4 values[CHUNK][4];  // all on their way at once
#pragma unroll
    for (int b = 0; b < CHUNK; ++b) {
      const int column = (first + b) * 64 + piece * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = first_row + i * 16 + (thread >> 3);
        values[b][i] = {0, 0, 0, 0};
        if (at < p.rows && column < n)
          values[b][i] = read_piece(p.in + at * p.in_stride + column, n - column, aligned);
      }
    }
#pragma unroll
    for (int b = 0; b < CHUNK; ++b) {
      if (first + b >= blocks) break;
      const int column = (first + b) * 64 + piece * 8, left = n - column;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i * 16 + (thread >> 3), at = first_row + row;
        uint4 v = values[b][i];
        if (at < p.rows && left > 0) {
          if (graded_too) {
            const unsigned short* const from = p.in_saved + static_cast<long long>(at) * n + column;
            v = graded_piece(v, read_piece(from, left, dense), left);
          }
          if (BACKWARD && p.in_out != nullptr)
            write_piece(p.in_out + static_cast<long long>(at) * p.pitch[0] + column, v, left, wide);
        }
        store_shared128(piece_at(rows, first + b, row, piece), v);
      }
    }
  }
}

// This warp's 16 rows of some blocks to memory of n columns, from column `first` on: 16 bytes a lane
// where rows begin on 16 bytes, else numbers side by side, so that a row's sectors are written whole.
__device__ __forceinline__ void store_rows(const Params& p, unsigned short* to, int n, int pitch,
                                           u32 rows, int blocks, int first, int first_row,
                                           int warp) {
  const int lane = lane_id(), piece = lane & 7;
  const bool aligned = on_16_bytes(to, pitch);
  for (int b = 0; b < blocks; ++b) {
    const int column = first + b * 64;
    if (!aligned) {
      const int left = n - column - lane, count = min(p.rows - first_row - warp * 16, 16);
      unsigned short* at = to + static_cast<long long>(first_row + warp * 16) * pitch + column + lane;
#pragma unroll 4
      for (int i = 0; i < count; ++i, at += pitch) {
        const u32 from = piece_at(rows, b, warp * 16 + i, lane >> 3) + piece * 2;
        if (left > 0) at[0] = load_shared16(from);
        if (left > 32) at[32] = load_shared16(from ^ 64);
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp * 16 + i * 4 + (lane >> 3), left = n - column - piece * 8;
      if (first_row + row < p.rows && left > 0) {
        write_piece(to + static_cast<long long>(first_row + row) * pitch + column + piece * 8,
                    load_shared128(piece_at(rows, b, row, piece)), left, true);
      }
    }
  }
}

// 16 rows of 64 columns of this warp to `to`, the first of the block's rows being `to`'s.
__device__ __forceinline__ void put(u32 to, const u32* words, int warp) {
  const u32 lane = lane_id();
  const u32 at = to + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
  for (int q = 0; q < 4; ++q)
    stmatrix(at ^ (q * 32), words[4 * q], words[4 * q + 1], words[4 * q + 2], words[4 * q + 3]);
}

// ---------------------------------------------------------------- one step

// The second word of one thread for the first of another, whose numbers differ by ``apart``.
__device__ __forceinline__ void exchange(u32& first, u32& second, bool is_upper, int apart) {
  const u32 other = __shfl_xor_sync(0xffffffffu, is_upper ? first : second, apart);
  if (is_upper) first = other;
  else second = other;
}

// Where a step is: its rows, and what it reads and writes.
struct Step {
  const Params& p;
  u32 base, rows;      // in shared memory: of all, of this consumer's rows
  int first_row;       // of these 64
  int consumer, warp;
  int s, n, bias;      // number, width of the results, where their biases begin

  // 64 columns of `words`, which lie as accumulators do, to where `aside` has them.
  __device__ __forceinline__ void set_aside(const u32* words, int column) const {
    const u32 staged = base + STAGED_OFFSET + consumer * BLOCK_BYTES;
    put(staged, words, warp);
    __syncwarp();
    store_rows(p, p.aside[s], n, p.pitch[s + 1], staged, 1, column, first_row, warp);
    __syncwarp();
  }

  // Whether what the derivative reads comes 16 bytes at a time.
  __device__ __forceinline__ bool pieces() const { return on_16_bytes(p.saved[s], n); }

  // Loads of 64 columns of what the derivative reads, as accumulators lie: word 2j + h is of row h,
  // columns 8j + 2 (lane % 4) and the next. Four threads have 64 bytes of a row, which they load as 16
  // bytes each of two pieces where they can; `arrange` then gives each its own.
  __device__ __forceinline__ void fetch(u32* words, int column) const {
    const int quad = lane_id() & 3, row = first_row + warp * 16 + (lane_id() >> 2);
    const unsigned short* const from = p.saved[s] + static_cast<long long>(row) * n;
    if (pieces()) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const int col = column + 32 * t + 8 * quad;
          uint4 v = {0, 0, 0, 0};
          if (row + 8 * h < p.rows && col < n)
            v = *reinterpret_cast<const uint4*>(from + 8 * h * n + col);
          words[8 * t + h] = v.x, words[8 * t + 2 + h] = v.y;
          words[8 * t + 4 + h] = v.z, words[8 * t + 6 + h] = v.w;
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int col = column + 8 * (i >> 1) + 2 * quad;
      const unsigned short* const here = from + (i & 1) * 8 * n + col;
      words[i] = 0;
      if (row + 8 * (i & 1) < p.rows && col < n)
        words[i] = here[0] | (col + 1 < n ? static_cast<u32>(here[1]) << 16 : 0);
    }
  }

  __device__ __forceinline__ bool reads() const { return BACKWARD && p.saved[s] != nullptr; }

  // What the derivative reads of the first columns, on its way while the products are made.
  template <int NB>
  __device__ __forceinline__ void fetch_all(u32* words) const {
    if (!reads()) return;
#pragma unroll
    for (int c = 0; c < NB; ++c) fetch(words + 16 * c, 64 * c);
  }

  __device__ __forceinline__ void arrange(u32* words) const {
    if (!pieces()) return;
    const bool odd = lane_id() & 1, high = lane_id() & 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // four words of four threads, turned over
      u32* const w = words + (i >> 1) * 8 + (i & 1);
      exchange(w[0], w[2], odd, 1);
      exchange(w[4], w[6], odd, 1);
      exchange(w[0], w[4], high, 2);
      exchange(w[2], w[6], high, 2);
    }
  }
};

// Turns of two consumers at the tensor cores.
__device__ __forceinline__ void begin_turn(int consumer) {
  if (TURNS) bar_sync(1 + consumer, 256);
}

__device__ __forceinline__ void end_turn(int consumer) {
  if (TURNS) bar_arrive(1 + (consumer ^ 1), 256);
}

// acc (64, 64 NB) = rows (64, 64 k_tiles) times the next k_tiles tiles of the ring. All of it is
// done behind it.
template <int NB, bool kFirst>
__device__ __forceinline__ void products(float (&acc)[32 * NB], u32 a_src, u32 b_src) {
  const u64 a = make_desc<false>(a_src), b = make_desc<BACKWARD>(b_src);
  constexpr u64 kStep = (BACKWARD ? 16 * 128 : 32) >> 4;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (kFirst && k == 0) wgmma_first(acc, a, b);
    else wgmma(acc, a + k * (32 >> 4), b + k * kStep);
  }
  wgmma_commit();
}

template <int NB>
__device__ __forceinline__ void multiply(float (&acc)[32 * NB], Ring& ring, u32 rows, int k_tiles,
                                         int consumer) {
  begin_turn(consumer);
  mbar_wait(ring.full(), ring.phase);
  products<NB, true>(acc, rows, ring.slot());
  int previous = ring.advance();
  for (int kt = 1; kt < k_tiles; ++kt) {
    if (TURNS && k_tiles > STAGES && kt % TURN == 0) {
      end_turn(consumer);
      begin_turn(consumer);
    }
    mbar_wait(ring.full(), ring.phase);
    products<NB, false>(acc, rows + kt * BLOCK_BYTES, ring.slot());
    wgmma_wait<1>();  // all but the tile just issued
    ring.release(previous);
    previous = ring.advance();
  }
  end_turn(consumer);
  wgmma_wait<0>();
  ring.release(previous);
}

// Accumulators to results of 16 bits, 64 columns of 64 rows at a time, from column `first` on:
// acc[32 c + 4 j + 2 h + e] is at row 16 warp + lane / 4 + 8 h, column 64 c + 8 j + 2 (lane % 4) + e.
// kEarly: what derivatives read is on its way already, to where the results will be.
template <int NB, int A, bool kEarly>
__device__ __forceinline__ void finish(float (&acc)[32 * NB], u32 (&words)[16 * NB], const Step& t,
                                       int first) {
  const bool reads = t.reads();
#pragma unroll
  for (int c = 0; c < NB; ++c) {
    float* const v = acc + 32 * c;
    u32* const w = words + 16 * c;
    const int column = first + 64 * c;
    if (BACKWARD) {
      u32 given[16];
      if (reads) {
        if (!kEarly) t.fetch(w, column);
        t.arrange(w);
#pragma unroll
        for (int i = 0; i < 16; ++i) given[i] = w[i];
      }
      if (STAGED && t.p.aside[t.s] != nullptr) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float low, high;
          unpack(given[i], low, high);
          w[i] = given[i];
          if (RECOMPUTE) {
            float* const g = v + 2 * i;
            const float y = act_and_grad<A>(low, g[0], g[0]), z = act_and_grad<A>(high, g[1], g[1]);
            w[i] = pack(y, z);
          }
        }
        t.set_aside(w, column);
      }
      const bool ungraded = A != ACT_NONE && reads && !(STAGED && RECOMPUTE && t.p.aside[t.s] != nullptr);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float a = v[2 * i], b = v[2 * i + 1];
        if (ungraded) {
          float low, high;
          unpack(given[i], low, high);
          a = graded<A>(a, low);
          b = graded<A>(b, high);
        }
        w[i] = pack(a, b);
      }
    } else {
      const u32 lane = lane_id();
      const u32 bias = t.base + BIAS_OFFSET + 2 * (t.bias + column + 2 * (lane & 3));
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float low, high;
        unpack(load_shared32(bias + 16 * j), low, high);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          v[4 * j + 2 * h] += low;
          v[4 * j + 2 * h + 1] += high;
        }
      }
      if (STAGED && t.p.aside[t.s] != nullptr) {
#pragma unroll
        for (int i = 0; i < 16; ++i) w[i] = pack(v[2 * i], v[2 * i + 1]);
        t.set_aside(w, column);
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) w[i] = pack(act<A>(v[2 * i]), act<A>(v[2 * i + 1]));
    }
    if (column + 64 > t.n) {
      const int c0 = column + 2 * (lane_id() & 3);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int col = c0 + 8 * (i >> 1);
        if (col >= t.n) w[i] = 0;
        else if (col + 1 >= t.n) w[i] &= 0xffff;
      }
    }
  }
}

// Results in place of the rows they were made of, and to memory.
template <int NB, bool kHeld>
__device__ __forceinline__ void hand_on(const u32 (&words)[16 * NB], const u32* held, const Step& t) {
  bar_sync(4 + t.consumer, 128);  // all warps' products have read the rows
  constexpr int kBefore = kHeld ? CHUNK : 0;
#pragma unroll
  for (int c = 0; c < kBefore; ++c) put(t.rows + c * BLOCK_BYTES, held + 16 * c, t.warp);
#pragma unroll
  for (int c = 0; c < NB; ++c) put(t.rows + (kBefore + c) * BLOCK_BYTES, words + 16 * c, t.warp);
  fence_async();
  bar_sync(4 + t.consumer, 128);
  unsigned short* const out = t.p.out[t.s];
  if (out != nullptr)
    store_rows(t.p, out, t.n, t.p.pitch[t.s + 1], t.rows, kBefore + NB, 0, t.first_row, t.warp);
}

template <int NB, int A, bool kHeld>
__device__ __forceinline__ void step(Ring& ring, const Step& t, int k_tiles) {
  constexpr bool kEarly = CONSUMERS <= 2 && ROW_BLOCKS <= CHUNK;  // else registers are scarce
  u32 held[kHeld ? 16 * CHUNK : 1];
  if constexpr (kHeld) {
    float acc[32 * CHUNK];
    multiply<CHUNK>(acc, ring, t.rows, k_tiles, t.consumer);
    finish<CHUNK, A, kEarly>(acc, held, t, 0);
  }
  float acc[32 * NB];
  u32 words[16 * NB];
  if constexpr (kEarly) t.fetch_all<NB>(words);
  multiply<NB>(acc, ring, t.rows, k_tiles, t.consumer);
  finish<NB, A, kEarly>(acc, words, t, kHeld ? 64 * CHUNK : 0);
  hand_on<NB, kHeld>(words, held, t);
}

// The step that has so many blocks of columns, of those that BLOCKS says there are.
template <int BLOCKS, int A>
__device__ __forceinline__ void choose(Ring& ring, const Step& t, int k_tiles) {
  const int blocks = blocks_of(t.n);
  if constexpr ((BLOCKS >> 1 & 1) != 0) if (blocks == 1) return step<1, A, false>(ring, t, k_tiles);
  if constexpr ((BLOCKS >> 2 & 1) != 0) if (blocks == 2) return step<2, A, false>(ring, t, k_tiles);
  if constexpr ((BLOCKS >> 3 & 1) != 0) if (blocks == 3) return step<3, A, false>(ring, t, k_tiles);
  if constexpr ((BLOCKS >> 4 & 1) != 0) if (blocks == 4) return step<4, A, false>(ring, t, k_tiles);
  if constexpr ((BLOCKS >> 5 & 1) != 0) if (blocks == 5) return step<1, A, true>(ring, t, k_tiles);
  if constexpr ((BLOCKS >> 6 & 1) != 0) if (blocks == 6) return step<2, A, true>(ring, t, k_tiles);
  if constexpr ((BLOCKS >> 7 & 1) != 0) if (blocks == 7) return step<3, A, true>(ring, t, k_tiles);
  if constexpr ((BLOCKS >> 8 & 1) != 0) if (blocks == 8) return step<4, A, true>(ring, t, k_tiles);
}

__device__ __forceinline__ void consume(const Params& p, u32 base, int consumer, int thread,
                                        int rounds) {
  Ring ring{base, 0, 0};
  const u32 rows = base + ROWS_OFFSET + consumer * (ROW_BLOCKS * BLOCK_BYTES);
  if (TURNS && consumer == 1) bar_arrive(1, 256);  // consumer 0 starts
  for (int round = 0; round < rounds; ++round) {
    const int first_row = ((blockIdx.x + round * gridDim.x) * CONSUMERS + consumer) * 64;
    bar_sync(4 + consumer, 128);  // the last results have been read
    load_rows(p, rows, first_row, thread);
    fence_async();
    bar_sync(4 + consumer, 128);
    int bias = 0;
    for (int s = 0; s < p.steps; ++s) {
      const int n = p.width[s + 1];
      const Step t{p, base, rows, first_row, consumer, thread / 32, s, n, bias};
      const int k_tiles = blocks_of(p.width[s]);
      if (s + 1 < p.steps) choose<HIDDEN, ACT>(ring, t, k_tiles);
      else choose<LAST, BACKWARD ? ACT : FINAL>(ring, t, k_tiles);
      bias += blocks_of(n) * 64;
    }
  }
}

// ---------------------------------------------------------------- the kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1)
whole_mlp_rows(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = smem_addr(smem);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int thread = threadIdx.x % 128;

  if (threadIdx.x == 0) {
    const Ring ring{base, 0, 0};
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(base + BAR_OFFSET + i * 8, 1);
      mbar_init(ring.empty(i), 4 * CONSUMERS);
    }
    fence_barriers();
  }
  wait_for_previous();
  if (!BACKWARD) {
    int at = 0;
    for (int s = 0; s < p.steps; ++s) {
      const int n = p.width[s + 1], padded = blocks_of(n) * 64;
      for (int i = threadIdx.x; i < padded; i += THREADS) {
        const bool exists = i < n && p.bias[s] != nullptr;
        store_shared16(base + BIAS_OFFSET + 2 * (at + i), exists ? p.bias[s][i] : 0);
      }
      at += padded;
    }
  }
  __syncthreads();
  let_next_start();

  const int row_blocks = (p.rows + 64 * CONSUMERS - 1) / (64 * CONSUMERS), step = gridDim.x;
  const int rounds = (row_blocks - static_cast<int>(blockIdx.x) + step - 1) / step;

  if (warpgroup == 0) {
    if constexpr (PRODUCER_REGISTERS > 0) fewer_registers<PRODUCER_REGISTERS>();
    if (thread == 0) produce(p, base, rounds);
  } else {
    if constexpr (CONSUMER_REGISTERS > 0) more_registers<CONSUMER_REGISTERS>();
    consume(p, base, warpgroup - 1, thread, rounds);
  }
}
