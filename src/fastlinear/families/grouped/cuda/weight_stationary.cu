// y = act(x W^T + b) of groups whose weight fits into shared memory, for Hopper. The texts of
// hopper_gemm.h, activations/cuda.h, wide_instructions.h and derivatives.h stand before this one.
//
// A part is up to BN outputs of a group; PARTS of them are a group. A block walks tiles of 64 tokens
// of one part, then of the next. The part's weight stays in shared memory; boxes of 64 tokens x 64
// features of x go through a ring. A producer warp fills both; two consumer warpgroups take whole
// tiles in turn, so that one's products run under the other's epilogue. Rows that do not begin at 16 bytes
// are brought in by the other warps of the producer's warpgroup, and y written by the consumers.
//
// Macros from the host, besides those of the headers: K N, of a group; PARTS; WEIGHTS parts' weights
// in shared memory; STAGES boxes of the ring; OUT_BUFS staging buffers of a warp; HAS_BIAS; SAVE 1:
// the pre-activation is written beside y, to `kept`; SIGNS 1: the signs of y are (sign_mask.py,
// `Boxes`). With CHANNELS boxes of x are read turned and those of y written turned, by a warpgroup
// together: a row of 64 tokens is 16 of each warp.

constexpr int K_BOXES = (K + 63) / 64;
constexpr int W_BYTES = K_BOXES * B_BYTES;
constexpr int OUT_BYTES = 16 * 64 * 2;
constexpr int RING_AT = WEIGHTS * W_BYTES;
constexpr int OUT_AT = RING_AT + STAGES * A_BYTES;
constexpr int FULL_AT = OUT_AT + 8 * OUT_BUFS * OUT_BYTES;
constexpr int EMPTY_AT = FULL_AT + 8 * STAGES;
constexpr int W_FULL_AT = EMPTY_AT + 8 * STAGES;
constexpr int W_EMPTY_AT = W_FULL_AT + 8 * WEIGHTS;

// Warps that bring in what does not begin at 16 bytes, of as many boxes of x at a time as this. A box is free
// once its tile's next one has been used as well.
constexpr int CARRIERS = 3, UNDER_WAY = STAGES < 7 ? STAGES - 2 : 5;
constexpr bool W_BY_WORDS = K % 8 != 0;

constexpr int LEFT = 40, TAKEN = 232;  // registers of a thread

static_assert(LEFT + 2 * TAKEN <= 3 * LAUNCHED, "more would be waited for for ever");
static_assert(STAGES >= 4 && N <= PARTS * BN && BN % 64 == 0 && BN <= 256, "sizes");
static_assert(!CHANNELS || OUT_BUFS > 1, "one buffer is written while the others are read");
static_assert(BM == 64 && BK == BM && PINGPONG && CLUSTER == 1 && A_MN == CHANNELS && !B_MN,
              "as products() is used here");

// One of a block's tiles: the how-manieth of its part, and how many times the weight has changed before.
struct Place {
  int part, tile, change;
};

// A block's tiles. Where `lanes` blocks share a part, each takes every lanes-th tile of it, so that
// all blocks together walk through memory; else (0) a block takes a stretch of all parts' tiles.
struct Walk {
  int tiles, lanes, first, end;

  __device__ __forceinline__ Walk(int parts, int tiles, int lanes) : tiles(tiles), lanes(lanes) {
    const int block = block_id();
    if (lanes) {
      first = 0;
      end = (tiles - block % lanes + lanes - 1) / lanes;
    } else {
      const long long total = static_cast<long long>(parts) * tiles;
      first = static_cast<int>(block * total / gridDim.x);
      end = static_cast<int>((block + 1) * total / gridDim.x);
    }
  }

  __device__ __forceinline__ Place at(int t) const {
    const int block = block_id();
    if (lanes) return {block / lanes, block % lanes + t * lanes, 0};
    const int part = t / tiles;
    return {part, t - part * tiles, part - first / tiles};
  }
};

// The barriers of the weight after `change` changes, and the parity of the phase that is its.
__device__ __forceinline__ u32 of_weight(u32 barriers, int change) {
  return barriers + change % WEIGHTS * 8;
}

__device__ __forceinline__ u32 parity_of(int change) { return change / WEIGHTS & 1; }

__device__ __forceinline__ void load_bias(u32 (&out)[BN / 64], const unsigned short* bias, int most,
                                          u32 lane) {
#pragma unroll
  for (int c = 0; c < BN / 64; ++c) {
    const int n = 64 * c + 2 * lane;
    out[c] = n < most ? *reinterpret_cast<const u32*>(bias + n) : 0;
  }
}

