// dx, dW and db of y = act(x W^T + b) of groups of up to 256 features in one pass, for Hopper. The texts
// of hopper_gemm.h, hopper_activations.h and wide_instructions.h stand before this one.
//
// A block takes one group, every chunks-th tile of TOKENS tokens, and 128 of the K features: of these dx
// and dW; with more than 128 features there are two such blocks, which may be a cluster that shares
// what both read. dW and W, both turned, stay with two warpgroups, 64 features each:
//   dx^T (64, TOKENS) = W^T (64, N) dpre^T
//   dW^T (64, N) += x^T (64, TOKENS) dpre
// dW is in registers, and so is W for as many of the N as there are registers; the rest of it is in
// shared memory. The first warpgroup, the graders, writes dpre over dy and sums db; between tiles each
// of its warps has the copy engine bring in a box of 64 features of dy, of what the forward saved, and of x.
// dx leaves through the copy engine. Where several blocks share a group each leaves a float32 share of dW
// and db, and the second kernel adds them up in order. With CHANNELS a box is 64 features of a tile's
// tokens, so that what was turned is not, and what was not is; half a tile is half of its features.
//
// What two blocks of a cluster share of dy and of what was saved, as SPLIT says:
//   1: each brings in and grades half of the tile's rows, and sends its dpre to the other;
//   0: each brings in half of the boxes for both, and both grade all.
//
// Macros from the host, besides those of the headers: K N, of a group; NEED_DX NEED_DW NEED_DB; TILES
// of dy and x, PARTS (half tiles) of what was saved, OUTS of dx in shared memory; HELD, of the boxes of
// W those in registers; SPLIT.

constexpr int TOKENS = BK, HALF = 128;
constexpr int HALVES = (K + HALF - 1) / HALF;
constexpr int BOX = TOKENS * 128, N_BOXES = BN / 64, K_BOXES = (K + 63) / 64;
constexpr bool HAS_SAVED = ACT != ACT_NONE;
constexpr bool HAS_GRADERS = HAS_SAVED || NEED_DB;

constexpr int DY_BYTES = N_BOXES * BOX, X_BYTES = NEED_DW ? 2 * BOX : 0;
constexpr int TILE = DY_BYTES + X_BYTES;
constexpr int SAVED_AT = TILES * TILE;
constexpr int OUT_AT = SAVED_AT + (HAS_SAVED ? PARTS * (DY_BYTES / 2) : 0);
constexpr int W_AT = OUT_AT + (NEED_DX ? OUTS * 2 * BOX : 0), W_BOXES = NEED_DX ? N_BOXES - HELD : 0;
constexpr int DB_AT = W_AT + W_BOXES * 2 * BOX;

// Each grader has a box of half a tile, or ROWS of its rows.
constexpr int SHARERS = 4 / N_BOXES, GRADERS = SHARERS * N_BOXES, ROWS = TOKENS / 2 / SHARERS;
constexpr int AT_ONCE = ROWS > 8 && (ACT == ACT_NONE || ACT == ACT_RELU) ? 4 : 2;  // four rows each
constexpr int OWN_HALVES = SPLIT ? 1 : 2;  // of a tile, those that this block grades
constexpr int DB_BYTES = NEED_DB && !CHANNELS ? CLUSTER * GRADERS * 64 * 4 : 0;
// Sums that a grader's lane keeps: of 8 columns, or with CHANNELS of a row of each half that is its.
constexpr int SUMS = !CHANNELS ? 8 : CLUSTER == 1 ? 2 : 1;

constexpr int FULL_AT = DB_AT + DB_BYTES;  // barriers: dy, saved and x are there
constexpr int GRADED_AT = FULL_AT + 8 * TILES;
constexpr int FREE_AT = GRADED_AT + 8 * TILES;
constexpr int PART_FREE_AT = FREE_AT + 8 * TILES;
constexpr int W_FULL_AT = PART_FREE_AT + 8 * PARTS;

