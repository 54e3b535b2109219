// A whole MLP in one kernel for Hopper (sm_90a): h <- act(h W^T + b), layer after layer.
//
// A cluster of CLUSTER blocks owns 8 * NB rows of x from the first layer to the last; each block
// computes its share of every layer's columns and stores it into the shared memory of all of them,
// so hidden activations never leave the chip. Weights stay as they lie, (N, K) row-major: each
// thread copies the very 16-byte pieces that it will multiply, DEPTH steps ahead and across layers,
// so only activations are ever waited for by others. Shared out like this:
//   column tiles (16 columns): contiguous runs per block; in a block over WN groups of warps, TW
//     tiles each, in as many passes as it takes.
//   K: over the KS warps of a group; they add their parts through shared memory in a fixed order.
//
// A product is mma.sync with the weight as operand A (16 columns) and the activations as operand B
// (8 rows). A k-block is 64 bytes of K, 16 bytes for each of the 4 threads of a quad: the order of
// k within it is not the instruction's, but it is the same for both operands, which is enough.
// float32: either plain multiply-adds (SIMT), or both operands split into two tf32 parts and three
// products, the large one added to a float32 accumulator after every instruction, because the
// tensor cores truncate where they accumulate.
//
// Activations lie in shared memory as [unit][row][16 bytes], a unit being 8 (float32: 4) columns;
// 32 bytes between units keep every access free of bank conflicts. Two buffers take turns: a block
// writes layer i + 1's input only after all blocks have sent layer i's, hence have read i - 1's. A
// block without columns of a layer sends nothing: it arrives at the others' mbarriers instead.
// ORDERING.md says for every buffer what orders its writers and readers.
//
// Macros from the host: DTYPE (0 bfloat16, 1 float16, 2 float32) CLUSTER NB WN KS TW UNROLL DEPTH
// VEC EXACT WIDTH UNITS ACT FINAL SAVE MAX_LAYERS EXCHANGE SIMT DIRECT LATE, a number ACT_<NAME> for every activation.
//   VEC: bytes at which every weight row is aligned: 16, 8, 4 or 2.
//   EXACT: 1 when every K and N is a whole number of steps and passes.
//   WIDTH: the width of every layer and of x where all are equal, else 0.
//   UNITS: units of one activation buffer.
//   DIRECT: 1 keeps DEPTH k-blocks of weights per warp in registers instead of shared memory, each
//     replaced by its successor once used, the last LATE of them only after the layer's results
//     are on their way. For equal widths in one pass, where shared memory's rate would bound.
//   SAVE: 0 nothing, 1 pre-activations (hidden and last), 2 hidden outputs, 3 hidden outputs and
//     the last pre-activation, 4 hidden pre-activations.
//   EXCHANGE: how outputs reach the other blocks, counted by an mbarrier: 0 st.async from every
//     thread, 1 one bulk copy per block once its share is complete.

constexpr int ES = DTYPE == 2 ? 4 : 2;          // bytes of an element
constexpr int PIECE = 16 / ES;                  // elements of a 16-byte piece
constexpr int BLOCK_K = 64 / ES;                // elements of a k-block
constexpr int TILE_UNITS = 16 / PIECE;          // units of a column tile
constexpr int GROUP_TILES = BLOCK_K / 16;       // column tiles are padded to whole k-blocks
constexpr int ROWS = 8 * NB;
constexpr int UNIT_BYTES = ROWS * 16 + 32;
constexpr int WARPS = WN * KS;
constexpr int THREADS = 32 * WARPS;
constexpr int PARTS = TW * NB;                  // 16 x 8 accumulators of a warp
constexpr int STEP_BYTES = UNROLL * TW * 1024;  // what a warp copies for one step
constexpr int STEP_K = UNROLL * BLOCK_K;        // of one warp; KS warps cover KS times that

