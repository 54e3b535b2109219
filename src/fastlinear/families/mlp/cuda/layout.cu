// whole.cu: where things lie, who computes what, and how a thread walks over its weights.

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

constexpr int RING_OFFSET = 64;                 // after the mbarriers
constexpr int ACT_OFFSET = RING_OFFSET + (DIRECT ? 0 : WARPS * DEPTH * STEP_BYTES);
constexpr int ACT_BYTES = UNITS * UNIT_BYTES;
constexpr int STAGE_OFFSET = ACT_OFFSET + 2 * ACT_BYTES;
constexpr int STAGE_BYTES = TILE_UNITS * 128;   // one accumulator, transposed
constexpr int SUM_OFFSET = STAGE_OFFSET + WARPS * STAGE_BYTES;
constexpr int BIAS_OFFSET = SUM_OFFSET + (KS > 1 ? WN * PARTS * KS * 512 : 0);  // own columns
// Arrivals that end a phase of an mbarrier, besides bytes. Where blocks or warps may have no column
// of a layer, hence send nothing that others wait for: one for each block (thread 0 stands in for
// those that send bytes) and one for each warp, once it has seen the phase before.
constexpr int SEEN = CLUSTER > 1 && !EXACT ? WARPS : 1;
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

// Bytes that a layer of n columns brings to every block's next input.
__device__ __forceinline__ u32 input_bytes(int n) {
  const int tiles = ceil_div(n, 16 * GROUP_TILES) * GROUP_TILES;
  return tiles * TILE_UNITS * ROWS * 16;
}

// Blocks that have columns of a layer of n of them.
__device__ __forceinline__ int sending_blocks(int n) {
  const int tiles = ceil_div(n, 16 * GROUP_TILES) * GROUP_TILES;
  return ceil_div(tiles, ceil_div(tiles, CLUSTER));
}

// Thread 0 of a block: the barrier's next phase counts what `layer` sends.
__device__ __forceinline__ void announce(const Params& p, u32 bar, int layer) {
  const int n = width(p, layer + 1);
  if constexpr (!EXACT) mbar_arrive(bar, sending_blocks(n));
  mbar_expect(bar, input_bytes(n));
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
