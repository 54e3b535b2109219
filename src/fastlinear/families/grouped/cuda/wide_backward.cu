// dx, dW and db of y = act(x W^T + b) of groups of up to 256 features in one pass, for Hopper. The texts
// of hopper_gemm.h, activations/cuda.h, wide_instructions.h, derivatives.h, wide_backward.h and
// wide_backward_tiles.h stand before this one.
//
// A block takes one group, every chunks-th tile of TOKENS tokens, and 128 of the K features: of these dx
// and dW; with more than 128 features there are two such blocks, which may be a cluster that shares
// what both read. dW and W, both turned, stay with two warpgroups, 64 features each:
//   dx^T (64, TOKENS) = W^T (64, N) dpre^T
//   dW^T (64, N) += x^T (64, TOKENS) dpre
// dW is in registers, and so is W for as many of the N as there are registers; the rest of it is in
// shared memory. The first warpgroup, the dact warps, writes dpre over dy and sums db; between
// tiles each of its warps has the copy engine bring in a box of 64 features of dy, of what the
// forward saved, and of x, or asks for their rows itself where these do not begin at 16 bytes.
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
// W those in registers; SPLIT; SIGNS 1: what was saved are the signs of y (sign_mask.py, `Boxes`),
// which dact warps read into registers.

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
      if (n + (N % 8 ? n0 : 0) < N && k + k0 < K)
        word = from[n * K + k] | static_cast<u32>(from[(n + 1) * K + k]) << 16;
      w.word[s][i] = word;
    }
  }
}