constexpr int RING_OFFSET = 64;                 // after the mbarriers
constexpr int ACT_OFFSET = RING_OFFSET + (DIRECT ? 0 : WARPS * DEPTH * STEP_BYTES);
constexpr int ACT_BYTES = UNITS * UNIT_BYTES;
constexpr int STAGE_OFFSET = ACT_OFFSET + 2 * ACT_BYTES;
constexpr int STAGE_BYTES = TILE_UNITS * 128;   // one accumulator, transposed
constexpr int SUM_OFFSET = STAGE_OFFSET + WARPS * STAGE_BYTES;
constexpr int BIAS_OFFSET = SUM_OFFSET + (KS > 1 ? WN * PARTS * KS * 512 : 0);  // own columns
constexpr bool BULK = CLUSTER > 1 && EXCHANGE == 1;
constexpr bool ASYNC = CLUSTER > 1 && EXCHANGE == 0;
// Arrivals that end a phase of an mbarrier, besides bytes. Where blocks or warps may have no column
// of a layer, hence send nothing that others wait for: one for each block (thread 0 stands in for
// those that send bytes) and one for each warp, once it has seen the phase before.
constexpr int SEEN = ASYNC && !EXACT ? WARPS : 1;
constexpr int ARRIVALS = EXACT ? 1 : SEEN + CLUSTER;

struct Params {
  const void* x;                    // (rows, width[0]), rows x_stride elements apart
  void* y;                          // (rows, width[layers])
  const void* weight[MAX_LAYERS];   // (width[i + 1], width[i])
  const void* bias[MAX_LAYERS];     // (width[i + 1]) or null
  void* saved[MAX_LAYERS];          // (rows, width[i + 1]) or null
  long long x_stride;
  int rows;
  int layers;
  int width[MAX_LAYERS + 1];
};

__device__ __host__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ int width(const Params& p, int i) { return WIDTH ? WIDTH : p.width[i]; }

// Known at compile time, a short loop over the steps of a pass is unrolled.
constexpr int KNOWN_STEPS = ceil_div(ceil_div(WIDTH, BLOCK_K), KS * UNROLL);
constexpr int CHUNKS = KNOWN_STEPS / DEPTH;  // of DEPTH k-blocks each, in a layer; DIRECT only
static_assert(!DIRECT || (WIDTH && EXACT && UNROLL == 1 && KNOWN_STEPS % DEPTH == 0), "DIRECT");
constexpr int STEP_UNROLL = KNOWN_STEPS >= 1 && KNOWN_STEPS <= 4 ? KNOWN_STEPS : 1;

// ---------------------------------------------------------------- who computes what

struct Share {   // of one layer, for one block
  int first, end;  // column tiles
  int passes;
  int steps;       // along K, in each pass
  int columns;     // room of one block, in columns

  __device__ __forceinline__ Share(int k, int n, int rank) {
    const int tiles = ceil_div(n, 16 * GROUP_TILES) * GROUP_TILES;
    const int each = ceil_div(tiles, CLUSTER);
    first = EXACT ? rank * each : min(rank * each, tiles);
    end = EXACT ? first + each : min(first + each, tiles);
    passes = ceil_div(each, WN * TW);
    columns = each * 16;
    steps = ceil_div(ceil_div(k, BLOCK_K), KS * UNROLL);
  }
};

// Bytes that a layer of n columns brings to this block's next input from blocks (BULK: others).
__device__ __forceinline__ u32 input_bytes(int k, int n, int rank) {
  const int tiles = ceil_div(n, 16 * GROUP_TILES) * GROUP_TILES;
  if constexpr (!BULK) return tiles * TILE_UNITS * ROWS * 16;
  const Share own(k, n, rank);
  return (tiles - (own.end - own.first)) * TILE_UNITS * UNIT_BYTES;
}

// Blocks that have columns of a layer of n of them.
__device__ __forceinline__ int sending_blocks(int n) {
  const int tiles = ceil_div(n, 16 * GROUP_TILES) * GROUP_TILES;
  return ceil_div(tiles, ceil_div(tiles, CLUSTER));
}

// Thread 0 of a block: the barrier's next phase counts what `layer` sends.
__device__ __forceinline__ void announce(const Params& p, u32 bar, int layer, int rank) {
  const int k = width(p, layer), n = width(p, layer + 1);
  if constexpr (!EXACT) mbar_arrive(bar, sending_blocks(n));
  mbar_expect(bar, input_bytes(k, n, rank));
}

typedef uint4 Pieces[TW][2];  // this thread's weights of one k-block: columns g and g + 8

// A thread's walk over the weight pieces it will multiply, in the order of use.
struct Feed {
  const Params& p;
  const char* row[TW][2];  // the next piece of columns g and g + 8 of each tile
  bool real[TW][2];        // whether that column exists
  const char* base;
  int left;                // bytes of the row from that piece on; may be negative
  int layer, pass, step, slot, rank;
  Share share;
  u32 ring;                // this thread's first slot
  int lane, kg, ng;
  int offset;              // of this thread's first piece in a row
  int origin;              // and in the weight, of its first row; for equal widths

