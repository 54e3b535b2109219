// A chain of layers whose weights do not fit shared memory, in one kernel for Hopper (sm_90a), over
// all multiprocessors: weights stream through shared memory without a pause.
//
// CLUSTERS clusters of CLUSTER blocks. A cluster owns up to NT tiles of 8 columns of every layer,
// block r of it multiplies the r-th slice of K. One thread of a block brings weights by TMA through
// a ring of STAGES tiles (8 NT columns, 64 of K) and runs on into the next layers, which depend on
// nothing computed here: while a layer's results are handed on, the next one's weights arrive.
//
// Two warpgroups multiply, by wgmma: activations are operand A, straight from the registers they
// were read into, weights operand B. Up to 64 rows the groups take turns at the tiles of K and add
// up in the end; beyond, each has 64 rows of its own and both read every tile.
//
// Between layers, as in grid.cu, the numbers are themselves the flag (a word that is not
// written yet is EMPTY, a NaN that arithmetic never yields):
//   1. The blocks of a cluster store partial sums (16 rows, 8 columns: a unit) into one another's
//      shared memory: block u % CLUSTER completes unit u. It empties what it has read and tells its
//      peers, who wait for that before they send the next layer's.
//   2. It publishes the unit in global memory, which stays in the L2 cache, in the order in which
//      wgmma wants its operand A: every warp reads its rows and its slice of K, 16 bytes a lane.
// Launches on one workspace follow one another; each uses one of two sets of published activations
// and empties the other. All blocks must run at once (a cooperative launch).
//
// Columns are padded to 16, K to whole tiles for every warpgroup: TMA fills in zeros for weights
// that do not exist. A cluster without columns of a layer leaves that layer out.
//
// Macros from the host: DTYPE (0 bfloat16, 1 float16) CLUSTER CLUSTERS WIDTH (of x and all layers
// where it is the same, else 0) NT MT (tiles of 16 rows, at most 8) STAGES HELD (tiles of K whose
// activations a warpgroup has in registers at once) AGAIN (tiles of these asked for again at once)
// ACT FINAL SAVE (as in whole.cu) MAX_LAYERS KS (unused, for device.cu), a number ACT_<NAME>
// for every activation, and the generated functions wgmma and wgmma_first (acc, a0, a1, a2, a3,
// descriptor).

constexpr int ROWS = 16 * MT;
constexpr int KG = MT > 4 ? 1 : 2;                   // warpgroups that share K
constexpr int CONSUMERS = 8;                         // warps
constexpr int THREADS = 32 * CONSUMERS + 128;
constexpr int STAGE_BYTES = (NT + 1) / 2 * 2048;     // 8 NT rows of 128 bytes, scratch for sums
constexpr int UNITS = NT * MT;
constexpr int SHARE = (UNITS + CLUSTER - 1) / CLUSTER;        // units a block completes
constexpr int ROUNDS = (SHARE + CONSUMERS - 1) / CONSUMERS;
constexpr int PART_BYTES = 512;                      // of a unit, one block's
constexpr int UNIT_BYTES = CLUSTER * PART_BYTES;

constexpr int SUMS_OFFSET = STAGES * STAGE_BYTES;
constexpr int BAR_FULL = SUMS_OFFSET + SHARE * UNIT_BYTES;
constexpr int BAR_EMPTY = BAR_FULL + 8 * STAGES;
constexpr int BAR_FREE = BAR_EMPTY + 8 * STAGES;     // two, by turns: peers have read their sums
constexpr int SHARED_BYTES = BAR_FREE + 16;

static_assert(NT * 8 <= 256 && STAGES >= 4 && AGAIN <= HELD, "tiles");
// A wait names a phase by its parity: a group has to see every phase of the slots it waits for.
static_assert(STAGES % KG == 0, "a slot belongs to one group");

struct Params {
  TensorMap weight[MAX_LAYERS];     // (width[i + 1], width[i]), in boxes of `each` columns, 64 of K
  const void* x;                    // (rows, width[0]), rows x_stride elements apart, on 16 bytes
  void* y;                          // (rows, width[layers])
  char* exchange;                   // two sets of published activations
  u32* launches;                    // one per block
  const void* bias[MAX_LAYERS];     // (width[i + 1]) or null
  void* saved[MAX_LAYERS];          // (rows, width[i + 1]) or null
  long long x_stride;
  long long set_bytes;              // of one set
  int rows;
  int layers;
  int first_out;                    // from this layer on weights leave the L2 cache first
  int width[MAX_LAYERS + 1];        // multiples of 8, but for the last
};

// ---------------------------------------------------------------- who computes what

