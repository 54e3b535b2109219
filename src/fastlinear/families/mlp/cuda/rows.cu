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
// CLUSTER blocks share what comes by TMA: each asks for a part of every tile and sends it to all. With
// TURNS consumers issue their products by turns, so that one finishes rows while the other
// multiplies. RESIDENT: the ring holds all tiles, which are loaded once.
//
// Padding: columns are padded to 64 with zeros, of weights by TMA; results beyond the width are
// set to zero, so that no NaN of theirs meets a weight.
//
// hopper_words.h, activations/cuda.h and hopper_async.h come before this file. Macros from the host:
// IS_BF16 BACKWARD CONSUMERS CLUSTER STAGES SLOT_BLOCKS (blocks of 64 columns in a slot of the ring)
// ROW_BLOCKS (the same of the widest rows) RESIDENT TURNS STAGED (whether anything is written aside)
// RECOMPUTE (backward: what is kept is what activations read) BIASES (numbers of all biases, each padded to 64) MAX_STEPS ACT FINAL, bits of the column blocks that hidden steps have (HIDDEN) and
// that the last one has (LAST), CONSUMER_REGISTERS, PRODUCER_REGISTERS (0: as launched), and the
// functions wgmma and wgmma_first for accumulators of 32, 64, 96 and 128.

constexpr int BLOCK_BYTES = 64 * 128;  // 64 rows of 64 numbers, swizzled
constexpr int SLOT_BYTES = SLOT_BLOCKS * BLOCK_BYTES;
constexpr int CHUNK = 4;               // blocks of 64 columns that accumulators hold at most
constexpr int THREADS = 128 * (CONSUMERS + 1);

constexpr int ROWS_OFFSET = STAGES * SLOT_BYTES;
constexpr int STAGED_OFFSET = ROWS_OFFSET + CONSUMERS * ROW_BLOCKS * BLOCK_BYTES;
constexpr int BIAS_OFFSET = STAGED_OFFSET + (STAGED ? CONSUMERS * BLOCK_BYTES : 0);
constexpr int BAR_OFFSET = BIAS_OFFSET + 2 * BIASES;
constexpr int TURN = STAGES > 1 ? STAGES - 1 : 1;  // tiles of a turn, where a layer has more than the ring

struct Params {
  TensorMap weight[MAX_STEPS];          // in boxes of 64 numbers and 64 / CLUSTER rows
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

  // A consumer's reads of a slot are done: lets the blocks that fill it know.
  __device__ __forceinline__ void release(int which) const {
    if (RESIDENT) return;
    const u32 lane = lane_id();
    if (CLUSTER > 1) {
      if (lane < CLUSTER) mbar_arrive_cta(empty(which), lane);
    } else if (lane == 0) {
      mbar_arrive(empty(which));
    }
  }
};