  __device__ __forceinline__ Feed(const Params& params, u32 ring_, int rank_, int warp, int lane_)
      : p(params), layer(0), pass(0), step(0), slot(0), rank(rank_),
        share(width(params, 0), width(params, 1), rank_),
        ring(ring_ + warp * (DEPTH * STEP_BYTES) + lane_ * 16), lane(lane_), kg(warp / WN),
        ng(warp % WN), offset(kg * (UNROLL * 64) + (lane & 3) * 16),
        origin(((share.first + ng * TW) * 16 + (lane >> 2)) * (WIDTH * ES) + offset) {
    open();
  }

  __device__ __forceinline__ void open() {
    const int k = width(p, layer), n = width(p, layer + 1);
    base = static_cast<const char*>(p.weight[layer]);
    left = k * ES - offset;
    if constexpr (WIDTH && EXACT) {
#pragma unroll
      for (int tw = 0; tw < TW; ++tw) {
        const int rows = pass * (WN * TW * 16) + tw * 16;
        row[tw][0] = base + (origin + rows * (WIDTH * ES));
        row[tw][1] = base + (origin + (rows + 8) * (WIDTH * ES));
      }
      return;
    }
#pragma unroll
    for (int tw = 0; tw < TW; ++tw) {
      const int tile = share.first + (pass * WN + ng) * TW + tw;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = tile * 16 + h * 8 + (lane >> 2);
        real[tw][h] = EXACT || (tile < share.end && column < n);
        row[tw][h] = base + (real[tw][h] ? column * (k * ES) : 0) + offset;
      }
    }
  }

  // K-block i of those at `from`.
  __device__ __forceinline__ void hold(Pieces& w, const char* from, int i) const {
#pragma unroll
    for (int tw = 0; tw < TW; ++tw) {
      w[tw][0] = load_weight(from + i * (KS * 64) + tw * 16 * (WIDTH * ES));
      w[tw][1] = load_weight(from + i * (KS * 64) + (tw * 16 + 8) * (WIDTH * ES));
    }
  }

  // Starts the copies of the next step, or of nothing when all is under way.
  __device__ __forceinline__ void advance() {
    if (layer < p.layers) {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
        for (int tw = 0; tw < TW; ++tw) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const u32 dst = ring + slot * STEP_BYTES + ((u * TW + tw) * 2 + h) * 512;
            if constexpr (EXACT) {
              copy16<VEC>(dst, row[tw][h] + u * 64, 16);
            } else {
              const int bytes = real[tw][h] ? min(max(left - u * 64, 0), 16) : 0;
              copy16<VEC>(dst, bytes > 0 ? row[tw][h] + u * 64 : base, bytes);
            }
          }
        }
      }
      slot = slot + 1 == DEPTH ? 0 : slot + 1;
      left -= KS * UNROLL * 64;
#pragma unroll
      for (int tw = 0; tw < TW; ++tw) {
        row[tw][0] += KS * UNROLL * 64;
        row[tw][1] += KS * UNROLL * 64;
      }
      if (++step == (WIDTH ? KNOWN_STEPS : share.steps)) {
        step = 0;
        if (++pass == share.passes) {
          pass = 0;
          if (++layer < p.layers && !WIDTH) share = Share(width(p, layer), width(p, layer + 1), rank);
        }
        if (layer < p.layers) open();
      }
    }
    copy_commit();
  }
};

// ---------------------------------------------------------------- products

__device__ __forceinline__ void read_pieces(Pieces& w, u32 ring) {
#pragma unroll
  for (int tw = 0; tw < TW; ++tw) {
    w[tw][0] = load16(ring + tw * 1024);
    w[tw][1] = load16(ring + tw * 1024 + 512);
  }
}

