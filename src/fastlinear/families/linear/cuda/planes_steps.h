// What consumers of planes.cu do with a stage: products, scaled and added up in float32.
// acc[4j + 2h + e] is at row warp*16 + h*8 + lane/4, column 8j + 2*(lane%4) + e of a consumer's.

__device__ __forceinline__ void begin_turn(int consumer) {
  bar_sync(1 + consumer, 256);
}

__device__ __forceinline__ void end_turn(int consumer) {
  bar_arrive(1 + (consumer ^ 1), 256);
}

template <bool kFirst>
__device__ __forceinline__ void multiply(float (&acc)[BN / 2], u64 a, u64 b) {
#pragma unroll
  for (int k = 0; k < BK / 16; ++k) {
    if (kFirst && k == 0) wgmma_first(acc, a, b);
    else wgmma(acc, a + k * A_K_STEP, b + k * B_K_STEP);
  }
}

__device__ __forceinline__ float load_scale(u32 at) { return __uint_as_float(load_shared32(at)); }

// acc = s_m acc
__device__ __forceinline__ void scale(float (&acc)[BN / 2], float upper, float lower) {
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) acc[i] *= i & 2 ? lower : upper;
}

// sum += s_n acc
__device__ __forceinline__ void promote(float (&sum)[BN / 2], const float (&acc)[BN / 2], u32 columns) {
#pragma unroll
  for (int i = 0; i < BN / 2; i += 4) {
    const float2 s = load_shared64(columns + 8 * i);
    sum[i] = fmaf(acc[i], s.x, sum[i]);
    sum[i + 1] = fmaf(acc[i + 1], s.y, sum[i + 1]);
    sum[i + 2] = fmaf(acc[i + 2], s.x, sum[i + 2]);
    sum[i + 3] = fmaf(acc[i + 3], s.y, sum[i + 3]);
  }
}

// Rows' scales: those that sums are multiplied by before columns', and those behind them, where products
// of small numbers would leave float32's range.
struct Scales {
  float upper, lower, late_upper, late_lower;
  bool late;           // of any row of the warp
  bool plain[2];       // whether these rows have no planes

  // Lines behind the last row may hold anything.
  __device__ __forceinline__ void put_off(u32 told) {
    const float least = told & (A_LEVEL | B_LEVEL) ? 1.0f : 0x1p-70f;  // sums from 2^-28 on stay whole
    late_upper = upper < least ? upper : 1.0f;
    late_lower = lower < least ? lower : 1.0f;
    upper = upper < least ? 1.0f : upper;
    lower = lower < least ? 1.0f : lower;
    late = __any_sync(0xffffffffu, late_upper < 1.0f || late_lower < 1.0f);
  }
};

// sum += s_n acc with late scales of rows and 2^-29 for each second level of a step's; nothing where there
// are no such planes.
__device__ __forceinline__ void promote_small(float (&sum)[BN / 2], const float (&acc)[BN / 2],
                                              u32 columns, const Scales& rows, u32 told, int consumer) {
  constexpr float kLevel = 1.0f / (1 << 29);
  const float level = (told & A_LEVEL ? kLevel : 1.0f) * (told & B_LEVEL ? kLevel : 1.0f);
#pragma unroll
  for (int i = 0; i < BN / 2; i += 2) {
    const float2 s = load_shared64(columns + 8 * (i & ~3));
    const float late = i & 2 ? rows.late_lower : rows.late_upper;
    const bool has = told >> (A_BLOCKS + consumer) & told >> (B_BLOCKS + i / 32) & 1;
    if (!has) continue;
    // the larger scale first
    sum[i] += late < 1.0f ? acc[i] * s.x * late * level : acc[i] * level * s.x;
    sum[i + 1] += late < 1.0f ? acc[i + 1] * s.y * late * level : acc[i + 1] * level * s.y;
  }
}

struct Pipe {
  u32 base;
  int consumer, warp, stage;
  u32 phase, again;
  u32 long_tiles;  // k-tiles of more than BK / 2 numbers

  // What sums over a k-tile are to be multiplied by: each of its four additions cuts off half a bit in the
  // mean, of a sum that grows. A tile of half as many numbers is nearer as it is.
  __device__ __forceinline__ float restored(u32 told) const {
    return told >> K_TILE < long_tiles ? 1.0f + 0x1p-23f : 1.0f;
  }

  __device__ __forceinline__ u32 scales() const { return scales_at(base, stage, phase); }