constexpr int LEFT = 56, TAKEN = 224;  // registers of a thread

static_assert(LEFT + 2 * TAKEN <= 3 * LAUNCHED, "more would be waited for for ever");
static_assert(K % 8 == 0 && N % 8 == 0 && K <= 256 && N <= BN && BN <= 256, "sizes");
static_assert(CLUSTER == 1 || CLUSTER == HALVES, "a cluster is the blocks of the same tiles");
static_assert(!SPLIT || CLUSTER == 2 && HAS_SAVED, "a tile is split between the blocks of a cluster");
static_assert(MMA_M == 1 && A_MN != CHANNELS && B_MN != CHANNELS, "as products() is used here");

// Tells the blocks that fill a place that this warp is done with it.
__device__ __forceinline__ void release(u32 bar, u32 lane) {
  if (CLUSTER > 1) {
    if (lane < CLUSTER) mbar_arrive_cta(bar, lane);
  } else if (lane == 0) {
    mbar_arrive(bar);
  }
}

// ---------------------------------------------------------------- dpre, db

// dy * act'(pre) from what was saved: y for relu, leaky_relu, sigmoid and tanh, else pre.
__device__ __forceinline__ float graded(float dy, float saved) {
  if constexpr (ACT == ACT_LEAKY_RELU) return saved > 0.0f ? dy : 0.01f * dy;
  if constexpr (ACT == ACT_SIGMOID) return dy * (saved * (1.0f - saved));
  if constexpr (ACT == ACT_TANH) return dy * fmaf(-saved, saved, 1.0f);
  float slope;
  act_and_slope(saved, slope);
  return dy * slope;
}

__device__ __forceinline__ u32 graded_words(u32 dy, u32 saved) {
  if constexpr (ACT == ACT_RELU) return where_positive(dy, saved);
  float lo, hi, saved_lo, saved_hi;
  unpack(dy, lo, hi);
  unpack(saved, saved_lo, saved_hi);
  return pack(graded(lo, saved_lo), graded(hi, saved_hi));
}

// The sums over eight lanes of what each adds up of a row's 16 bytes.
__device__ __forceinline__ float row_sum(const u32 (&words)[4]) {
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    float lo, hi;
    unpack(words[v], lo, hi);
    sum += lo + hi;
  }
  sum += shuffled(sum, 1);
  sum += shuffled(sum, 2);
  return sum + shuffled(sum, 4);
}

// dpre over dy in ROWS rows of a box, and its columns, or with CHANNELS its rows, added to `sums`: lane
// 8i + j keeps row 4j + i. dy, saved: where this lane's 16 bytes of the first row of four lie; further
// down, every other time in the other half of a row.
template <int kSum>
__device__ __forceinline__ void grade(u32 dy, u32 saved, bool sum, float (&sums)[SUMS]) {
#pragma unroll 1
  for (int turn = 0; turn < ROWS / 4; turn += AT_ONCE, dy += AT_ONCE * 512, saved += AT_ONCE * 512) {
    u32 words[AT_ONCE][4], kept[AT_ONCE][4];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      load_words(words[i], (dy ^ i % 2 * 64) + i * 512);
      if (HAS_SAVED) load_words(kept[i], (saved ^ i % 2 * 64) + i * 512);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (HAS_SAVED) {
#pragma unroll
        for (int v = 0; v < 4; ++v) words[i][v] = graded_words(words[i][v], kept[i][v]);
        store_words((dy ^ i % 2 * 64) + i * 512, words[i]);
      }
    }
    if (NEED_DB && sum) {
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if constexpr (CHANNELS) {
          const float all = row_sum(words[i]);
          if (lane_id() % 8 == turn + i) sums[kSum] += all;
        } else {
#pragma unroll
          for (int v = 0; v < 4; ++v) {
            float lo, hi;
            unpack(words[i][v], lo, hi);
            sums[2 * v] += lo;
            sums[2 * v + 1] += hi;
          }
        }
      }
    }
  }
}

