// A whole MLP of equal widths H in one kernel for Hopper (sm_90a), over all multiprocessors.
//
// Clusters of CLUSTER blocks. A cluster owns NT tiles of 8 columns of every layer, for all rows;
// block r of it multiplies the r-th slice of K. So every number of a weight is read once, by one
// block, long before it is needed: SLOTS layers lie in shared memory, brought by warps of their own.
// Between layers:
//   1. The blocks of a cluster store their partial sums into one another's shared memory: block
//      q % CLUSTER completes rows 8q .. 8q + 7 of the cluster's columns.
//   2. It publishes them in global memory, which stays in the L2 cache, and every block reads the
//      slice of K it needs, of all rows.
// There are no flags and no barriers between blocks: the numbers are themselves the flag. A word
// that is not written yet is EMPTY, a NaN that arithmetic never yields, and readers ask until none
// is left. Sums are emptied again by the thread that read them, before it publishes; two buffers of
// them take turns, and a thread that writes to one again, two layers later, has read numbers that
// depend on all that was published after those sums were read.
//
// Published activations are not emptied by their readers: each launch uses one of two sets and
// empties the other, which the launch before it on the same workspace filled. Which one is told by
// a counter of each block's own, raised when the block ends; blocks never touch another's. So
// launches on one workspace must follow one another (a stream or one graph), all blocks must run at
// once (a cooperative launch), and nothing has to be cleared in between.
//
// Products: bfloat16 and float16 by mma.sync, activations as operand A (16 rows) straight from the
// registers they were read into, weights as operand B (8 columns). As in whole.cu a thread's k order
// is that of 16-byte pieces, the same for both. float32: plain multiply-adds, activations through
// shared memory.
//
// Macros from the host: DTYPE (0 bfloat16, 1 float16, 2 float32) CLUSTER H NT MT (tiles of 16 rows)
// SLOTS KG (16-bit: warps that share a row tile's K, 1 or 2) ACT FINAL SAVE (as in whole.cu)
// MAX_LAYERS KS (unused, for device.cu), a number ACT_<NAME> for every activation.

constexpr int ES = DTYPE == 2 ? 4 : 2;
constexpr bool SINGLE = DTYPE == 2;
constexpr int ROWS = 16 * MT;
constexpr int SLICE = H / CLUSTER;                   // of K, per block
constexpr int KB = SLICE * ES / 64;                  // 64-byte blocks of it
constexpr int PAIRS = (NT + 1) / 2;                  // of column tiles
constexpr int COMPUTE_WARPS = SINGLE ? 8 : MT * KG;
constexpr int BRING_WARPS = 2;                       // the last ones bring weights
constexpr int THREADS = 32 * (COMPUTE_WARPS + BRING_WARPS);
constexpr int HALVES = (2 * MT + CLUSTER - 1) / CLUSTER;  // row groups of 8 a block completes
constexpr int LAYER_BYTES = H * ROWS * ES;           // of one published activation

// Rows of weights lie apart so that the 16-byte reads of 8 neighbouring threads fall on different
// banks: one number of each of 8 rows in float32, else the 64 bytes of a row and of the next.
constexpr int PAD = SINGLE ? 16 : KB % 2 == 0 ? 32 : 0;  // bytes a row, on average
constexpr int TILE_BYTES = 8 * (SLICE * ES + PAD);
constexpr int SLOT_BYTES = NT * TILE_BYTES;
constexpr int SOURCE_BYTES = SINGLE ? NT * 256 : PAIRS * 512;  // sums of 8 rows, one block's
constexpr int HALF_BYTES = CLUSTER * SOURCE_BYTES;

constexpr int BAR_FULL = 0;
constexpr int BAR_EMPTY = BAR_FULL + 8 * SLOTS;
constexpr int SUMS_OFFSET = (BAR_EMPTY + 8 * SLOTS + 127) / 128 * 128;
constexpr int PAIR_OFFSET = SUMS_OFFSET + 2 * HALVES * HALF_BYTES;   // 16 bits: [warp][PAIRS]
constexpr int PAIR_BYTES = !SINGLE && KG == 2 ? COMPUTE_WARPS * PAIRS * 512 : 0;
constexpr int SLOT_OFFSET = PAIR_OFFSET + PAIR_BYTES;
constexpr int ACT_OFFSET = SLOT_OFFSET + SLOTS * SLOT_BYTES;         // float32 only from here on
constexpr int RED_OFFSET = ACT_OFFSET + (SINGLE ? SLICE * ROWS * 4 : 0);
constexpr int SHARED_BYTES = RED_OFFSET + (SINGLE ? MT * NT * 512 : 0);

struct Params {
  const void* x;                    // (rows, H), rows x_stride elements apart
  void* y;                          // (rows, H)
  void* exchange;                   // two sets of (layers - 1) published activations
  u32* launches;                    // one per block
  const void* weight[MAX_LAYERS];   // (H, H)
  const void* bias[MAX_LAYERS];     // (H) or null
  void* saved[MAX_LAYERS];          // (rows, H) or null
  long long x_stride;
  int rows;
  int layers;
};