  __device__ __forceinline__ void release() const {
    __syncwarp();  // its lanes have read the scales of the step before
    if (lane_id() == 0) mbar_arrive(base + BAR_OFFSET + (STAGES + stage) * 8);
  }

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }

  // Where A is read, which of the consumer's 16 rows each have planes of the second level.
  __device__ __forceinline__ u32 small_rows() const {
    const uint4 found = load_shared128(scales() + SMALL_OFFSET + 16 * consumer);
    return found.x | found.y << 1 | found.z << 2 | found.w << 3;
  }

  // Scales of a thread's two rows. Behind the last row lies anything.
  __device__ __forceinline__ void read_scales(Scales& s) const {
    const u32 rows = scales() + 4 * (consumer * (BM / 2) + warp * 16 + (lane_id() >> 2));
    s.upper = load_scale(rows);
    s.lower = load_scale(rows + 32);
    s.plain[0] = s.upper < 0.0f;
    s.plain[1] = s.lower < 0.0f;
  }

  // Whether one of the warp's rows or columns may have no planes; behind the last column lies anything.
  __device__ __forceinline__ bool any_plain(const Scales& s) const {
    bool found = s.plain[0] || s.plain[1];
    const u32 lane = lane_id();
#pragma unroll
    for (int i = 0; i < BN / 64; ++i) {
      const float2 column = load_shared64(scales() + 4 * BM + 256 * i + 8 * lane);
      found |= column.x < 0.0f || column.y < 0.0f;
    }
    return __any_sync(0xffffffffu, found);
  }

  // acc = the products of planes with rows' scales, which are known once `meanwhile` has run, while the
  // tensor cores work; then the stage is released, if it is the `last` time. Where registers hold both, the
  // products of high planes are under way while the others are scaled; else they are added to these.
  template <class Meanwhile>
  __device__ __forceinline__ void multiply_planes(float (&acc)[BN / 2], bool turns, bool last,
                                                  const Scales& s, const Meanwhile& meanwhile) const {
    constexpr float kLow = 1.0f / 2048.0f;
    const u32 at = base + stage * STAGE_BYTES;
    const u64 high = make_desc<A_MN>(at + consumer * (A_BYTES / 2)), low = high + (A_BYTES >> 4);
    const u64 b = make_desc<B_MN>(at + A_STAGE);
    if (turns) begin_turn(consumer);
    wgmma_fence();
    multiply<true>(acc, high, b + (B_BYTES >> 4));
    multiply<false>(acc, low, b);
    wgmma_commit();
    if constexpr (BOTH) {
      float of_high[BN / 2];
      multiply<true>(of_high, high, b);
      wgmma_commit();
      if (turns) end_turn(consumer);
      meanwhile();
      wgmma_wait<1>();
      settle(acc);
      scale(acc, kLow * s.upper, kLow * s.lower);
      wgmma_wait<0>();
      settle(of_high);
      if (last) release();
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) acc[i] = fmaf(of_high[i], i & 2 ? s.lower : s.upper, acc[i]);
    } else {
      if (turns) end_turn(consumer);
      meanwhile();
      wgmma_wait<0>();
      settle(acc);
      scale(acc, kLow, kLow);
      if (turns) begin_turn(consumer);
      wgmma_fence();
      multiply<false>(acc, high, b);
      wgmma_commit();
      if (turns) end_turn(consumer);
      wgmma_wait<0>();
      settle(acc);
      if (last) release();
      scale(acc, s.upper, s.lower);
    }
  }

  // sum += the products of a step of which each 64 lines have one scale.
  __device__ __forceinline__ void uniform_step(float (&sum)[BN / 2], u32 told) const {
    constexpr float kLow = 1.0f / 2048.0f;
    const u32 at = base + stage * STAGE_BYTES;
    const u64 a_high = make_desc<A_MN>(at + consumer * (A_BYTES / 2)), a_low = a_high + (A_BYTES >> 4);
    const u64 b_high = make_desc<B_MN>(at + A_STAGE), b_low = b_high + (B_BYTES >> 4);
    float low[BN / 2], high[BN / 2], s[BN / 64];
    begin_turn(consumer);
    wgmma_fence();
    multiply<true>(low, a_high, b_low);
    multiply<false>(low, a_low, b_high);
    multiply<true>(high, a_high, b_high);
    wgmma_commit();
    end_turn(consumer);
    const float of_rows = restored(told) * load_scale(scales() + consumer * (BM / 2) * 4);
#pragma unroll
    for (int i = 0; i < BN / 64; ++i) s[i] = of_rows * load_scale(scales() + 4 * BM + 256 * i);
    wgmma_wait<0>();
    settle(low);
    settle(high);
    release();
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) sum[i] = fmaf(fmaf(low[i], kLow, high[i]), s[i / 32], sum[i]);
  }

  // sum += acc with rows' and columns' scales, of a step of that level.
  __device__ __forceinline__ void promote_step(float (&sum)[BN / 2], const float (&acc)[BN / 2],
                                               const Scales& s, u32 told) const {
    const u32 columns = scales() + 4 * BM + 8 * (lane_id() & 3);
    if (told & (A_LEVEL | B_LEVEL) || s.late) promote_small(sum, acc, columns, s, told, consumer);
    else promote(sum, acc, columns);
  }

  // sum += the products of a step; returns what it was told, the rows' scales, and whether the numbers of
  // some line are to be multiplied themselves.
  __device__ __forceinline__ u32 step(float (&sum)[BN / 2], Scales& s, bool& found) {
    mbar_wait(base + BAR_OFFSET + stage * 8, phase);
    if (READS) mbar_wait(base + SPLIT_OFFSET + (2 * stage + consumer) * 8, phase);
    const u32 told = load_shared32(scales() + TOLD_OFFSET);
    if (!READS && told & UNIFORM_STEP) {
      uniform_step(sum, told);
      found = false;
      return told;
    }
    const u32 small = READS ? small_rows() : 0;
    float acc[BN / 2];
    multiply_planes(acc, true, !small, s, [&] {
      read_scales(s);
      found = any_plain(s);
      s.put_off(told);
      s.upper *= restored(told);
      s.lower *= restored(told);
    });
    promote_step(sum, acc, s, told);
    if (small) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (small >> i & 1 && lane_id() == 0) mbar_arrive(base + DONE_OFFSET + (4 * consumer + i) * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (small >> i & 1) mbar_wait(base + AGAIN_OFFSET + (4 * consumer + i) * 8, again >> i & 1);
      again ^= small;
      __syncwarp();
      multiply_planes(acc, false, true, s, [&] {
        read_scales(s);
        s.put_off(told | A_LEVEL);
      });
      if (small >> warp & 1) promote_step(sum, acc, s, told | A_LEVEL);
    }
    found &= !(told & (A_LEVEL | B_LEVEL));  // the k-tile's first step had numbers without planes
    return told;
  }
};