// With CHANNELS: the sums of a grader's rows into db or its share; `row` is the first.
__device__ __forceinline__ void store_rows(float sum, char* db, bool rounded, int row, int lane) {
  const int n = row + lane % 8 * 4 + lane / 8;
  if (lane % 8 >= ROWS / 4 || n >= N) return;
  if (rounded)
    reinterpret_cast<unsigned short*>(db)[n] = static_cast<unsigned short>(pack(sum, 0.0f));
  else
    reinterpret_cast<float*>(db)[n] = sum;
}

// A grader's sums of 64 columns into the first block's room for them.
__device__ __forceinline__ void give_sums(u32 room, int rank, int grader, int lane,
                                          float (&sums)[SUMS]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sums[i] += shuffled(sums[i], 8);
    sums[i] += shuffled(sums[i], 16);
  }
  if (lane >= 8) return;
  const u32 to = room + ((rank * GRADERS + grader) * 64 + 8 * lane) * 4;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const u32 words[4] = {__float_as_uint(sums[i]), __float_as_uint(sums[i + 1]),
                          __float_as_uint(sums[i + 2]), __float_as_uint(sums[i + 3])};
    if (CLUSTER > 1) store_words_cta(to + 4 * i, 0, words); else store_words(to + 4 * i, words);
  }
}

// The graders' sums of two columns, added up in order, into db or its share.
__device__ __forceinline__ void store_db(u32 room, char* db, bool rounded, int column) {
  if (column >= N) return;
  float lo = 0.0f, hi = 0.0f;
#pragma unroll
  for (int i = 0; i < CLUSTER * SHARERS; ++i) {
    const int grader = i / SHARERS * GRADERS + column / 64 * SHARERS + i % SHARERS;
    float of[2];
    load_pair(of, room + (grader * 64 + column % 64) * 4);
    lo += of[0];
    hi += of[1];
  }
  if (rounded)
    *reinterpret_cast<u32*>(db + 2 * column) = pack(lo, hi);
  else
    *reinterpret_cast<float2*>(db + 4 * column) = make_float2(lo, hi);
}

// ---------------------------------------------------------------- dx^T = W^T dpre^T

// W^T of one warp's 16 of the features and the first HELD boxes of N, as the multiplier takes it.
struct Weights {
  u32 word[4 * HELD][4];
};

__device__ __forceinline__ void load_weights(Weights& w, const unsigned short* group, int k0,
                                             int lane) {
  const int n0 = lane % 4 * 2;
  k0 += lane / 4;
  const unsigned short* from = group + n0 * K + k0;
#pragma unroll
  for (int s = 0; s < 4 * HELD; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 16 * s + i / 2 * 8, k = i % 2 * 8;
      u32 word = 0u;
      if (n < N && k + k0 < K)
        word = from[n * K + k] | static_cast<u32>(from[(n + 1) * K + k]) << 16;
      w.word[s][i] = word;
    }
  }
}

// `rest`: the other boxes of W, of this warpgroup's features.
__device__ __forceinline__ void dx_products(float (&dx)[32], const Weights& w, u32 rest, u32 dpre) {
  const u64 b_desc = make_desc<CHANNELS>(dpre), a_desc = make_desc<true>(rest);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < BN / 16; ++s) {
    const u64 b = b_desc + (s / 4 * BOX + s % 4 * (CHANNELS ? 16 * 128 : 32) >> 4);
    if (s >= 4 * HELD) {
      const u64 a = a_desc + ((s / 4 - HELD) * 2 * BOX + s % 4 * (16 * 128) >> 4);
      if (s == 0) wgmma_turned<true>(dx, a, b); else wgmma_turned<false>(dx, a, b);
    } else {
      if (s == 0) wgmma_held<true>(dx, w.word[s], b); else wgmma_held<false>(dx, w.word[s], b);
    }
  }
  wgmma_commit();
}