// acc[part] + odd[part] += the products of one k-block.
__device__ __forceinline__ void multiply(float (&acc)[PARTS][4], float (&odd)[PARTS][4],
                                         const Pieces& w, u32 input) {
  uint4 b[NB];
#pragma unroll
  for (int nb = 0; nb < NB; ++nb) b[nb] = load16(input + nb * 128);
  if constexpr (DTYPE != 2) {
#pragma unroll
    for (int tw = 0; tw < TW; ++tw) {
      const uint4 lo = w[tw][0], hi = w[tw][1];
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        mma(acc[tw * NB + nb], lo.x, hi.x, lo.y, hi.y, b[nb].x, b[nb].y);
        mma(odd[tw * NB + nb], lo.z, hi.z, lo.w, hi.w, b[nb].z, b[nb].w);
      }
    }
  } else {
    uint4 bh[NB], bl[NB];
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) split4(b[nb], bh[nb], bl[nb]);
#pragma unroll
    for (int tw = 0; tw < TW; ++tw) {
      uint4 loh, lol, hih, hil;
      split4(w[tw][0], loh, lol);
      split4(w[tw][1], hih, hil);
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        const int q = tw * NB + nb;
        float first[4] = {}, second[4] = {};
        mma(first, loh.x, hih.x, loh.y, hih.y, bh[nb].x, bh[nb].y);
        mma(second, loh.z, hih.z, loh.w, hih.w, bh[nb].z, bh[nb].w);
        mma(odd[q], loh.x, hih.x, loh.y, hih.y, bl[nb].x, bl[nb].y);
        mma(odd[q], lol.x, hil.x, lol.y, hil.y, bh[nb].x, bh[nb].y);
        mma(odd[q], loh.z, hih.z, loh.w, hih.w, bl[nb].z, bl[nb].w);
        mma(odd[q], lol.z, hil.z, lol.w, hil.w, bh[nb].z, bh[nb].w);
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[q][e] += first[e];
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[q][e] += second[e];
      }
    }
  }
}

// sum[tile][column g or g + 8][row] += this thread's quarter of a k-block, float32 arithmetic.
__device__ __forceinline__ void multiply_simt(float (&sum)[TW][2][ROWS], const Pieces& w,
                                              u32 input) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const uint4 x = load16(input + r * 16);
#pragma unroll
    for (int tw = 0; tw < TW; ++tw) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float v = sum[tw][h][r];
        v = fmaf(__uint_as_float(w[tw][h].x), __uint_as_float(x.x), v);
        v = fmaf(__uint_as_float(w[tw][h].y), __uint_as_float(x.y), v);
        v = fmaf(__uint_as_float(w[tw][h].z), __uint_as_float(x.z), v);
        sum[tw][h][r] = fmaf(__uint_as_float(w[tw][h].w), __uint_as_float(x.w), v);
      }
    }
  }
}

// Adds up the quad's quarters; thread t keeps rows 2t and 2t + 1, as an mma accumulator lies.
__device__ __forceinline__ void gather_simt(float (&acc)[PARTS][4],
                                            const float (&sum)[TW][2][ROWS], int t) {
#pragma unroll
  for (int q = 0; q < PARTS; ++q) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* const v = sum[q / NB][h] + q % NB * 8;
      float half[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float give = t & 2 ? v[e] : v[e + 4];
        const float keep = t & 2 ? v[e + 4] : v[e];
        half[e] = keep + __shfl_xor_sync(0xffffffffu, give, 2);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float give = t & 1 ? half[e] : half[e + 2];
        const float keep = t & 1 ? half[e + 2] : half[e];
        acc[q][2 * h + e] = keep + __shfl_xor_sync(0xffffffffu, give, 1);
      }
    }
  }
}

// ---------------------------------------------------------------- results

// Puts a 16 x 8 accumulator as TILE_UNITS units, `stride` bytes apart, of 8 rows of 16 bytes.
__device__ __forceinline__ void put(u32 base, int stride, const float (&v)[4], int lane) {
  const int g = lane >> 2, t = lane & 3;
  if constexpr (DTYPE == 2) {
    const u32 addr = base + (g >> 2) * stride + t * 32 + (g & 3) * 4;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr + (e >> 1) * (2 * stride) + (e & 1) * 16),
                   "f"(v[e])
                   : "memory");
    }
  } else {
    stmatrix_trans(base + ((lane >> 3) & 1) * stride + (lane & 7) * 16, pack(v[0], v[1]),
                   pack(v[2], v[3]));
  }
}