__device__ __forceinline__ void add_bias(float* acc, u32 packed) {
  const u32 lane = lane_id();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    u32 from;  // volatile: not kept in a register throughout
    asm volatile("add.u32 %0, %1, %2;" : "=r"(from) : "r"(lane & 3), "r"(4 * j));
    float lo, hi;
    unpack(__shfl_sync(0xffffffffu, packed, from), lo, hi);
    acc[4 * j] += lo;
    acc[4 * j + 1] += hi;
    acc[4 * j + 2] += lo;
    acc[4 * j + 3] += hi;
  }
}

template <bool kAct>
__device__ __forceinline__ void convert(const float* acc, u32 (&r)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float lo = acc[2 * i], hi = acc[2 * i + 1];
    r[i] = kAct ? pack(act(lo), act(hi)) : pack(lo, hi);
  }
}

// A lane's signs of 64 columns: word i of y at bit i % 8 of two bytes, the upper two from the eighth on.
__device__ __forceinline__ u32 signs_of(const u32 (&r)[16]) {
  u32 found = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) found |= positive(r[i]) & (0x00010001u << i);
  return __byte_perm(found, 0, 0x3120);
}

// Staging buffers, taken in turn: a warp's of 16 tokens of 64 outputs each, or with CHANNELS a
// warpgroup's of 64 outputs of 64 tokens.
constexpr int TURN = CHANNELS ? 4 * OUT_BYTES : OUT_BYTES;

struct Output {
  u32 first;  // this lane's row and 16-byte piece in the first of them
  u32 next;
  bool leader;
  int barrier;  // of the warpgroup

  // Rows of `to` are for y that comes BY_WORDS.
  __device__ __forceinline__ void send(const u32 (&r)[16], const TensorMap* map, const Strided& to,
                                       int column, const Where& at, int warp, int tokens) {
    if (!CHANNELS) {
      if (leader) tma_store_wait_read<OUT_BUFS - 1>();
      __syncwarp();
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (CHANNELS) {
        store_turned(next + q * (16 * 128), r[4 * q], r[4 * q + 1], r[4 * q + 2], r[4 * q + 3]);
      } else {
        u32 to;  // volatile: worked out here, not kept in a register throughout
        asm volatile("xor.b32 %0, %1, %2;" : "=r"(to) : "r"(next), "r"(q * 32));
        stmatrix(to, r[4 * q], r[4 * q + 1], r[4 * q + 2], r[4 * q + 3]);
      }
    }
    publish();
    if (CHANNELS) {
      if (leader) tma_store_wait_read<OUT_BUFS - 2>();  // what all write next is free
      bar_sync(barrier, 128);
    } else {
      __syncwarp();
    }
    if constexpr (BY_WORDS<N>) {
      const u32 box = __shfl_sync(0xffffffffu, next, 0);
#pragma unroll 1
      for (int r = 0; r < 16; r += 8) {
        const int token = at.token + warp * 16 + r;
        put_rows<N>(to.at(at.plane, token) + 2 * column, 2 * to.row, box + 128 * r, tokens - token,
                    N - column, lane_id());
      }
      if (leader) commit_no_store();  // so that buffers are counted
    } else if (leader) {
      store_tokens(map, next, column, at.plane, at.token + (CHANNELS ? 0 : warp * 16));
    }
    next = next == first + (OUT_BUFS - 1) * TURN ? first : next + TURN;
  }
};