// One warp's 16 features of TOKENS tokens into the box of its warpgroup; `at` is this lane's.
__device__ __forceinline__ void stage_dx(u32 at, const float (&dx)[32]) {
#pragma unroll
  for (int j = 0; j < TOKENS / 8; j += 2) {
    const float* of = dx + 4 * j;
    const u32 a = pack(of[0], of[1]), b = pack(of[2], of[3]), c = pack(of[4], of[5]),
              d = pack(of[6], of[7]);
    if (CHANNELS) stmatrix(at ^ j * 16, a, b, c, d); else store_turned(at + j * 1024, a, b, c, d);
  }
}

// ---------------------------------------------------------------- dW

// dW^T of one warp's 16 features into dW (N, K) or its float32 share.
template <bool kRounded>
__device__ __forceinline__ void store_dw(const float (&dw)[BN / 2], char* group, int k0, int lane) {
  constexpr int NUMBER = kRounded ? 2 : 4;
  char* from = group + NUMBER * (lane % 4 * (2 * K) + k0 + lane / 4);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 8 * j + i % 2, k = i / 2 * 8;
      if (k0 + k < K) {
        char* to = from + NUMBER * (n * K + k);
        if constexpr (kRounded)
          *reinterpret_cast<unsigned short*>(to) =
              static_cast<unsigned short>(pack(dw[4 * j + i], 0.0f));
        else
          *reinterpret_cast<float*>(to) = dw[4 * j + i];
      }
    }
  }
}

// ---------------------------------------------------------------- kernels

// No block leaves while the other may send to it, nor before the other's sums have come.
__device__ __forceinline__ void finish() {
  __syncwarp();
  if constexpr (CLUSTER > 1) cluster_sync();
}

// What one block does: tiles chunk, chunk + chunks, ... of a group.
struct Part {
  int half, group, chunk, boxes;  // which half of the K features, in how many boxes

  __device__ __forceinline__ Part(int groups) {
    const int block = block_id(), pair = block / HALVES;
    half = block % HALVES;
    boxes = HALVES == 1 || half == 0 ? min(2, K_BOXES) : K_BOXES - 2;
    group = pair % groups;
    chunk = pair / groups;
  }
};

// What one grader brings in: of each tile its box of dy and saved, and of x, once there is room.
struct Tiles {
  const TensorMap *dy, *saved, *x, *weight;
  u32 base;
  int grader, groups, each;  // `each`: as Where has it
  int tile, turn;            // the next tile

  // False if there is no next tile, or not all its room is free.
  __device__ __forceinline__ bool bring(const Part& p, int tiles, int chunks) {
    constexpr int SENDERS = SPLIT ? 1 : CLUSTER;  // blocks that bring in each other's boxes
    constexpr int READ = BOX * (HAS_SAVED ? 2 : 1) / (SPLIT ? 2 : 1);
    const int slot = turn % TILES;
    const u32 bar = base + FULL_AT + 8 * slot, to = base + slot * TILE;
    if (tile >= tiles || !mbar_test(base + FREE_AT + 8 * slot, (turn / TILES & 1) ^ 1)) return false;
    if (HAS_SAVED) {
#pragma unroll
      for (int h = 0; h < OWN_HALVES; ++h) {
        const int half = OWN_HALVES * turn + h;
        if (!mbar_test(base + PART_FREE_AT + 8 * (half % PARTS), (half / PARTS & 1) ^ 1)) return false;
      }
    }
    const int box = grader / SHARERS, own = SPLIT ? p.half : 0;
    const Where at(tile, p.group, groups, each);
    const auto row = [](int half) { return half * (TOKENS / 2); };  // of half a box, its first
    const bool of_box = grader % SHARERS == 0, of_x = NEED_DW && grader < p.boxes;
    mbar_expect(bar, (of_box ? READ : 0) + (of_x ? BOX : 0));
    if (of_box && (SENDERS == 1 || box % SENDERS == p.half)) {
      load_tokens<SENDERS>(to + box * BOX + own * (BOX / 2), dy, bar,
                           64 * box + (CHANNELS ? row(own) : 0), at.plane,
                           at.token + (CHANNELS ? 0 : row(own)));
      if (HAS_SAVED) {
#pragma unroll
        for (int h = 0; h < OWN_HALVES; ++h)
          load_tokens<SENDERS>(base + SAVED_AT + (OWN_HALVES * turn + h) % PARTS * (DY_BYTES / 2) +
                                   box * (BOX / 2),
                               saved, bar, 64 * box + (CHANNELS ? row(own + h) : 0), at.plane,
                               at.token + (CHANNELS ? 0 : row(own + h)));
      }
    }
    if (of_x)
      load_tokens<1>(to + DY_BYTES + grader * BOX, x, bar, HALF * p.half + 64 * grader, at.plane,
                     at.token);
    if (W_BOXES > 0 && turn == 0 && grader == 0) {
      mbar_expect(base + W_FULL_AT, W_BOXES * p.boxes * BOX);
      for (int w = 0; w < W_BOXES; ++w)
        for (int b = 0; b < p.boxes; ++b)
          load_box<1>(base + W_AT + (2 * w + b) * BOX, weight, base + W_FULL_AT,
                      HALF * p.half + 64 * b, 64 * (HELD + w), p.group);
    }
    tile += chunks;
    ++turn;
    return true;
  }
};