__device__ __host__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ int width(const Params& p, int i) { return WIDTH ? WIDTH : p.width[i]; }

// Tiles of 8 columns of n outputs, padded to pairs: the next layer reads 16 of K at a time.
__device__ __forceinline__ int column_tiles(int n) { return ceil_div(n, 16) * 2; }

__device__ __forceinline__ int layer_bytes(int n) { return column_tiles(n) * (ROWS * 16); }

// Tiles of K of every block.
__device__ __host__ constexpr int steps_of(int k) { return ceil_div(k, 64 * CLUSTER * KG) * KG; }

constexpr bool EXACT = WIDTH > 0 && WIDTH % (64 * CLUSTER * KG) == 0;  // no K is padded
// Known at compile time, the loop over parts of a slice is unrolled.
constexpr int PHASES = WIDTH ? ceil_div(steps_of(WIDTH) / KG, HELD) : 1;

struct Columns {  // of a layer of n outputs, for one cluster
  int first, tiles;  // a column; none or fewer where tiles <= 0
  int each;          // of every cluster but the last ones

  __device__ __forceinline__ Columns(int n, int cluster) {
    each = WIDTH ? NT : ceil_div(column_tiles(n), CLUSTERS);
    first = cluster * each * 8;
    tiles = min(each, column_tiles(n) - cluster * each);
  }
};

// A published activation is [K / 16][MT][lane] 16 bytes: lane 4 g + t has columns 2 t, 2 t + 1 of
// rows g and g + 8, then columns 2 t + 8, 2 t + 9 of both. This is its half of tile `column / 8`.
__device__ __forceinline__ int unit_at(int column, int m, int lane) {
  return ((column >> 4) * MT + m) * 512 + lane * 16 + (column >> 3 & 1) * 8;
}

// Two neighbouring results to (rows, n) memory.
__device__ __forceinline__ void write_row(void* out, const Params& p, int n, int row, int column,
                                          u32 v) {
  if (row >= p.rows || column >= n) return;
  char* const at = static_cast<char*>(out) + (static_cast<long long>(row) * n + column) * 2;
  if (WIDTH || (n & 1) == 0) {
    *reinterpret_cast<u32*>(at) = v;
  } else {
    unsigned short* const halves = reinterpret_cast<unsigned short*>(at);
    halves[0] = static_cast<unsigned short>(v);
    if (column + 1 < n) halves[1] = static_cast<unsigned short>(v >> 16);
  }
}

// Eight neighbouring numbers of x, or zeros.
__device__ __forceinline__ uint4 load_x(const char* at, bool exists) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(at), "r"(static_cast<int>(exists))
      : "memory");
  return v;
}

// Four lanes hold four words each: word t of lane j goes to word j of lane t.
__device__ __forceinline__ void transpose_quad(uint4& v, int t) {
  const bool high = t & 2, odd = t & 1;
  const u32 a = __shfl_xor_sync(EMPTY, high ? v.x : v.z, 2);
  const u32 b = __shfl_xor_sync(EMPTY, high ? v.y : v.w, 2);
  if (high) {
    v.x = a;
    v.y = b;
  } else {
    v.z = a;
    v.w = b;
  }
  const u32 c = __shfl_xor_sync(EMPTY, odd ? v.x : v.y, 1);
  const u32 d = __shfl_xor_sync(EMPTY, odd ? v.z : v.w, 1);
  if (odd) {
    v.x = c;
    v.z = d;
  } else {
    v.y = c;
    v.w = d;
  }
}

// 32 of K of rows g and g + 8, 8 of K a lane, as they lie in x: to two pieces of operand A.
__device__ __forceinline__ void arrange(uint4& top, uint4& low, int t) {
  transpose_quad(top, t);
  transpose_quad(low, t);
  const uint4 first = make_uint4(top.x, low.x, top.y, low.y);
  low = make_uint4(top.z, low.z, top.w, low.w);
  top = first;
}

// Tells a block of the cluster that sums in this block's shared memory are emptied: of that memory
// there is one copy, so it is enough that this block's threads would see them empty. A release at
// cluster scope would wait for everything this thread has published.
__device__ __forceinline__ void mbar_arrive_emptied(u32 bar) {
  asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

// ---------------------------------------------------------------- the thread that brings weights

__device__ __forceinline__ void bring_weights(const Params& p, u32 base, int cluster, int rank) {
  int slot = 0;
  u32 parity = 1;  // of the barrier that says a slot is empty; fresh ones pass
#pragma unroll 1
  for (int layer = 0; layer < p.layers; ++layer) {
    const Columns own(width(p, layer + 1), cluster);
    if (!WIDTH && own.tiles <= 0) continue;
    const int steps = steps_of(width(p, layer));
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      mbar_wait_own(base + BAR_EMPTY + slot * 8, parity);
      const u32 bar = base + BAR_FULL + slot * 8;
      mbar_expect(bar, own.each * 1024);
      tma_load(base + slot * STAGE_BYTES, &p.weight[layer], bar, (rank * steps + i) * 64, own.first,
               layer >= p.first_out);
      if (++slot == STAGES) {
        slot = 0;
        parity ^= 1;
      }
    }
  }
}

