// grid.cu for float32: plain multiply-adds, activations through shared memory.

// Sums kFrom .. kTo - 1 of a thread, for the other group's thread of the same place.
template <int kFrom, int kTo>
__device__ __forceinline__ void give_single(const float (&acc)[MT][NT], u32 red) {
#pragma unroll
  for (int i = kFrom; i < kTo; ++i) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(red + i * 512), "f"(acc[i / NT][i % NT])
                 : "memory");
  }
}

// Those plus the other group's, to the blocks that complete them.
template <int kFrom, int kTo>
__device__ __forceinline__ void send_single(const float (&acc)[MT][NT], u32 red, u32 to,
                                            int row_half, int tiles) {
#pragma unroll
  for (int i = kFrom; i < kTo; ++i) {
    if (i % NT >= tiles) continue;
    float other;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(other) : "r"(red + i * 512) : "memory");
    const int q = i / NT * 2 + row_half;
    store_peer(peer_addr(to + q / CLUSTER * HALF_BYTES, q % CLUSTER) + i % NT * 256,
               acc[i / NT][i % NT] + other);
  }
}

// Four biases, or zeros.
__device__ __forceinline__ float4 load_shift(const void* bias, int column) {
  if (bias == nullptr) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const float* const at = static_cast<const float*>(bias) + column;
  return make_float4(at[0], at[1], at[2], at[3]);
}

// Warps 0-3 and 4-7 take half of the slice each; a thread of either computes rows r + 16 i of
// columns c + 8 j, i < MT, j < NT.
__device__ __forceinline__ void layers_single(const Params& p, u32 base, int first, int tiles,
                                              int rank, int warp, int lane, char* set) {
  constexpr int PIECES = SLICE / 4 * ROWS;  // of a slice's input
  constexpr int EACH = (PIECES + 255) / 256;
  static_assert(!SINGLE || PIECES % 256 == 0, "a slice is not whole rounds of 256 threads");
  const int thread = warp * 32 + lane;
  const int group = warp >> 2, c = lane & 7, r = (warp & 3) * 4 + (lane >> 3);
  const bool aligned = ((reinterpret_cast<u64>(p.x) | (p.x_stride * ES)) & 15) == 0;
  uint4 in[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int piece = i * 256 + thread;
    in[i] = load_x(p, piece % ROWS, rank * SLICE + piece / ROWS * 4, aligned);
  }
  cluster_wait();
#pragma unroll 1
  for (int layer = 0; layer < p.layers; ++layer) {
    const bool last = layer + 1 == p.layers;
    const int slot = layer % SLOTS;
    float4 shift = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // of this thread's first sums to complete
    if (thread < tiles * 16) {
      shift = load_shift(p.bias[layer], first + (thread >> 4) * 8 + (thread & 1) * 4);
    }
    if (layer > 0) {
      const char* const from = set + static_cast<long long>(layer - 1) * LAYER_BYTES +
                               rank * (SLICE / 4) * (ROWS * 16);
      const auto at = [&](int i) { return (i * 256 + thread) * 16; };
      ask(in, from, at);
      insist(in, from, at);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      store16(base + ACT_OFFSET + (i * 256 + thread) * 16, in[i]);
    }
    mbar_wait_own(base + BAR_FULL + slot * 8, layer / SLOTS & 1);
    compute_sync();

    float acc[MT][NT];
#pragma unroll
    for (int i = 0; i < MT; ++i) {
#pragma unroll
      for (int j = 0; j < NT; ++j) acc[i][j] = 0.0f;
    }
    const u32 acts = base + ACT_OFFSET + group * (SLICE / 8) * (ROWS * 16) + r * 16;
    const u32 weights =
        base + SLOT_OFFSET + slot * SLOT_BYTES + weight_at(c) + group * (SLICE / 2 * 4);
#pragma unroll 4
    for (int k = 0; k < SLICE / 8; ++k) {
      uint4 x[MT];
#pragma unroll
      for (int i = 0; i < MT; ++i) x[i] = load16(acts + k * (ROWS * 16) + i * 256);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const uint4 w = load16(weights + k * 16 + j * TILE_BYTES);
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          float v = acc[i][j];
          v = fmaf(__uint_as_float(w.x), __uint_as_float(x[i].x), v);
          v = fmaf(__uint_as_float(w.y), __uint_as_float(x[i].y), v);
          v = fmaf(__uint_as_float(w.z), __uint_as_float(x[i].z), v);
          acc[i][j] = fmaf(__uint_as_float(w.w), __uint_as_float(x[i].w), v);
        }
      }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(base + BAR_EMPTY + slot * 8);

    // The groups add up: group 0 completes the first OWN of the thread's sums, group 1 the others.
    constexpr int ALL = MT * NT, OWN = (ALL + 1) / 2;
    const u32 red = base + RED_OFFSET + (thread & 127) * 4;
    const u32 sums = base + SUMS_OFFSET + (layer & 1) * (HALVES * HALF_BYTES);
    if (group == 0) give_single<OWN, ALL>(acc, red);
    else give_single<0, OWN>(acc, red);
    compute_sync();
    const u32 to = sums + rank * SOURCE_BYTES + (r & 7) * 32 + c * 4;
    if (group == 0) send_single<0, OWN>(acc, red, to, r >> 3, tiles);
    else send_single<OWN, ALL>(acc, red, to, r >> 3, tiles);

#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const int q = rank + half * CLUSTER;
      if (q >= 2 * MT) break;
#pragma unroll 1
      for (int unit = thread; unit - lane < tiles * 16; unit += 256) {
        const bool real = unit < tiles * 16;
        const int row = q * 8 + (unit >> 1 & 7);
        const int column = first + (unit >> 4) * 8 + (unit & 1) * 4;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (unit == thread) v = shift;
        else if (real) v = load_shift(p.bias[layer], column);
        v = take_sums(v, sums + half * HALF_BYTES + (real ? unit : 0) * 16, real);
        if (!real) continue;
        if constexpr (SAVE != 0) {
          if (saves_pre(last)) write_row4(p.saved[layer], p, row, column, v);
        }
        if (last) {
          write_row4(p.y, p, row, column,
                     make_float4(act<FINAL>(v.x), act<FINAL>(v.y), act<FINAL>(v.z), act<FINAL>(v.w)));
        } else {
          v = make_float4(act<ACT>(v.x), act<ACT>(v.y), act<ACT>(v.z), act<ACT>(v.w));
          publish4(set + static_cast<long long>(layer) * LAYER_BYTES + piece_at(column >> 2, row),
                   make_uint4(never_empty(__float_as_uint(v.x)), never_empty(__float_as_uint(v.y)),
                              never_empty(__float_as_uint(v.z)), never_empty(__float_as_uint(v.w))));
          if constexpr (SAVE == 2 || SAVE == 3) write_row4(p.saved[layer], p, row, column, v);
        }
      }
    }
  }
}