// dy, saved (M, G, N) and x, dx (M, G, K) by their maps, in boxes of (TOKENS, 1, 64), saved, and with
// SPLIT dy, of half as many tokens; with CHANNELS (N, B * G, L) and (K, B * G, L) likewise, `tiles` of
// all B sequences and `each` of one. W (G, N, K) also by its, in boxes of (1, 64, 64). dw (chunks, G, N, K)
// and db (chunks, G, N) are float32 shares, or 16-bit results where chunks is 1. A launch has
// chunks * groups * HALVES blocks.
extern "C" __global__ void __launch_bounds__(384, 1)
grouped_linear_wide_backward(const __grid_constant__ TensorMap dy_map,
                             const __grid_constant__ TensorMap saved_map,
                             const __grid_constant__ TensorMap x_map,
                             const __grid_constant__ TensorMap dx_map,
                             const __grid_constant__ TensorMap weight_map,
                             const unsigned short* __restrict__ weight, char* __restrict__ dw,
                             char* __restrict__ db, int groups, int chunks, int tiles, int each) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = smem_addr(smem);
  const u32 full = base + FULL_AT, ready = base + GRADED_AT, free = base + FREE_AT;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) % 4;
  if (threadIdx.x == 0) {
    // graders that read dy beside the products
    constexpr int SUMMING = HAS_SAVED || !NEED_DB ? 0 : GRADERS;
    const int users = 4 * (CLUSTER > 1 ? K_BOXES : Part(groups).boxes) + SUMMING * CLUSTER;
    for (int s = 0; s < TILES; ++s) {
      mbar_init(full + 8 * s, GRADERS);
      mbar_init(ready + 8 * s, GRADERS);
      mbar_init(free + 8 * s, users);
    }
    for (int s = 0; s < PARTS; ++s)
      mbar_init(base + PART_FREE_AT + 8 * s, GRADERS * (SPLIT ? 1 : CLUSTER));
    mbar_init(base + W_FULL_AT, 1);
    publish_barriers();
  }
  if constexpr (CLUSTER > 1) cluster_sync(); else __syncthreads();

  if (warpgroup == 0) {
    leave_registers<LEFT>();
    if (warp < GRADERS) {
      const Part p(groups);
      Tiles from = {&dy_map, &saved_map, &x_map, &weight_map, base, warp, groups, each, p.chunk, 0};
      const int lane = threadIdx.x % 32, rank = CLUSTER > 1 ? p.half : 0;
      // What is left to do for one half of a tile only: sums of db, and with SPLIT all
      const int first = CLUSTER > 1 && (SPLIT || !HAS_SAVED) ? rank : 0;
      const int last = CLUSTER > 1 && (SPLIT || !HAS_SAVED) ? rank : 1;
      const int box = warp / SHARERS;
      const u32 at = (warp % SHARERS * ROWS + lane / 8) * 128 + (lane % 8 ^ lane / 8) * 16;
      float sums[SUMS] = {};
      int i = 0;
      for (int tile = p.chunk; tile < tiles; tile += chunks, ++i) {
        const int slot = i % TILES;
        if (lane == 0) {
          for (;;) {
            if (from.bring(p, tiles, chunks)) continue;
            if (from.turn > i && (!HAS_GRADERS || mbar_test(full + 8 * slot, i / TILES & 1))) break;
          }
        }
        if (!HAS_GRADERS) continue;
        __syncwarp();
        mbar_wait(full + 8 * slot, i / TILES & 1);
#pragma unroll 1
        for (int h = first; h <= last; ++h) {
          const int part = (OWN_HALVES * i + (SPLIT ? 0 : h)) % PARTS;
          const u32 half = base + slot * TILE + box * BOX + h * (BOX / 2);
          const u32 saved = base + SAVED_AT + part * (DY_BYTES / 2) + box * (BOX / 2);
          const bool sum = CLUSTER > 1 ? h == rank : p.half == 0;
          if (CHANNELS && CLUSTER == 1 && h == 1)
            grade<SUMS - 1>(half + at, saved + at, sum, sums);
          else
            grade<0>(half + at, saved + at, sum, sums);
          if (HAS_SAVED) {
            publish();
            __syncwarp();
            if (SPLIT) {
              constexpr int SENT = ROWS * 128;
              const u32 bar = ready + 8 * slot;
              if (lane == 0) {
                const u32 from = half + warp % SHARERS * SENT;
                mbar_expect(bar, SENT);  // as much comes from the other block
                send_to_cta(from, SENT, bar, rank ^ 1);
                mbar_arrive(base + PART_FREE_AT + 8 * part);
              }
            } else {
              release(base + PART_FREE_AT + 8 * part, lane);
            }
          } else {
            __syncwarp();
          }
        }
        if (!HAS_SAVED)
          release(free + 8 * slot, lane);
        else if (!SPLIT && lane == 0)
          mbar_arrive(ready + 8 * slot);
      }
      if constexpr (NEED_DB && CHANNELS) {
        const u64 share = static_cast<u64>(p.chunk) * groups + p.group;
        const bool rounded = chunks == 1;
        char* to = db + share * (N * (rounded ? 2 : 4));
        const int row = 64 * box + warp % SHARERS * ROWS + (CLUSTER > 1 ? rank * (TOKENS / 2) : 0);
        if (CLUSTER > 1 || p.half == 0) store_rows(sums[0], to, rounded, row, lane);
        if (CLUSTER == 1 && p.half == 0)
          store_rows(sums[SUMS - 1], to, rounded, row + TOKENS / 2, lane);
      } else if (NEED_DB) {
        give_sums(base + DB_AT, rank, warp, lane, sums);
      }
    }
    finish();
    if (NEED_DB && !CHANNELS && block_id() % HALVES == 0) {
      if (CLUSTER == 1) bar_sync(3, 128);
      const Part p(groups);
      const bool rounded = chunks == 1;
      const u64 share = static_cast<u64>(p.chunk) * groups + p.group;
      store_db(base + DB_AT, db + share * (N * (rounded ? 2 : 4)), rounded,
               2 * (threadIdx.x % 128));
    }
  } else {
    take_registers<TAKEN>();
    const Part p(groups);
    const int part = warpgroup - 1, k0 = HALF * p.half + 64 * part;
    if (part < p.boxes) {
      // Where this lane's 8 features lie for tokens 8 (lane / 16) + lane % 8 in the box, swizzled; with
      // CHANNELS its 8 tokens for feature lane % 16 of the warp's.
      const int lane = threadIdx.x % 32;
      const int row = CHANNELS ? 16 * warp + lane % 16 : lane / 16 * 8 + lane % 8;
      const int piece = (CHANNELS ? lane / 16 : 2 * warp + lane / 8 % 2) ^ (lane % 8);
      const u32 box = base + OUT_AT + part * BOX;
      const u32 at = box + row * 128 + piece * 16;
      Weights w;
      if (NEED_DX)
        load_weights(w, weight + static_cast<u64>(p.group) * (N * K), k0 + 16 * warp, lane);
      float sums[1][BN / 2] = {};
      float dx[32];
      if (W_BOXES > 0) mbar_wait(base + W_FULL_AT, 0);
      int slot = 0;
      u32 phase = 0, out = 0;
#pragma unroll 1
      for (int tile = p.chunk; tile < tiles; tile += chunks) {
        const u32 dpre = base + slot * TILE;
        const u32 before = free + 8 * (slot == 0 ? TILES - 1 : slot - 1);
        mbar_wait(full + 8 * slot, phase);
        if (HAS_SAVED) mbar_wait(ready + 8 * slot, phase);
        if (NEED_DX) dx_products(dx, w, base + W_AT + part * BOX, dpre);
        if constexpr (NEED_DW) {
          if (NEED_DX) {
            wgmma_wait<1>();  // dW of the tile before
            if (tile != p.chunk) release(before, lane_id());
          }
          products<false>(sums, dpre + DY_BYTES + part * BOX, dpre);
          wgmma_wait<1>();  // dx, or without it dW of the tile before
          if (!NEED_DX && tile != p.chunk) release(before, lane_id());
        } else {
          wgmma_wait<0>();
          release(free + 8 * slot, lane_id());
        }
        if (NEED_DX) {
          settle(dx);
          const bool leader = threadIdx.x % 128 == 0;
          if (leader) tma_store_wait_read<OUTS - 1>();  // of what was there before
          bar_sync(1 + part, 128);
          stage_dx(at + out, dx);
          publish();
          bar_sync(1 + part, 128);
          if (leader) {
            const Where to(tile, p.group, groups, each);
            store_tokens(&dx_map, box + out, k0, to.plane, to.token);
          }
          if (OUTS > 1) out ^= 2 * BOX;
        }
        if (++slot == TILES) { slot = 0; phase ^= 1; }
      }
      let_next_start();
      if constexpr (NEED_DW) {
        wgmma_wait<0>();
        settle(sums[0]);
        const u64 share = (static_cast<u64>(p.chunk) * groups + p.group) * (N * K);
        if (chunks == 1)
          store_dw<true>(sums[0], dw + 2 * share, k0 + 16 * warp, lane_id());
        else
          store_dw<false>(sums[0], dw + 4 * share, k0 + 16 * warp, lane_id());
      }
      if (NEED_DX && threadIdx.x % 128 == 0) tma_store_wait_all();
    }
  }
  if (warpgroup > 0) finish();
}

// Adds up the chunks' shares, in order; the first dw_blocks blocks those of dW, the others of db.
extern "C" __global__ void __launch_bounds__(256)
grouped_linear_wide_sums(const float4* __restrict__ dw_shares, const float4* __restrict__ db_shares,
                         uint2* __restrict__ dw, uint2* __restrict__ db, int groups, int chunks,
                         int dw_blocks) {
  wait_for_previous();
  const bool of_dw = blockIdx.x < dw_blocks;
  const int size = groups * (of_dw ? N * K : N) / 4;
  const int at = (of_dw ? blockIdx.x : blockIdx.x - dw_blocks) * 256 + threadIdx.x;
  if (at >= size) return;
  const float4* from = (of_dw ? dw_shares : db_shares) + at;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
  for (int c = 0; c < chunks; ++c, from += size) {
    const float4 share = *from;
    sum.x += share.x;
    sum.y += share.y;
    sum.z += share.z;
    sum.w += share.w;
  }
  (of_dw ? dw : db)[at] = {pack(sum.x, sum.y), pack(sum.z, sum.w)};
}