// One of CARRIERS warps brings in its rows of weights, whose number of features is no multiple of 8, and
// of boxes of x where these come BY_WORDS; some boxes are under way while it asks for the next.
__device__ __forceinline__ void carry(const Walk& walk, u32 base, const unsigned short* weight,
                                      const Strided& x, int groups, int each, int tokens, int warp,
                                      int lane) {
  int asked = 0, there = 0, change = -1;  // boxes
  const auto tell = [&](u32 bar) {
    publish();
    __syncwarp();
    if (lane == 0) mbar_arrive(bar);
  };
  const auto told = [&] { tell(base + FULL_AT + there++ % STAGES * 8); };
  for (int t = walk.first; t < walk.end; ++t) {
    const Place place = walk.at(t);
    const Where at(place.tile, place.part / PARTS, groups, each);
    if (place.change != change) {
      change = place.change;
      if (change >= WEIGHTS) {
        // what the consumers need before they are done with the weight there
        wait_rows<0>();
        while (there < asked) told();
        mbar_wait(of_weight(base + W_EMPTY_AT, change), parity_of(change) ^ 1);
      }
      const int column = place.part % PARTS * BN;
      const u32 to = base + change % WEIGHTS * W_BYTES;
      const char* from = reinterpret_cast<const char*>(
          weight + (static_cast<long long>(place.part / PARTS) * N + column) * K);
#pragma unroll 1
      for (int i = warp; i < K_BOXES * (BN / 8); i += CARRIERS) {
        const int b = i % K_BOXES, r = i / K_BOXES * 8;
        copy_rows<K>(to + b * B_BYTES + 128 * r, from + 2 * K * r + 128 * b, 2 * K, N - column - r,
                     K - 64 * b, lane);
      }
      commit_rows();
      wait_rows<0>();
      while (there < asked) told();
      tell(of_weight(base + W_FULL_AT, change));
    }
    if constexpr (BY_WORDS<K>) {
#pragma unroll 1
      for (int b = 0; b < K_BOXES; ++b) {
        const int slot = asked % STAGES;
        mbar_wait(base + EMPTY_AT + slot * 8, asked / STAGES & 1 ^ 1);
#pragma unroll 1
        for (int r = (warp + asked) % CARRIERS * 8; r < BM; r += 8 * CARRIERS)
          copy_rows<K>(base + RING_AT + slot * A_BYTES + 128 * r, x.at(at.plane, at.token + r) + 128 * b,
                       2 * x.row, tokens - at.token - r, K - 64 * b, lane);
        commit_rows();
        if (++asked - there > UNDER_WAY) {
          wait_rows<UNDER_WAY>();
          told();
        }
      }
    }
  }
  wait_rows<0>();
  while (there < asked) told();
}