static_assert(H % (CLUSTER * 64 / ES) == 0, "K is not whole blocks of 64 bytes per block");

// ---------------------------------------------------------------- PTX wrappers

// Arrives once all copies that this thread has started are complete.
__device__ __forceinline__ void mbar_arrive_copied(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void store_peer(u32 addr, float v) {
  asm volatile("st.relaxed.cluster.shared::cluster.f32 [%0], %1;" ::"r"(addr), "f"(v) : "memory");
}

__device__ __forceinline__ void compute_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * COMPUTE_WARPS) : "memory");
}

__device__ __forceinline__ void pair_sync(int id) {
  asm volatile("bar.sync %0, 64;" ::"r"(id) : "memory");
}

// ---------------------------------------------------------------- where things lie

// float32: a published activation is [K / 4][row], 16 bytes each.
__device__ __forceinline__ int piece_at(int piece, int row) { return (piece * ROWS + row) * 16; }

// 16 bits: it is [K / 32][MT][2][t][g] 16 bytes, the order in which operand A is read: the thread of
// row g and of the t-th 8 columns finds in the first 16 bytes columns 0, 1 of rows g and g + 8, then
// columns 2, 3 of both, in the second columns 4 .. 7. For the second of two warps that share a tile
// of rows, g + 8 comes first: every warp has the rows it completes in its first accumulators.
__device__ __forceinline__ int pieces_at(int block, int m, int i, int g, int t) {
  return ((block * MT + m) * 2 + i) * 512 + t * 128 + g * 16;
}

__device__ __forceinline__ int word_at(int column, int row) {
  const int block = column >> 5, pair = column >> 1 & 3;
  const int second = (row >> 3 & 1) ^ (KG == 2 ? block % KB / (KB / KG) : 0);
  return pieces_at(block, row >> 4, pair >> 1, row & 7, column >> 3 & 3) +
         ((pair & 1) * 2 + second) * 4;
}

__device__ __forceinline__ int weight_at(int row) {
  return row * (SLICE * ES) + (SINGLE ? row : (row + 1) / 2 * 2) * PAD;
}

// 16 bytes of row `row` of x from element k on; rows that do not exist are zero.
__device__ __forceinline__ uint4 load_x(const Params& p, int row, int k, bool aligned) {
  if (row >= p.rows) return make_uint4(0, 0, 0, 0);
  const char* const at = static_cast<const char*>(p.x) + (row * p.x_stride + k) * ES;
  if (aligned) return *reinterpret_cast<const uint4*>(at);
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (SINGLE) {
      words[i] = reinterpret_cast<const u32*>(at)[i];
    } else {
      const unsigned short* const halves = reinterpret_cast<const unsigned short*>(at) + 2 * i;
      words[i] = halves[0] | static_cast<u32>(halves[1]) << 16;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The pieces this thread needs of a layer's input, asked for …
template <int kCount, typename At>
__device__ __forceinline__ void ask(uint4 (&v)[kCount], const char* from, At at) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = load_published(from + at(i));
}

// … and asked for again until all are there.
template <int kCount, typename At>
__device__ __forceinline__ void insist(uint4 (&v)[kCount], const char* from, At at) {
  while (true) {
    bool missing = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) missing |= is_empty(v[i]);
    if (!__any_sync(EMPTY, missing)) break;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (is_empty(v[i])) v[i] = load_published(from + at(i));
    }
  }
}