// Empties what this block published in the launch before.
__device__ __forceinline__ void empty_other_set(const Params& p, u32 launch, int cluster, int rank,
                                                int lane) {
  char* other = p.exchange + (~launch & 1) * p.set_bytes;
  for (int layer = 0; layer + 1 < p.layers; ++layer) {
    const int n = width(p, layer + 1);
    const Columns own(n, cluster);
    for (int u = rank; u < own.tiles * MT; u += CLUSTER) {
      publish2(other + unit_at(own.first + u / MT * 8, u % MT, lane), EMPTY, EMPTY);
    }
    other += layer_bytes(n);
  }
}

// ---------------------------------------------------------------- the warpgroups that multiply

// The other warpgroup's share of the sums, to where it finds them.
template <int kFrom, int kTo>
__device__ __forceinline__ void give(const float (&acc)[NT][4], u32 to) {
#pragma unroll
  for (int j = kFrom; j < kTo; ++j) {
    store16(to + (j - kFrom) * 2048, as_words(acc[j][0], acc[j][1], acc[j][2], acc[j][3]));
  }
}

// Sums of 16 rows and 8 columns to the block that completes them.
__device__ __forceinline__ void send(const float (&v)[4], u32 to, int j, int m, int rank,
                                     int lane) {
  const int u = j * MT + m, at = u % CLUSTER;
  const u32 place = to + u / CLUSTER * UNIT_BYTES;
  const uint4 words = as_words(v[0], v[1], v[2], v[3]);
  if (at == rank) store_own4(place + lane * 16, words);
  else store_peer4(peer_addr(place, at) + lane * 16, words);
}

// The same with what the other warpgroup gave added.
template <int kFrom, int kTo>
__device__ __forceinline__ void add_and_send(const float (&acc)[NT][4], u32 from, u32 to, int m,
                                             int tiles, int rank, int lane) {
  float sum[kTo - kFrom][4];  // not acc: that would make ptxas serialise all wgmma
#pragma unroll
  for (int j = kFrom; j < kTo; ++j) {
    const uint4 v = load16(from + (j - kFrom) * 2048);
    sum[j - kFrom][0] = acc[j][0] + __uint_as_float(v.x);
    sum[j - kFrom][1] = acc[j][1] + __uint_as_float(v.y);
    sum[j - kFrom][2] = acc[j][2] + __uint_as_float(v.z);
    sum[j - kFrom][3] = acc[j][3] + __uint_as_float(v.w);
  }
#pragma unroll
  for (int j = kFrom; j < kTo; ++j) {
    if (j < tiles) send(sum[j - kFrom], to, j, m, rank, lane);
  }
}