extern "C" __global__ void __launch_bounds__(384, 1)
grouped_linear_resident(const __grid_constant__ TensorMap x_map,
                        const __grid_constant__ TensorMap w_map,
                        const __grid_constant__ TensorMap y_map,
                        const __grid_constant__ TensorMap pre_map,
                        const unsigned short* __restrict__ bias_ptr, u32* __restrict__ kept,
                        const unsigned short* __restrict__ weight, char* __restrict__ x_begin,
                        char* __restrict__ y_begin, int parts, int tiles, int lanes, int each, int tokens,
                        int x_row, int x_plane, int y_row, int y_plane) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = smem_addr(smem);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int thread = threadIdx.x % 128;
  const u32 ring = base + RING_AT, full = base + FULL_AT, empty = base + EMPTY_AT;
  const u32 w_full = base + W_FULL_AT, w_empty = base + W_EMPTY_AT;

  if (threadIdx.x == 0) {
    if (!BY_WORDS<K>) prefetch_map(&x_map);
    if (!W_BY_WORDS) prefetch_map(&w_map);
    if (!BY_WORDS<N>) prefetch_map(&y_map);
    for (int s = 0; s < STAGES; ++s) {
      mbar_init(full + s * 8, BY_WORDS<K> ? CARRIERS : 1);
      mbar_init(empty + s * 8, 4);
    }
    for (int s = 0; s < WEIGHTS; ++s) {
      mbar_init(w_full + s * 8, W_BY_WORDS ? CARRIERS : 1);
      mbar_init(w_empty + s * 8, 8);
    }
    publish_barriers();
  }
  __syncthreads();
  let_next_start();
  wait_for_previous();

  const Walk walk(parts, tiles, lanes);
  if (warpgroup == 0) {
    leave_registers<LEFT>();
    if (W_BY_WORDS && thread >= 32) {
      const Strided x = {x_begin, x_row, x_plane};
      carry(walk, base, weight, x, parts / PARTS, each, tokens, thread / 32 - 1, thread % 32);
    } else if (!BY_WORDS<K> && thread == 0) {
      int slot = 0, change = -1;
      u32 phase = 1;  // a fresh barrier counts as "previous phase done"
      for (int t = walk.first; t < walk.end; ++t) {
        const Place at = walk.at(t);
        const Where from(at.tile, at.part / PARTS, parts / PARTS, each);
        if (!W_BY_WORDS && at.change != change) {
          change = at.change;
          if (change >= WEIGHTS) mbar_wait(of_weight(w_empty, change), parity_of(change) ^ 1);
          const u32 there = of_weight(w_full, change);
          mbar_expect(there, W_BYTES);
#pragma unroll
          for (int b = 0; b < K_BOXES; ++b)
            load_box<1>(base + change % WEIGHTS * W_BYTES + b * B_BYTES, &w_map, there, 64 * b,
                        at.part % PARTS * BN, at.part / PARTS);
        }
#pragma unroll 1
        for (int b = 0; b < K_BOXES; ++b) {
          mbar_wait(empty + slot * 8, phase);
          mbar_expect(full + slot * 8, A_BYTES);
          load_tokens<1>(ring + slot * A_BYTES, &x_map, full + slot * 8, 64 * b, from.plane,
                         from.token);
          if (++slot == STAGES) { slot = 0; phase ^= 1; }
        }
      }
    }
  } else {
    take_registers<TAKEN>();
    const int consumer = warpgroup - 1;
    const int warp = thread / 32;
    const u32 lane = thread & 31;
    // Rows of 128 bytes, their 16-byte pieces permuted as the 128-byte swizzle of TMA has it
    const u32 row = CHANNELS ? (lane >> 4) * 8 + (lane & 7) : lane & 15;
    const u32 piece = (CHANNELS ? 2 * warp + (lane >> 3 & 1) : lane >> 4) ^ (lane & 7);
    const int mine = CHANNELS ? consumer * 4 : consumer * 4 + warp;
    const u32 buffers = base + OUT_AT + mine * OUT_BUFS * OUT_BYTES;
    Output out{buffers + row * 128 + piece * 16, 0, CHANNELS ? thread == 0 : lane == 0, 3 + consumer};
    out.next = out.first;
    if (consumer == 1) bar_arrive(1, 256);  // consumer 0 starts

    int passed = 0;  // weights that this warp is done with
    // A weight is passed once it is there, used or not: two arrivals must not fall into one phase.
    const auto pass = [&](int change) {
      for (; passed < change; ++passed) {
        mbar_wait(of_weight(w_full, passed), parity_of(passed));
        if (lane_id() == 0) mbar_arrive(of_weight(w_empty, passed));
      }
    };
    for (int t = walk.first + consumer; t < walk.end; t += 2) {
      const Place at = walk.at(t);
      const int group = at.part / PARTS, column = at.part % PARTS * BN;
      u32 bias[BN / 64];  // arrives under the products
      if (HAS_BIAS) load_bias(bias, bias_ptr + group * N + column, N - column, lane_id());
      pass(at.change);
      mbar_wait(of_weight(w_full, at.change), parity_of(at.change));
      const u32 weight = base + at.change % WEIGHTS * W_BYTES;
      float acc[1][BN / 2];
      const u32 before = (t - walk.first) * K_BOXES;  // boxes that went through the ring before this
      int slot = before % STAGES, previous = 0;
      u32 phase = (before / STAGES) & 1;
      // Wait for the other consumer to have issued its tile. This also keeps both within one phase
      // of the ring's barriers, which a parity bit cannot tell apart beyond that.
      bar_sync(1 + consumer, 256);
#pragma unroll
      for (int b = 0; b < K_BOXES; ++b) {
        mbar_wait(full + slot * 8, phase);
        if (b == 0)
          products<true>(acc, ring + slot * A_BYTES, weight);
        else
          products<false>(acc, ring + slot * A_BYTES, weight + b * B_BYTES);
        if (b > 0) {
          wgmma_wait<1>();  // all but the step just issued
          if (lane_id() == 0) mbar_arrive(empty + previous * 8);
        }
        previous = slot;
        if (++slot == STAGES) { slot = 0; phase ^= 1; }
      }
      bar_arrive(1 + (consumer ^ 1), 256);
      wgmma_wait<0>();
      if (lane_id() == 0) mbar_arrive(empty + previous * 8);

      const Where to(at.tile, group, parts / PARTS, each);
#pragma unroll
      for (int c = 0; c < BN / 64; ++c) {
        float* of = acc[0] + 32 * c;
        if (HAS_BIAS) add_bias(of, bias[c]);
        u32 r[16];
#if SAVE
        convert<false>(of, r);
        const Strided pre = {reinterpret_cast<char*>(kept), y_row, y_plane};
        out.send(r, &pre_map, pre, column + 64 * c, to, warp, tokens);
#endif
        convert<true>(of, r);
#if SIGNS
        constexpr int BOXES = (N + 63) / 64;
        const int box = column / 64 + c;
        if (box < BOXES) {
          const long long tile = static_cast<long long>(to.plane) * each + to.token / BM;
          kept[((tile * BOXES + box) * 4 + warp) * 32 + lane_id()] = signs_of(r);
        }
#endif
        out.send(r, &y_map, {y_begin, y_row, y_plane}, column + 64 * c, to, warp, tokens);
      }
    }
    if (walk.end > walk.first) pass(walk.at(walk.end - 1).change);
    if (out.leader) tma_store_wait_all();
  }
}