// Writes a staged accumulator to out (rows, n) at (row, column).
__device__ __forceinline__ void write_out(void* out, int rows, int n, int row, int column,
                                          u32 stage, int lane) {
  if (lane >= TILE_UNITS * 8) return;
  row += lane & 7;
  column += (lane >> 3) * PIECE;
  if (row >= rows || column >= n) return;
  const uint4 v = load16(stage + lane * 16);
  char* const at = static_cast<char*>(out) + (static_cast<long long>(row) * n + column) * ES;
  if ((n * ES) % 16 == 0) {
    *reinterpret_cast<uint4*>(at) = v;
    return;
  }
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int e = 0; e < PIECE; ++e) {
    if (column + e >= n) break;
    if constexpr (DTYPE == 2) {
      reinterpret_cast<u32*>(at)[e] = words[e];
    } else {
      reinterpret_cast<unsigned short*>(at)[e] =
          static_cast<unsigned short>(words[e >> 1] >> ((e & 1) * 16));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
whole_mlp(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 base = smem_addr(shared);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int g = lane >> 2, t = lane & 3;
  const int kg = warp / WN, ng = warp % WN;
  const int rank = CLUSTER > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int row0 = static_cast<int>(blockIdx.x) / CLUSTER * ROWS;
  const u32 act_base = base + ACT_OFFSET;
  const u32 stage = base + STAGE_OFFSET + warp * STAGE_BYTES;
  const u32 sums = base + SUM_OFFSET + ng * (PARTS * KS * 512) + lane * 16;

  if constexpr (CLUSTER > 1) {
    if (threadIdx.x == 0) {
      // Barrier i & 1 counts the bytes of layer i's input. The first two are announced here.
      mbar_init(base, ARRIVALS);
      mbar_init(base + 8, ARRIVALS);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      if constexpr (SEEN > 1) {
        mbar_arrive(base, SEEN - 1);
        mbar_arrive(base + 8, SEEN - 1);
      }
      if (p.layers > 1) announce(p, base + 8, 0, rank);
      if (p.layers > 2) announce(p, base, 1, rank);
    }
    __syncwarp();
    cluster_arrive();
  }

  {  // x, the first layer's input; what does not exist is zero
    const int k = width(p, 0);
    const int units = ceil_div(k, BLOCK_K) * 4;
    const char* const x = static_cast<const char*>(p.x);
    const bool aligned = ((reinterpret_cast<u64>(x) | (p.x_stride * ES)) & 15) == 0;
    for (int i = threadIdx.x; i < units * ROWS; i += THREADS) {
      const int row = i / units, unit = i - row * units;
      int bytes = row0 + row < p.rows ? min(max(k * ES - unit * 16, 0), 16) : 0;
      const char* src = x;
      if (bytes > 0) src += ((row0 + row) * p.x_stride) * ES + unit * 16;
      const u32 dst = act_base + unit * UNIT_BYTES + row * 16;
      if (aligned) copy16<16>(dst, src, bytes);
      else copy16<ES>(dst, src, bytes);
    }
  }
  {  // the biases of this block's columns, layer after layer, in words of 4 bytes
    u32 dst = base + BIAS_OFFSET;
    for (int layer = 0; layer < p.layers; ++layer) {
      const int n = width(p, layer + 1);
      const Share share(width(p, layer), n, rank);
      const char* const bias = static_cast<const char*>(p.bias[layer]);
      if (bias && layer % WARPS == warp) {
        const bool aligned = (reinterpret_cast<u64>(bias) & 3) == 0;
        for (int i = lane; i < share.columns * ES / 4; i += 32) {
          const int at = share.first * (16 * ES) + i * 4;
          const int bytes = min(max(n * ES - at, 0), 4);
          copy_word(dst + i * 4, bytes > 0 ? bias + at : bias, bytes, aligned);
        }
      }
      dst += share.columns * ES;
    }
  }
  copy_commit();

  Feed feed(p, base + RING_OFFSET, rank, warp, lane);
  [[maybe_unused]] Pieces held[DIRECT ? DEPTH : 1];
  [[maybe_unused]] const char* from = nullptr;  // k-blocks to come, DIRECT only
  if constexpr (DIRECT) {
    from = static_cast<const char*>(p.weight[0]) + feed.origin;
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) feed.hold(held[i], from, i);
    copy_wait<0>();
  } else {
#pragma unroll 1
    for (int i = 0; i < DEPTH; ++i) feed.advance();
    copy_wait<DEPTH>();  // x and the biases are here
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) cluster_wait();  // every block's barriers are ready

  int slot = 0;
  u32 shifts = base + BIAS_OFFSET;  // this layer's biases
#pragma unroll 1
  for (int layer = 0; layer < p.layers; ++layer) {
    const int k = width(p, layer), n = width(p, layer + 1);
    const Share share(k, n, rank);
    const bool last = layer + 1 == p.layers;
    const u32 input = act_base + (layer & 1) * ACT_BYTES + t * UNIT_BYTES;
    const u32 next = act_base + (~layer & 1) * ACT_BYTES;
    const int blocks = ceil_div(k, BLOCK_K);
    const bool has_bias = p.bias[layer] != nullptr;
#pragma unroll 1
    for (int pass = 0; pass < share.passes; ++pass) {
      const int tile0 = share.first + (pass * WN + ng) * TW;
      float shift[TW][2];  // bias of columns g and g + 8 of each tile
#pragma unroll
      for (int tw = 0; tw < TW; ++tw) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int column = (tile0 - share.first + tw) * 16 + h * 8 + g;
          shift[tw][h] = has_bias && (EXACT || column < share.columns)
                             ? load_shared_element(shifts + column * ES) : 0.0f;
        }
      }
      if (CLUSTER > 1 && layer > 0 && pass == 0) {
        const u32 bar = base + (layer & 1) * 8;
        mbar_wait(bar, ((layer - 1) >> 1) & 1);
        if constexpr (SEEN > 1) __syncwarp();
        if (layer + 2 < p.layers) {
          if (EXACT && threadIdx.x == 0) announce(p, bar, layer + 1, rank);
          if (SEEN > 1 && warp > 0 && lane == 0) mbar_arrive(bar, 1);
        }
      }

      float acc[PARTS][4], odd[PARTS][4];
      [[maybe_unused]] float sum[TW][2][ROWS] = {};
#pragma unroll
      for (int q = 0; q < PARTS; ++q) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[q][e] = odd[q][e] = 0.0f;
      }
      [[maybe_unused]] const char* const after =
          last ? nullptr : static_cast<const char*>(p.weight[layer + 1]) + feed.origin;
      if constexpr (DIRECT) {
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
          from = chunk + 1 < CHUNKS ? from + DEPTH * KS * 64 : after;
          const u32 at = input + (chunk * DEPTH * KS + kg) * (4 * UNIT_BYTES);
#pragma unroll
          for (int i = 0; i < DEPTH; ++i) {
            if constexpr (SIMT) {
              multiply_simt(sum, held[i], at + i * KS * (4 * UNIT_BYTES));
            } else {
              multiply(acc, odd, held[i], at + i * KS * (4 * UNIT_BYTES) + g * 16);
            }
            if (from && (i < DEPTH - LATE || chunk + 1 < CHUNKS)) feed.hold(held[i], from, i);
          }
        }
      } else {
#pragma unroll STEP_UNROLL
        for (int step = 0; step < (WIDTH ? KNOWN_STEPS : share.steps); ++step) {
          copy_wait<DEPTH - 1>();
          const int block = (step * KS + kg) * UNROLL;
          const u32 weights = base + RING_OFFSET + (warp * DEPTH + slot) * STEP_BYTES + lane * 16;
          const u32 at = input + block * (4 * UNIT_BYTES);
#pragma unroll
          for (int u = 0; u < UNROLL; ++u) {
            if (!EXACT && block + u >= blocks) break;
            Pieces w;
            read_pieces(w, weights + u * (TW * 1024));
            if constexpr (SIMT) multiply_simt(sum, w, at + u * (4 * UNIT_BYTES));
            else multiply(acc, odd, w, at + u * (4 * UNIT_BYTES) + g * 16);
          }
          slot = slot + 1 == DEPTH ? 0 : slot + 1;
          feed.advance();
        }
      }
      if constexpr (SIMT) gather_simt(acc, sum, t);