// start + sums of all blocks of the cluster, in their order; empties them.
__device__ __forceinline__ float4 take_sums(float4 start, u32 from) {
  uint4 v[CLUSTER];
  bool missing;
  do {
    missing = false;
#pragma unroll
    for (int s = 0; s < CLUSTER; ++s) v[s] = load_sums(from + s * PART_BYTES);
#pragma unroll
    for (int s = 0; s < CLUSTER; ++s) missing |= is_empty(v[s]);
  } while (__any_sync(EMPTY, missing));
#pragma unroll
  for (int s = 0; s < CLUSTER; ++s) {
    store16(from + s * PART_BYTES, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
    start = add4(start, v[s]);
  }
  return start;
}

__device__ __forceinline__ void multiply_layers(const Params& p, u32 base, int cluster, int rank,
                                                int warp, int lane, char* set) {
  const int group = warp >> 2, w = warp & 3;
  const int m = KG == 1 ? warp : w, kg = KG == 1 ? 0 : group;
  const bool real = m < MT;
  const int g = lane >> 2, t = lane & 3;
  uint4 a[4 * HELD];  // operand A: pieces of 16 of K
  char* published = nullptr;  // the layer's input, from the second on
  char* target = set;         // its output, but for the last
  u32 first_tile = 0;         // of weights, counted from the first of the launch
  int turn = 0;               // layers of which this cluster had columns
  cluster_wait();  // every block's sums are empty and its barriers ready
#pragma unroll 1
  for (int layer = 0; layer < p.layers; ++layer) {
    const int k = width(p, layer), n = width(p, layer + 1);
    const bool last = layer + 1 == p.layers;
    const Columns own(n, cluster);
    const char* const input = published;
    char* const out = target;
    published = out;
    target = out + layer_bytes(n);
    if (!WIDTH && own.tiles <= 0) continue;
    const int steps = steps_of(k), count = steps / KG, pieces = ceil_div(k, 16);
    const int piece0 = (rank * steps + kg) * 4;
    const char* const from = input + (piece0 * MT + m) * 512 + lane * 16;
    float acc[NT][4];
    if constexpr (!WIDTH) {
#pragma unroll
      for (int j = 0; j < NT; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[j][e] = 0.0f;
      }
    }
    // Activations of tile `index` of the group's slice; those that do not exist are zero.
    const auto ask = [&](int i, int index) {
      if (layer == 0) {  // to be arranged before they are multiplied
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int row = m * 16 + g + (q & 1) * 8;
          const int at = (piece0 + index * KG * 4 + (q & 2)) * 16 + 8 * t;
          const char* const x = static_cast<const char*>(p.x) + (row * p.x_stride + at) * 2;
          a[4 * i + q] = load_x(x, row < p.rows && index < count && (EXACT || at < k));
        }
      } else {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int piece = index * KG * 4 + q;  // from the group's first on
          a[4 * i + q] = make_uint4(0, 0, 0, 0);
          if (real && index < count && (EXACT || piece0 + piece < pieces)) {
            a[4 * i + q] = load_published(from + piece * (MT * 512));
          }
        }
      }
    };
    // What is missing of AGAIN tiles from `index` on; what does not exist is never missing.
    const auto ask_again = [&](int i, int index) {
#pragma unroll
      for (int q = 0; q < 4 * AGAIN; ++q) {
        uint4& v = a[(4 * i + q) % (4 * HELD)];
        if (is_empty(v)) {
          v = load_published(from + ((index + q / 4) * KG * 4 + q % 4) * (MT * 512));
        }
      }
    };
#pragma unroll
    for (int i = 0; i < HELD; ++i) ask(i, i);
    float shift[ROUNDS][2];  // biases of what this thread will complete
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int u = (i * CONSUMERS + warp) * CLUSTER + rank;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = own.first + u / MT * 8 + 2 * t + e;
        const bool exists = p.bias[layer] && u < own.tiles * MT && (WIDTH || column < n);
        shift[i][e] = exists ? load_element(p.bias[layer], column) : 0.0f;
      }
    }
    int slot = 0;
#pragma unroll PHASES
    for (int phase = 0; phase < (WIDTH ? PHASES : ceil_div(count, HELD)); ++phase) {
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        const int index = phase * HELD + i;
        if (index >= count) break;
        if (layer > 0 && real) {  // ask again, for some more as well, until all of this is there
          while (true) {
            bool missing = false;
#pragma unroll
            for (int q = 0; q < 4; ++q) missing |= is_empty(a[4 * i + q]);
            if (!__any_sync(EMPTY, missing)) break;
            ask_again(i, index);
          }
        }
        if (layer == 0) {
          arrange(a[4 * i], a[4 * i + 1], t);
          arrange(a[4 * i + 2], a[4 * i + 3], t);
        }
        const u32 tile = first_tile + index * KG + kg;
        slot = tile % STAGES;
        mbar_wait_own(base + BAR_FULL + slot * 8, tile / STAGES & 1);
        const u64 weights = descriptor(base + slot * STAGE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const uint4 v = a[4 * i + q];
          if (WIDTH && index == 0 && q == 0) wgmma_first(acc, v.x, v.y, v.z, v.w, weights);
          else wgmma(acc, v.x, v.y, v.z, v.w, weights + q * 2);
        }
        wgmma_finish();
        const bool lent = KG == 2 && index == count - 1;  // to the other group
        if (!lent && lane == 0) mbar_arrive(base + BAR_EMPTY + slot * 8);
        if (index + HELD < count) ask(i, index + HELD);
      }
    }

    const u32 sums = base + SUMS_OFFSET;
    const u32 to = sums + rank * PART_BYTES;
    const auto wait_for_peers = [&] {  // they have read what this block sent in its turn before
      if (turn > 0) mbar_wait_own(base + BAR_FREE + (turn - 1 & 1) * 8, (turn - 1) >> 1 & 1);
    };
    if constexpr (KG == 2) {  // a group's last tile of weights makes room for what it gives
      constexpr int HALF = (NT + 1) / 2;
      bar_sync(2 + group, 128);
      const int theirs = (first_tile + steps - 2 + (kg ^ 1)) % STAGES;
      const u32 mine_at = base + slot * STAGE_BYTES + w * 512 + lane * 16;
      const u32 theirs_at = base + theirs * STAGE_BYTES + w * 512 + lane * 16;
      if (real) {
        if (kg == 0) give<HALF, NT>(acc, mine_at);
        else give<0, HALF>(acc, mine_at);
      }
      fence_async();
      bar_sync(1, 32 * CONSUMERS);
      wait_for_peers();
      if (real) {
        if (kg == 0) add_and_send<0, HALF>(acc, theirs_at, to, m, own.tiles, rank, lane);
        else add_and_send<HALF, NT>(acc, theirs_at, to, m, own.tiles, rank, lane);
      }
      fence_async();
      __syncwarp();
      if (lane == 0) mbar_arrive(base + BAR_EMPTY + theirs * 8);
    } else {
      wait_for_peers();
      if (real) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          if (j < own.tiles) send(acc[j], to, j, m, rank, lane);
        }
      }
    }

