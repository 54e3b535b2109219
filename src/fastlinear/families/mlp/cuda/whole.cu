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
// The host puts layout.cu (who computes what, and where it lies) and products.cu before
// this text.
//
// Macros from the host: DTYPE (0 bfloat16, 1 float16, 2 float32) CLUSTER NB WN KS TW UNROLL DEPTH
// VEC EXACT WIDTH UNITS ACT FINAL SAVE MAX_LAYERS SIMT DIRECT, a number ACT_<NAME> for every
// activation.
//   VEC: bytes at which every weight row is aligned: 16, 8, 4 or 2.
//   EXACT: 1 when every K and N is a whole number of steps and passes.
//   WIDTH: the width of every layer and of x where all are equal, else 0.
//   UNITS: units of one activation buffer.
//   DIRECT: 1 keeps DEPTH k-blocks of weights per warp in registers instead of shared memory, each
//     replaced by its successor once used. For equal widths in one pass, where shared memory's
//     rate would bound.
//   SAVE: 0 nothing, 1 pre-activations (hidden and last), 2 hidden outputs, 3 hidden outputs and
//     the last pre-activation, 4 hidden pre-activations.

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
      if (p.layers > 1) announce(p, base + 8, 0);
      if (p.layers > 2) announce(p, base, 1);
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
          if (EXACT && threadIdx.x == 0) announce(p, bar, layer + 1);
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
            if (from) feed.hold(held[i], from, i);
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
        if constexpr (CLUSTER == 1) {
          put(next + tile * (TILE_UNITS * UNIT_BYTES) + nb * 128, UNIT_BYTES, v, lane);
        }
        if constexpr (CLUSTER > 1 || SAVE == 2 || SAVE == 3) {
          put(stage, 128, v, lane);
          __syncwarp();
        }
        if constexpr (SAVE == 2 || SAVE == 3) {
          write_out(p.saved[layer], p.rows, n, row0 + nb * 8, tile * 16, stage, lane);
        }
        if constexpr (CLUSTER > 1) {
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
        if constexpr (CLUSTER > 1 || SAVE == 2 || SAVE == 3) __syncwarp();
      }
    }
    shifts += share.columns * ES;
    if constexpr (CLUSTER == 1) {
      __syncthreads();
    } else if (!last) {
      const int peer = static_cast<int>(threadIdx.x);
      if (!EXACT && share.end == share.first && peer < CLUSTER) {
        mbar_arrive_at_peer(peer_addr(base + (~layer & 1) * 8, peer));
      }
      // Counting blocks takes a division: only now, when the results are on their way.
      if (!EXACT && threadIdx.x == 0 && layer > 0 && layer + 2 < p.layers) {
        announce(p, base + (layer & 1) * 8, layer + 1);
      }
    }
  }
}
