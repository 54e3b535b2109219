// grid.cu for bfloat16 and float16: products by mma.sync, activations straight from registers.

__device__ __forceinline__ void layers_half(const Params& p, u32 base, int first, int tiles,
                                            int rank, int warp, int lane, char* set) {
  constexpr int BLOCKS = KB / KG;  // of a warp
  constexpr bool AHEAD = NT * BLOCKS <= 20;  // registers take a layer's weights while it waits
  constexpr int ITEMS = HALVES * PAIRS;
  constexpr int ROUNDS = (ITEMS + COMPUTE_WARPS - 1) / COMPUTE_WARPS;
  static_assert(KB % KG == 0, "the blocks of K are not shared out evenly");
  const int g = lane >> 2, t = lane & 3;
  const int m = warp % MT, kg = warp / MT;
  const bool aligned = ((reinterpret_cast<u64>(p.x) | (p.x_stride * ES)) & 15) == 0;
  uint4 a[2 * BLOCKS];  // operand A: as pieces_at tells
#pragma unroll
  for (int kb = 0; kb < BLOCKS; ++kb) {
    const int k = rank * SLICE + (kg * BLOCKS + kb) * 32 + t * 8;
    const uint4 own = load_x(p, m * 16 + kg * 8 + g, k, aligned);
    const uint4 other = load_x(p, m * 16 + (kg ^ 1) * 8 + g, k, aligned);
    a[2 * kb] = make_uint4(own.x, other.x, own.y, other.y);
    a[2 * kb + 1] = make_uint4(own.z, other.z, own.w, other.w);
  }
  cluster_wait();  // every block's buffers are ready
#pragma unroll 1
  for (int layer = 0; layer < p.layers; ++layer) {
    const bool last = layer + 1 == p.layers;
    const int slot = layer % SLOTS;
    const u32 weights = base + SLOT_OFFSET + slot * SLOT_BYTES + weight_at(g) + t * 16 +
                        kg * (BLOCKS * 64);
    mbar_wait_own(base + BAR_FULL + slot * 8, layer / SLOTS & 1);
    float shift[ROUNDS][4];  // biases of what this thread will complete
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int tile = 2 * ((i * COMPUTE_WARPS + warp) % PAIRS) + (e >> 1);
        shift[i][e] = p.bias[layer] && tile < tiles
                          ? load_element(p.bias[layer], first + tile * 8 + 2 * t + (e & 1))
                          : 0.0f;
      }
    }
    const char* const from = set + static_cast<long long>(layer - 1) * LAYER_BYTES;
    const auto at = [&](int i) {
      return pieces_at(rank * KB + kg * BLOCKS + (i >> 1), m, i & 1, g, t);
    };
    if (layer > 0) ask(a, from, at);
    [[maybe_unused]] uint4 held[AHEAD ? BLOCKS : 1][NT];
    if constexpr (AHEAD) {
#pragma unroll
      for (int kb = 0; kb < BLOCKS; ++kb) {
#pragma unroll
        for (int j = 0; j < NT; ++j) held[kb][j] = load16(weights + j * TILE_BYTES + kb * 64);
      }
    }
    if (layer > 0) insist(a, from, at);
    float acc[2 * PAIRS][4];
#pragma unroll
    for (int j = 0; j < 2 * PAIRS; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[j][e] = 0.0f;
    }
#pragma unroll
    for (int kb = 0; kb < BLOCKS; ++kb) {
      const uint4 x = a[2 * kb], y = a[2 * kb + 1];
      uint4 w[NT];
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        if constexpr (AHEAD) w[j] = held[kb][j];
        else w[j] = load16(weights + j * TILE_BYTES + kb * 64);
      }
#pragma unroll
      for (int j = 0; j < NT; ++j) mma(acc[j], x.x, x.y, x.z, x.w, w[j].x, w[j].y);
#pragma unroll
      for (int j = 0; j < NT; ++j) mma(acc[j], y.x, y.y, y.z, y.w, w[j].z, w[j].w);
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(base + BAR_EMPTY + slot * 8);

    const u32 sums = base + SUMS_OFFSET + (layer & 1) * (HALVES * HALF_BYTES);
    const u32 to = sums + rank * SOURCE_BYTES + lane * 16;
    if constexpr (KG == 1) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int q = 2 * m + h;
        const u32 dst = peer_addr(to + q / CLUSTER * HALF_BYTES, q % CLUSTER);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
          if (2 * i < tiles) {
            store_peer4(dst + i * 512, as_words(acc[2 * i][2 * h], acc[2 * i][2 * h + 1],
                                                acc[2 * i + 1][2 * h], acc[2 * i + 1][2 * h + 1]));
          }
        }
      }
    } else {  // warp kg of the two completes and sends rows 8 kg .. 8 kg + 7 of the tile
      const u32 pairs = base + PAIR_OFFSET + lane * 16;
      const u32 give = pairs + ((kg ^ 1) * MT + m) * (PAIRS * 512);
      const u32 take = pairs + (kg * MT + m) * (PAIRS * 512);
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        store16(give + i * 512, as_words(acc[2 * i][2], acc[2 * i][3], acc[2 * i + 1][2],
                                         acc[2 * i + 1][3]));
      }
      pair_sync(1 + m);
      const int q = 2 * m + kg;
      const u32 dst = peer_addr(to + q / CLUSTER * HALF_BYTES, q % CLUSTER);
      float4 sum[PAIRS];
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const float4 own =
            make_float4(acc[2 * i][0], acc[2 * i][1], acc[2 * i + 1][0], acc[2 * i + 1][1]);
        sum[i] = add4(own, load16(take + i * 512));
      }
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        if (2 * i >= tiles) continue;
        store_peer4(dst + i * 512, as_words(sum[i].x, sum[i].y, sum[i].z, sum[i].w));
      }
      pair_sync(1 + m);  // both have read
    }

#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int item = i * COMPUTE_WARPS + warp;
      const int half = item / PAIRS, pair = item % PAIRS;
      const int q = rank + half * CLUSTER;
      if (item >= ITEMS || q >= 2 * MT || 2 * pair >= tiles) continue;
      const int row = q * 8 + g;
      const u32 at = sums + half * HALF_BYTES + pair * 512 + lane * 16;
      float4 pre = make_float4(shift[i][0], shift[i][1], shift[i][2], shift[i][3]);
      pre = take_sums(pre, at, true);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int tile = 2 * pair + e;
        if (tile >= tiles) break;
        const float v0 = e ? pre.z : pre.x, v1 = e ? pre.w : pre.y;
        const int column = first + tile * 8 + 2 * t;
        if (last) {
          write_row(p.y, p, row, column, pack(act<FINAL>(v0), act<FINAL>(v1)));
        } else {
          const u32 out = pack(act<ACT>(v0), act<ACT>(v1));
          publish(set + static_cast<long long>(layer) * LAYER_BYTES +
                      word_at(column, row),
                  never_empty(out));
          if constexpr (SAVE == 2 || SAVE == 3) write_row(p.saved[layer], p, row, column, out);
        }
        if constexpr (SAVE != 0) {
          if (saves_pre(last)) write_row(p.saved[layer], p, row, column, pack(v0, v1));
        }
      }
    }
  }
}