#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int place = i * CONSUMERS + warp, u = place * CLUSTER + rank;
      if (u >= own.tiles * MT) break;
      const u32 at = sums + place * UNIT_BYTES + lane * 16;
      float4 sum = make_float4(shift[i][0], shift[i][1], shift[i][0], shift[i][1]);
      sum = take_sums(sum, at);
      const int first = own.first + u / MT * 8, row = u % MT * 16 + g, column = first + 2 * t;
      if constexpr (SAVE != 0) {
        if (saves_pre(last)) {
          write_row(p.saved[layer], p, n, row, column, pack(sum.x, sum.y));
          write_row(p.saved[layer], p, n, row + 8, column, pack(sum.z, sum.w));
        }
      }
      if (last) {
        write_row(p.y, p, n, row, column, pack(act<FINAL>(sum.x), act<FINAL>(sum.y)));
        write_row(p.y, p, n, row + 8, column, pack(act<FINAL>(sum.z), act<FINAL>(sum.w)));
      } else {
        u32 top = pack(act<ACT>(sum.x), act<ACT>(sum.y));
        u32 low = pack(act<ACT>(sum.z), act<ACT>(sum.w));
        if (!WIDTH && first >= n) top = low = 0;  // padding: the next layer's infinity times zero
        publish2(out + unit_at(first, u % MT, lane), never_empty(top), never_empty(low));
        if constexpr (SAVE == 2 || SAVE == 3) {
          write_row(p.saved[layer], p, n, row, column, top);
          write_row(p.saved[layer], p, n, row + 8, column, low);
        }
      }
    }
    __syncwarp();
    if (!last && lane < CLUSTER) {
      mbar_arrive_emptied(peer_addr(base + BAR_FREE + (turn & 1) * 8, lane));
    }
    first_tile += steps;
    ++turn;
  }
}

// ---------------------------------------------------------------- the kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1)
whole_mlp_stream(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 base = smem_addr(shared);
  const int warp = __shfl_sync(EMPTY, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const int rank = static_cast<int>(cluster_rank());
  const int cluster = static_cast<int>(blockIdx.x) / CLUSTER;

  const u32 launch = p.launches[blockIdx.x];
  // A launch of 384 threads gets 168 registers each; 40 + 2 * 232 = 3 * 168 shares them out anew.
  if (warp >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 32 * CONSUMERS) {
      for (int i = 0; i < STAGES; ++i) {
        mbar_init(base + BAR_FULL + i * 8, 1);
        mbar_init(base + BAR_EMPTY + i * 8, KG == 1 ? 8 : 4);
      }
      for (int i = 0; i < 2; ++i) mbar_init(base + BAR_FREE + i * 8, CLUSTER * CONSUMERS);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      fence_async();
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    if (threadIdx.x == 32 * CONSUMERS) bring_weights(p, base, cluster, rank);
    if (warp == CONSUMERS + 1) empty_other_set(p, launch, cluster, rank, lane);
    __syncwarp();
    cluster_wait();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    for (int i = threadIdx.x; i < SHARE * UNIT_BYTES / 16; i += 32 * CONSUMERS) {
      store16(base + SUMS_OFFSET + i * 16, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    multiply_layers(p, base, cluster, rank, warp, lane, p.exchange + (launch & 1) * p.set_bytes);
  }
  __syncthreads();
  if (threadIdx.x == 0) p.launches[blockIdx.x] = launch + 1;
  if constexpr (!WIDTH) {
    // A cluster that left the last layer out still has arrivals of its blocks on their way.
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    cluster_wait();
  }
}