// start + the sums of all blocks of the cluster at `from`, in their order; empties them.
__device__ __forceinline__ float4 take_sums(float4 start, u32 from, bool real) {
  uint4 v[CLUSTER];
  u32 most;
  do {
    most = 0;
#pragma unroll
    for (int s = 0; s < CLUSTER; ++s) v[s] = load_sums(from + s * SOURCE_BYTES);
#pragma unroll
    for (int s = 0; s < CLUSTER; ++s) most = max(most, max(max(v[s].x, v[s].y), max(v[s].z, v[s].w)));
  } while (__any_sync(EMPTY, real && most == EMPTY));
#pragma unroll
  for (int s = 0; s < CLUSTER; ++s) {
    if (real) store16(from + s * SOURCE_BYTES, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
  }
#pragma unroll
  for (int s = 0; s < CLUSTER; ++s) start = add4(start, v[s]);
  return start;
}

// Two neighbouring results of a 16-bit row, or four of a float32 row, to (rows, H) memory.
__device__ __forceinline__ void write_row(void* out, const Params& p, int row, int column, u32 v) {
  if (row >= p.rows) return;
  *reinterpret_cast<u32*>(static_cast<char*>(out) + (static_cast<long long>(row) * H + column) * 2) = v;
}

__device__ __forceinline__ void write_row4(void* out, const Params& p, int row, int column,
                                           float4 v) {
  if (row >= p.rows) return;
  *reinterpret_cast<float4*>(static_cast<float*>(out) + static_cast<long long>(row) * H + column) = v;
}

// ---------------------------------------------------------------- the warps that bring weights

__device__ __forceinline__ void bring_weights(const Params& p, u32 base, int first, int tiles,
                                              int rank, int thread) {
  constexpr int PIECES = SLICE * ES / 16;  // of a row
  // With few slots the layer after next comes as far as the L2 cache.
  const auto to_l2 = [&](int layer) {
    if (layer >= p.layers) return;
    const char* const from = static_cast<const char*>(p.weight[layer]) +
                             (static_cast<long long>(first) * H + rank * SLICE) * ES;
    for (int row = thread; row < tiles * 8; row += 32 * BRING_WARPS) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + row * (H * ES)),
                   "n"(SLICE * ES)
                   : "memory");
    }
  };
  for (int layer = 0; layer < p.layers; ++layer) {
    const int slot = layer % SLOTS, use = layer / SLOTS;
    if (use > 0) mbar_wait_own(base + BAR_EMPTY + slot * 8, (use - 1) & 1);
    const char* const from = static_cast<const char*>(p.weight[layer]) +
                             (static_cast<long long>(first) * H + rank * SLICE) * ES;
    const u32 to = base + SLOT_OFFSET + slot * SLOT_BYTES;
#pragma unroll 4
    for (int i = thread; i < tiles * 8 * PIECES; i += 32 * BRING_WARPS) {
      const int row = i / PIECES, piece = i % PIECES;
      copy16<16>(to + weight_at(row) + piece * 16, from + row * (H * ES) + piece * 16, 16);
    }
    mbar_arrive_copied(base + BAR_FULL + slot * 8);
    if constexpr (SLOTS == 2) {
      if (layer >= SLOTS - 1) to_l2(layer + 1);
    }
  }
}

// Empties what this block published in the launch before.
__device__ __forceinline__ void empty_other_set(const Params& p, u32 launch, int first, int tiles,
                                                int rank, int lane) {
  char* other = static_cast<char*>(p.exchange) +
                static_cast<long long>(~launch & 1) * (p.layers - 1) * LAYER_BYTES;
  for (int layer = 0; layer + 1 < p.layers; ++layer, other += LAYER_BYTES) {
    for (int q = rank; q < 2 * MT; q += CLUSTER) {
      if constexpr (SINGLE) {
        for (int i = lane; i < tiles * 16; i += 32) {
          publish4(other + piece_at(first / 4 + (i >> 3), q * 8 + (i & 7)),
                   make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
        }
      } else {
        for (int j = 0; j < tiles; ++j) {
          publish(other + word_at(first + j * 8 + (lane & 3) * 2, q * 8 + (lane >> 2)), EMPTY);
        }
      }
    }
  }
}

// ---------------------------------------------------------------- the kernel

// Of the warps that multiply: every layer, 16-bit dtypes (grid_half.cu) and float32
// (grid_single.cu); the host puts their text after this.
__device__ __forceinline__ void layers_half(const Params& p, u32 base, int first, int tiles,
                                            int rank, int warp, int lane, char* set);
__device__ __forceinline__ void layers_single(const Params& p, u32 base, int first, int tiles,
                                              int rank, int warp, int lane, char* set);

extern "C" __global__ void __launch_bounds__(THREADS, 1)
whole_mlp_grid(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 base = smem_addr(shared);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int rank = static_cast<int>(cluster_rank());
  const int first = static_cast<int>(blockIdx.x) / CLUSTER * (NT * 8);
  const int tiles = min(NT, (H - first) / 8);

  if (threadIdx.x == 32 * COMPUTE_WARPS) {
    for (int i = 0; i < SLOTS; ++i) {
      mbar_init(base + BAR_FULL + i * 8, 32 * BRING_WARPS);
      mbar_init(base + BAR_EMPTY + i * 8, COMPUTE_WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (warp >= COMPUTE_WARPS) {
    asm volatile("bar.sync 15, %0;" ::"n"(32 * BRING_WARPS) : "memory");
    cluster_arrive();
    bring_weights(p, base, first, tiles, rank, threadIdx.x - 32 * COMPUTE_WARPS);
  }
  const u32 launch = p.launches[blockIdx.x];
  char* const set = static_cast<char*>(p.exchange) +
                    static_cast<long long>(launch & 1) * (p.layers - 1) * LAYER_BYTES;
  if (warp >= COMPUTE_WARPS) {
    if (warp == COMPUTE_WARPS) empty_other_set(p, launch, first, tiles, rank, lane);
    cluster_wait();
  } else {
    const uint4 nothing = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
    for (int i = threadIdx.x; i < 2 * HALVES * HALF_BYTES / 16; i += 32 * COMPUTE_WARPS) {
      store16(base + SUMS_OFFSET + i * 16, nothing);
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    if constexpr (SINGLE) layers_single(p, base, first, tiles, rank, warp, lane, set);
    else layers_half(p, base, first, tiles, rank, warp, lane, set);
  }
  __syncthreads();
  if (threadIdx.x == 0) p.launches[blockIdx.x] = launch + 1;
}
