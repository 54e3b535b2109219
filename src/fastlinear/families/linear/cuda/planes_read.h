// Numbers that planes.cu reads, made planes where they lie in shared memory.

// A k-tile's numbers of 16 rows, of which each four lanes have a row and the one 8 below it, 16 numbers of
// each. In shared memory halves of the tile, 32 numbers of each row, become planes: no row needs another's
// place. Rows are dealt out so that lanes meet in no bank, neither where they read nor where they write.
struct Numbers {
  u32 at;  // where the first row lies
  float v[2][16];

  __device__ __forceinline__ u32 row() const { return __brev(lane_id() >> 2) >> 29; }

  __device__ __forceinline__ void read() {
    const u32 lane = lane_id() & 3, own = row();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i / 4, half = i / 2 % 2, four = i % 2 * 4;
      const u32 from = at + half * A_BYTES + (own + 8 * r) * 128 + ((four + lane ^ own) << 4);
      const uint4 x = load_shared128(from);
      float* const to = v[r] + i % 4 * 4;
      to[0] = __uint_as_float(x.x), to[1] = __uint_as_float(x.y);
      to[2] = __uint_as_float(x.z), to[3] = __uint_as_float(x.w);
    }
  }

  template <class Fact>
  __device__ __forceinline__ Fact of_row(int r) const {
    Fact row, other;  // two, which do not wait for each other
#pragma unroll
    for (int i = 0; i < 8; ++i) row.add(v[r][i]), other.add(v[r][8 + i]);
    row.add(other);
    row.add_across(1);
    row.add_across(2);
    return row;
  }

  // Puts them on their rows' scales, which are written; whether any is small.
  __device__ __forceinline__ bool scale(u32 to) {
    const Span rows[2] = {of_row<Span>(0), of_row<Span>(1)};
    float s[2] = {rows[0].scale(), rows[1].scale()};
    const bool told = rows[0].tells() && rows[1].tells();
    if (__any_sync(0xffffffffu, !told)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        settle(v[r]);  // what was made of them before needs no registers
        s[r] = of_row<Known>(r).scale();
      }
    }
    bool found = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if ((lane_id() & 3) == 0) store_shared32(to + 4 * (row() + 8 * r), __float_as_uint(s[r]));
      found |= s[r] >= 0.0f && below(rows[r].least, s[r]);
#pragma unroll
      for (float& x : v[r]) x = scaled(x, s[r]);
    }
    return found;
  }

  // Their planes of a level.
  template <int kLevel>
  __device__ __forceinline__ void write() const {
    const u32 lane = lane_id() & 3, own = row();
    __syncwarp();  // all have read
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* const x = v[i / 4] + i % 4 * 4;
      const u32 eight = i % 4 * 2 + (lane >> 1);
      const u32 to = at + (own + 8 * (i / 4)) * 128 + ((eight ^ own) << 4) + (lane & 1) * 8;
      uint2 high, low;
      split<kLevel>(x[0], x[1], x[2], x[3], high, low);
      store_shared64(to, high);
      store_shared64(to + A_BYTES, low);
    }
  }
};

// Planes of a consumer's rows, by its own warpgroup. Those of small numbers follow in their place once it
// is done with the others, from numbers that wait in registers.
__device__ __forceinline__ void split_tiles(const Params& p, u32 base, int consumer, int first, int step,
                                            int tiles) {
  const u32 warp = 4 * consumer + threadIdx.x % 128 / 32, rows = 16 * warp;
  int stage = 0;
  u32 phase = 0, done = 0;
  const auto arrive = [&](u32 bar) {
    fence_async();
    __syncwarp();
    if (lane_id() == 0) mbar_arrive(base + bar);
  };
  for (int t = first; t < tiles; t += step) {
    u32 told;
#pragma unroll 1
    do {
      mbar_wait(base + BAR_OFFSET + stage * 8, phase);
      const u32 scales = scales_at(base, stage, phase);
      told = load_shared32(scales + TOLD_OFFSET);
      Numbers numbers{base + stage * STAGE_BYTES + rows * 128};
      numbers.read();
      const bool small = __any_sync(0xffffffffu, numbers.scale(scales + 4 * rows));
      if (lane_id() == 0) store_shared32(scales + SMALL_OFFSET + 4 * warp, small);
      if (small) numbers.write<1>();
      else numbers.write<0>();
      arrive(SPLIT_OFFSET + (2 * stage + consumer) * 8);
      if (small) {
        mbar_wait(base + DONE_OFFSET + warp * 8, done);
        done ^= 1;
        numbers.write<2>();
        arrive(AGAIN_OFFSET + warp * 8);
      }
      if (++stage == STAGES) { stage = 0; phase ^= 1; }
    } while (!(told & LAST));
  }
}