// One thread fills the ring with the tiles of all steps, in the order of their use, over and over.
__device__ __forceinline__ void produce(const Params& p, u32 base, u32 rank, int rounds) {
  Ring ring{base, 0, 1};  // a fresh barrier counts as "previous phase done"
  constexpr int kPart = 64 / CLUSTER;
  for (int round = 0; round < (RESIDENT ? 1 : rounds); ++round) {
    for (int s = 0; s < p.steps; ++s) {
      const int k_tiles = blocks_of(p.width[s]), blocks = blocks_of(p.width[s + 1]);
      for (int first = 0; first < blocks; first += CHUNK) {
        const int count = min(CHUNK, blocks - first);
        for (int kt = 0; kt < k_tiles; ++kt) {
          if (!RESIDENT) mbar_wait(ring.empty(ring.stage), ring.phase);
          mbar_expect(ring.full(), count * BLOCK_BYTES);
          for (int b = 0; b < count; ++b) {
            const u32 to = ring.slot() + b * BLOCK_BYTES + rank * (BLOCK_BYTES / CLUSTER);
            const int out = (first + b) * 64, in = kt * 64;
            if (BACKWARD) {
              tma_load<CLUSTER>(to, &p.weight[s], ring.full(), out, in + rank * kPart);
            } else {
              tma_load<CLUSTER>(to, &p.weight[s], ring.full(), in, out + rank * kPart);
            }
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

// Eight neighbouring numbers, zeros beyond the width.
__device__ __forceinline__ uint4 read_piece(const unsigned short* from, int left, bool aligned) {
  if (aligned && left >= 8) return *reinterpret_cast<const uint4*>(from);
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

// The first rows of a round: x, or dy times the derivative of the last activation.
__device__ __forceinline__ void load_rows(const Params& p, u32 rows, int first_row, int thread) {
  const int n = p.width[0], blocks = blocks_of(n), piece = thread & 7;
  const bool aligned = on_16_bytes(p.in, p.in_stride);
  const bool graded_too = BACKWARD && FINAL != ACT_NONE && p.in_saved != nullptr;
  const bool dense = on_16_bytes(p.in_saved, n), wide = on_16_bytes(p.in_out, p.pitch[0]);
  for (int b = 0; b < blocks; ++b) {
    const int column = b * 64 + piece * 8, left = n - column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 16 + (thread >> 3), at = first_row + row;
      uint4 v = {0, 0, 0, 0};
      if (at < p.rows && left > 0) {
        v = read_piece(p.in + at * p.in_stride + column, left, aligned);
        if (graded_too) {
          const unsigned short* const from = p.in_saved + static_cast<long long>(at) * n + column;
          const uint4 s = read_piece(from, left, dense);
          v = {graded_word<FINAL>(v.x, s.x), graded_word<FINAL>(v.y, s.y),
               graded_word<FINAL>(v.z, s.z), graded_word<FINAL>(v.w, s.w)};
          if (left < 8) {  // of what does not exist the derivative may be anything
            u32* const words = &v.x;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              if (2 * e >= left) words[e] = 0;
              else if (2 * e + 1 >= left) words[e] &= 0xffff;
            }
          }
        }
        if (BACKWARD && p.in_out != nullptr)
          write_piece(p.in_out + static_cast<long long>(at) * p.pitch[0] + column, v, left, wide);
      }
      store_shared128(piece_at(rows, b, row, piece), v);
    }
  }
}

// This warp's 16 rows of some blocks to memory of n columns, from column `first` on.
__device__ __forceinline__ void store_rows(const Params& p, unsigned short* to, int n, int pitch,
                                           u32 rows, int blocks, int first, int first_row,
                                           int warp) {
  const int lane = lane_id(), piece = lane & 7;
  const bool aligned = on_16_bytes(to, pitch);
  for (int b = 0; b < blocks; ++b) {
    const int column = first + b * 64 + piece * 8, left = n - column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp * 16 + i * 4 + (lane >> 3), at = first_row + row;
      if (at < p.rows && left > 0) {
        write_piece(to + static_cast<long long>(at) * pitch + column,
                    load_shared128(piece_at(rows, b, row, piece)), left, aligned);
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

  // Words 2j + h of 64 columns of what the derivative reads, as the accumulators lie.
  __device__ __forceinline__ void read(u32 (&words)[16], int column) const {
    const int lane = lane_id(), c = column + 2 * (lane & 3);
    const int row = first_row + warp * 16 + (lane >> 2);
    const unsigned short* const from = p.saved[s] + static_cast<long long>(row) * n + c;
    const bool words_fit = ((reinterpret_cast<u64>(p.saved[s]) & 3) | (n & 1)) == 0;
    if (words_fit && column + 64 <= n && first_row + 64 <= p.rows) {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        words[i] = *reinterpret_cast<const u32*>(from + (i & 1) * 8 * n + 8 * (i >> 1));
      return;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int col = c + 8 * (i >> 1);
      const unsigned short* const here = from + (i & 1) * 8 * n + 8 * (i >> 1);
      words[i] = 0;
      if (row + 8 * (i & 1) < p.rows && col < n)
        words[i] = here[0] | (col + 1 < n ? static_cast<u32>(here[1]) << 16 : 0);
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
// kAhead: what derivatives read of the next columns is on its way meanwhile.
template <int NB, int A, bool kAhead>
__device__ __forceinline__ void finish(float (&acc)[32 * NB], u32 (&words)[16 * NB], const Step& t,
                                       int first) {
  const bool reads = BACKWARD && t.p.saved[t.s] != nullptr;
  u32 saved[16];
  if (kAhead && reads) t.read(saved, first);
#pragma unroll
  for (int c = 0; c < NB; ++c) {
    float* const v = acc + 32 * c;
    u32* const w = words + 16 * c;
    const int column = first + 64 * c;
    if (BACKWARD) {
      u32 now[16];
      if (!kAhead && reads) t.read(saved, column);
#pragma unroll
      for (int i = 0; i < 16; ++i) now[i] = saved[i];
      if (kAhead && reads && c + 1 < NB) t.read(saved, column + 64);
      if (STAGED && t.p.aside[t.s] != nullptr) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float low, high;
          unpack(now[i], low, high);
          w[i] = RECOMPUTE ? pack(act<A>(low), act<A>(high)) : now[i];
        }
        t.set_aside(w, column);
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float a = v[2 * i], b = v[2 * i + 1];
        if (A != ACT_NONE && reads) {
          float low, high;
          unpack(now[i], low, high);
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
  u32 held[kHeld ? 16 * CHUNK : 1];
  if constexpr (kHeld) {
    float acc[32 * CHUNK];
    multiply<CHUNK>(acc, ring, t.rows, k_tiles, t.consumer);
    finish<CHUNK, A, true>(acc, held, t, 0);
  }
  float acc[32 * NB];
  u32 words[16 * NB];
  multiply<NB>(acc, ring, t.rows, k_tiles, t.consumer);
  finish<NB, A, !kHeld>(acc, words, t, kHeld ? 64 * CHUNK : 0);
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

__device__ __forceinline__ void consume(const Params& p, u32 base, u32 rank, int consumer,
                                        int thread, int rounds) {
  Ring ring{base, 0, 0};
  const u32 rows = base + ROWS_OFFSET + consumer * (ROW_BLOCKS * BLOCK_BYTES);
  if (TURNS && consumer == 1) bar_arrive(1, 256);  // consumer 0 starts
  for (int round = 0; round < rounds; ++round) {
    const int block = (blockIdx.x / CLUSTER + round * (gridDim.x / CLUSTER)) * CLUSTER + rank;
    const int first_row = (block * CONSUMERS + consumer) * 64;
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
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;

  if (threadIdx.x == 0) {
    const Ring ring{base, 0, 0};
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(base + BAR_OFFSET + i * 8, 1);
      mbar_init(ring.empty(i), 4 * CONSUMERS * CLUSTER);
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
  __syncwarp();
  if constexpr (CLUSTER > 1) cluster_sync(); else __syncthreads();
  let_next_start();

  // Rounds of all blocks of a cluster alike: they share the ring.
  const int row_blocks = (p.rows + 64 * CONSUMERS - 1) / (64 * CONSUMERS);
  const int tiles = (row_blocks + CLUSTER - 1) / CLUSTER, step = gridDim.x / CLUSTER;
  const int rounds = (tiles - static_cast<int>(blockIdx.x / CLUSTER) + step - 1) / step;

  if (warpgroup == 0) {
    if constexpr (PRODUCER_REGISTERS > 0) fewer_registers<PRODUCER_REGISTERS>();
    if (thread == 0) produce(p, base, rank, rounds);
  } else {
    if constexpr (CONSUMER_REGISTERS > 0) more_registers<CONSUMER_REGISTERS>();
    consume(p, base, rank, warpgroup - 1, thread, rounds);
  }
  __syncwarp();
  if constexpr (CLUSTER > 1) cluster_sync();  // no block leaves while a peer may still write to it
}