// Where rows of W begin at less than 16 bytes: the other boxes, by this warpgroup, of `own` features from
// the first of a group's weights on.
__device__ __forceinline__ void bring_weights(const unsigned short* from, u32 base, int part, int own) {
  constexpr int ALL = 64 * W_BOXES * 32, AT_ONCE = 8;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < ALL; i += 128 * AT_ONCE) {
    u32 v[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const int word = i % 32, n = 64 * HELD + (i + 128 * j) / 32;
      v[j] = n < N && 2 * word < own ? *reinterpret_cast<const u32*>(from + n * K + 2 * word) : 0u;
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const int row = (i + 128 * j) / 32;
      const u32 to = word_at(base + W_AT + (row / 64 * 2 + part) * BOX, row % 64, i % 32);
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v[j]) : "memory");
    }
  }
  publish();
  bar_sync(1 + part, 128);
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
  for (int j = 0; j < (N + 7) / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 8 * j + i % 2, k = i / 2 * 8;
      if (k0 + k + (K % 8 ? lane / 4 : 0) < K && (8 * j + 8 <= N || n + lane % 4 * 2 < N)) {
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
                             char* __restrict__ db, char* __restrict__ kept, char* __restrict__ dx_begin,
                             char* __restrict__ dy_begin, char* __restrict__ x_begin, int groups,
                             int chunks, int tiles, int each, int tokens, int dy_row, int dy_plane,
                             int saved_row, int saved_plane, int x_row, int x_plane, int dx_row,
                             int dx_plane) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = smem_addr(smem);
  const u32 full = base + FULL_AT, ready = base + GRADED_AT, free = base + FREE_AT;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) % 4;
  if (threadIdx.x == 0) {
    // dact warps that read dy beside the products
    constexpr int SUMMING = DERIVES || !NEED_DB ? 0 : DACT_WARPS;
    const int users = 4 * (CLUSTER > 1 ? K_BOXES : Part(groups).boxes) + SUMMING * CLUSTER;
    for (int s = 0; s < TILES; ++s) {
      mbar_init(full + 8 * s, DACT_WARPS * (CARRIES ? 33 : 1));
      mbar_init(ready + 8 * s, DACT_WARPS);
      mbar_init(free + 8 * s, users);
    }
    for (int s = 0; s < PARTS; ++s)
      mbar_init(base + PART_FREE_AT + 8 * s, DACT_WARPS * (SPLIT ? 1 : CLUSTER));
    mbar_init(base + W_FULL_AT, 1);
    publish_barriers();
  }
  if constexpr (CLUSTER > 1) cluster_sync(); else __syncthreads();

  if (warpgroup == 0) {
    leave_registers<LEFT>();
    if (warp < DACT_WARPS) {
      const Part p(groups);
      Tiles from = {&dy_map,
                    &saved_map,
                    &x_map,
                    &weight_map,
                    {dy_begin, dy_row, dy_plane},
                    {kept, saved_row, saved_plane},
                    {x_begin, x_row, x_plane},
                    base,
                    warp,
                    groups,
                    each,
                    tokens,
                    p.chunk,
                    0};
      const int lane = threadIdx.x % 32, rank = CLUSTER > 1 ? p.half : 0;
      // What is left to do for one half of a tile only: sums of db, and with SPLIT all
      const int first = CLUSTER > 1 && (SPLIT || !DERIVES) ? rank : 0;
      const int last = CLUSTER > 1 && (SPLIT || !DERIVES) ? rank : 1;
      const int box = warp / SHARERS;
      const u32 at = warp % SHARERS * (ROWS * 128) + block_row(lane);
      const Signs signs = {reinterpret_cast<const u32*>(kept) + box * 128 + lane, warp % SHARERS, rank,
                           groups, each};
      u32 coming[4] = {}, words[4] = {};
      constexpr bool AHEAD = SIGNS && SPLIT;  // else registers are few, and what is kept is twice as much
      if (AHEAD && p.chunk < tiles) signs.load(coming, p.chunk, p.group);
      float sums[SUMS] = {};
      int i = 0;
      for (int tile = p.chunk; tile < tiles; tile += chunks, ++i) {
        const int slot = i % TILES;
        u32 here[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) here[w] = coming[w];
        if (AHEAD && tile + chunks < tiles) signs.load(coming, tile + chunks, p.group);
        if (SIGNS && !AHEAD) signs.load(here, tile, p.group);
        const auto first_lane = [&](bool found) {
          return CARRIES ? __shfl_sync(0xffffffffu, found, 0) != 0 : found;
        };
        if (CARRIES || lane == 0) {
          for (;;) {
            if (first_lane(from.has_room(tiles))) {
              from.bring(p, chunks, lane);
              continue;
            }
            const bool here = !HAS_DACT_WARPS || mbar_test(full + 8 * slot, i / TILES & 1);
            if (from.turn > i && first_lane(here)) break;
          }
        }
        if (!HAS_DACT_WARPS) continue;
        __syncwarp();
        mbar_wait(full + 8 * slot, i / TILES & 1);
#pragma unroll 1
        for (int h = first; h <= last; ++h) {
          const int part = (OWN_HALVES * i + (SPLIT ? 0 : h)) % PARTS;
          const u32 half = base + slot * TILE + box * BOX + h * (BOX / 2);
          const u32 saved = base + SAVED_AT + part * (DY_BYTES / 2) + box * (BOX / 2);
          const bool sum = CLUSTER > 1 ? h == rank : p.half == 0;
          if (SIGNS) signs.of_half(words, here, h);
          if (DERIVES) {
            if (ACT != ACT_NONE) grade(half + at, saved + at, words);
            publish();
          }
          __syncwarp();
          if (NEED_DB && sum) {
            if (SUM_HALVES > 1 && h == 1) add_tokens<BANDS*(SUM_HALVES - 1)>(sums, half + at, lane);
            else add_tokens<0>(sums, half + at, lane);
          }
          if (!DERIVES) continue;
          if (SPLIT) {
            constexpr int SENT = ROWS * 128;
            const u32 bar = ready + 8 * slot;
            if (lane == 0) {
              const u32 from = half + warp % SHARERS * SENT;
              mbar_expect(bar, SENT);  // as much comes from the other block
              send_to_cta(from, SENT, bar, rank ^ 1);
              if (SAVED_BOXES) mbar_arrive(base + PART_FREE_AT + 8 * part);
            }
          } else if (SAVED_BOXES) {
            release(base + PART_FREE_AT + 8 * part, lane);
          }
        }
        __syncwarp();
        if (!DERIVES)
          release(free + 8 * slot, lane);
        else if (!SPLIT && lane == 0)
          mbar_arrive(ready + 8 * slot);
      }
      if (NEED_DB) gather(sums);
      if (NEED_DB && CHANNELS && (CLUSTER > 1 || p.half == 0)) {
        const u64 share = static_cast<u64>(p.chunk) * groups + p.group;
        const bool rounded = chunks == 1;
        const int row = 64 * box + warp % SHARERS * ROWS + (CLUSTER > 1 ? rank * (TOKENS / 2) : 0);
        put_sums(sums, db + share * (N * (rounded ? 2 : 4)), rounded, row, lane);
      } else if (NEED_DB && !CHANNELS) {
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
      if (W_BY_WORDS && W_BOXES > 0)
        bring_weights(weight + static_cast<u64>(p.group) * (N * K) + k0, base, part, p.own(part));
      else if (W_BOXES > 0)
        mbar_wait(base + W_FULL_AT, 0);
      int slot = 0;
      u32 phase = 0, out = 0;
#pragma unroll 1
      for (int tile = p.chunk; tile < tiles; tile += chunks) {
        const u32 dpre = base + slot * TILE;
        const u32 before = free + 8 * (slot == 0 ? TILES - 1 : slot - 1);
        mbar_wait(full + 8 * slot, phase);
        if (DERIVES) mbar_wait(ready + 8 * slot, phase);
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
          const Where to(tile, p.group, groups, each);
          if constexpr (BY_WORDS<K>) {
            const Strided rows = {dx_begin, dx_row, dx_plane};
#pragma unroll
            for (int r = 16 * warp; r < 16 * warp + 16; r += 8)
              put_rows<K>(rows.at(to.plane, to.token + r) + 2 * k0, 2 * dx_row, box + out + 128 * r,
                          tokens - to.token - r, K - k0, lane_id());
          } else if (leader) {
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

// Adds up the chunks' shares, in order; the first dw_blocks blocks those of dW, the others of db. A thread
// has four numbers, or two where N is no multiple of 4.
extern "C" __global__ void __launch_bounds__(256)
grouped_linear_wide_sums(const float* __restrict__ dw_shares, const float* __restrict__ db_shares,
                         u32* __restrict__ dw, u32* __restrict__ db, int groups, int chunks,
                         int dw_blocks) {
  constexpr int PAIRS = N % 4 == 0 ? 2 : 1;
  struct alignas(8 * PAIRS) Pairs { float2 of[PAIRS]; };
  struct alignas(4 * PAIRS) Words { u32 of[PAIRS]; };
  wait_for_previous();
  const bool of_dw = blockIdx.x < dw_blocks;
  const int size = groups * (of_dw ? N * K : N) / (2 * PAIRS);
  const int at = (of_dw ? blockIdx.x : blockIdx.x - dw_blocks) * 256 + threadIdx.x;
  if (at >= size) return;
  const Pairs* from = reinterpret_cast<const Pairs*>(of_dw ? dw_shares : db_shares) + at;
  Pairs sum = {};
#pragma unroll 4
  for (int c = 0; c < chunks; ++c, from += size) {
    const Pairs share = *from;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      sum.of[i].x += share.of[i].x;
      sum.of[i].y += share.of[i].y;
    }
  }
  Words words;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) words.of[i] = pack(sum.of[i].x, sum.of[i].y);
  reinterpret_cast<Words*>(of_dw ? dw : db)[at] = words;
}