#pragma unroll
      for (int q = 0; q < PARTS; ++q) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[q][e] += odd[q][e];
      }

      if constexpr (KS > 1) {  // part q is completed by warp q % KS of the group
        // The last pass's parts have been read. So have those of the layer before: what this layer
        // waited for was computed from them.
        if (pass > 0) group_sync(1 + ng);
#pragma unroll
        for (int q = 0; q < PARTS; ++q) {
          if (kg == q % KS) continue;
          asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(sums + (q * KS + kg) * 512),
                       "f"(acc[q][0]), "f"(acc[q][1]), "f"(acc[q][2]), "f"(acc[q][3])
                       : "memory");
        }
        group_sync(1 + ng);
#pragma unroll
        for (int q = 0; q < PARTS; ++q) {
          if (kg != q % KS) continue;
#pragma unroll
          for (int other = 0; other < KS; ++other) {
            if (other == q % KS) continue;
            const uint4 v = load16(sums + (q * KS + other) * 512);
            acc[q][0] += __uint_as_float(v.x);
            acc[q][1] += __uint_as_float(v.y);
            acc[q][2] += __uint_as_float(v.z);
            acc[q][3] += __uint_as_float(v.w);
          }
        }
      }

#pragma unroll
      for (int q = 0; q < PARTS; ++q) {
        if (kg != q % KS) continue;
        const int tile = tile0 + q / NB, nb = q % NB;
        if (!EXACT && tile >= share.end) continue;
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = acc[q][e] + shift[q / NB][e >> 1];
        if constexpr (SAVE != 0) {
          const bool pre = last ? SAVE == 1 || SAVE == 3 : SAVE == 1 || SAVE == 4;
          if (pre) {
            put(stage, 128, v, lane);
            __syncwarp();
            write_out(p.saved[layer], p.rows, n, row0 + nb * 8, tile * 16, stage, lane);
            __syncwarp();
          }
        }
        if (last) {
#pragma unroll
          for (int e = 0; e < 4; ++e) v[e] = act<FINAL>(v[e]);
          put(stage, 128, v, lane);
          __syncwarp();
          write_out(p.y, p.rows, n, row0 + nb * 8, tile * 16, stage, lane);
          __syncwarp();
          continue;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          v[e] = act<ACT>(v[e]);
          if (!EXACT && tile * 16 + (e >> 1) * 8 + g >= n) v[e] = 0.0f;
        }
        if constexpr (!ASYNC) {
          put(next + tile * (TILE_UNITS * UNIT_BYTES) + nb * 128, UNIT_BYTES, v, lane);
        }
        if constexpr (ASYNC || SAVE == 2 || SAVE == 3) {
          put(stage, 128, v, lane);
          __syncwarp();
        }
        if constexpr (SAVE == 2 || SAVE == 3) {
          write_out(p.saved[layer], p.rows, n, row0 + nb * 8, tile * 16, stage, lane);
        }
        if constexpr (ASYNC) {
          // TILE_UNITS * 8 pieces to every block; with 16 of them, half the warp serves every
          // second block.
          constexpr int kPeers = 32 / (TILE_UNITS * 8);
          const int piece = lane % (TILE_UNITS * 8);
          const uint4 v16 = load16(stage + piece * 16);
          const u32 dst = next + (tile * TILE_UNITS + (piece >> 3)) * UNIT_BYTES + nb * 128 +
                          (piece & 7) * 16;
          const u32 bar = base + (~layer & 1) * 8;
#pragma unroll
          for (int i = 0; i < CLUSTER; i += kPeers) {
            // Starting at oneself spreads the blocks' traffic over the receivers.
            const int peer = (rank + i + lane / (TILE_UNITS * 8)) % CLUSTER;
            store_async(peer_addr(dst, peer), peer_addr(bar, peer), v16);
          }
        }
        if constexpr (ASYNC || SAVE == 2 || SAVE == 3) __syncwarp();
      }
    }
    if constexpr (DIRECT && LATE > 0) {
      if (from) {
#pragma unroll
        for (int i = DEPTH - LATE; i < DEPTH; ++i) feed.hold(held[i], from, i);
      }
    }
    shifts += share.columns * ES;
    if constexpr (CLUSTER == 1) {
      __syncthreads();
    } else if (!last) {
      if constexpr (BULK) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
      }
      const int peer = static_cast<int>(threadIdx.x);
      const u32 bytes = (share.end - share.first) * (TILE_UNITS * UNIT_BYTES);
      if (!EXACT && bytes == 0) {
        if (peer < CLUSTER) mbar_arrive_at_peer(peer_addr(base + (~layer & 1) * 8, peer));
      } else if (BULK && peer < CLUSTER && peer != rank) {
        const u32 src = next + share.first * (TILE_UNITS * UNIT_BYTES);
        copy_to_peer(peer_addr(src, peer), src, bytes, peer_addr(base + (~layer & 1) * 8, peer));
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
      // Counting blocks takes a division: only now, when the results are on their way.
      if (!EXACT && threadIdx.x == 0 && layer > 0 && layer + 2 < p.layers) {
        announce(p, base + (layer & 1) * 8, layer + 1, rank);
      }
    }
  }
  // What the copies still read must not go away under them.
  if constexpr (BULK) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
