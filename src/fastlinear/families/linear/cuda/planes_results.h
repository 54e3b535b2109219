// Results of a tile of planes.cu, and products of numbers without planes.

__device__ __forceinline__ bool aligned(const float* at) {
  return (reinterpret_cast<u64>(at) & 7) == 0;
}

// A warp's 16 rows of a tile, from `row` on.
struct Results {
  const Params& p;
  int row, column, slice;
  const Tile& tile;

  // Of the group; where rows of A are ragged, from the tile's first on.
  __device__ __forceinline__ int rows() const { return RAGGED_M ? tile.lines.rows : p.M; }
  __device__ __forceinline__ int group() const { return tile.group; }

  __device__ __forceinline__ bool is_empty() const {
    int begin, end;
    tile.steps(p, begin, end);
    return begin == end;
  }

  // A number of A or B, of a line along K.
  template <int kOperand>
  __device__ __forceinline__ float number(int line, int k) const {
    constexpr int kDerived = kOperand ? B_DERIVED : A_DERIVED;
    const auto read = [&](int i) {
      const long long* const s = p.strides[i][kOperand];
      long long apart = GROUPED ? group() * p.groups_apart[i][kOperand] : 0;
      if (RAGGED_M && kOperand == 0) apart = tile.lines.first * s[0];
      if (RAGGED_K) apart = tile.first * s[1];
      return p.plain[i][kOperand][apart + line * s[0] + k * s[1]];
    };
    const float x = read(0), saved = kDerived == DERIVED_NONE ? 0.0f : read(1);
    return derived(kDerived, x, saved, kDerived == DERIVED_GATE_GRADIENT ? read(2) : 0.0f);
  }

  // sum += the numbers' own products along a k-tile, where a row or a column has no planes there. Places
  // are worked out again at each k: they would not all fit in registers.
  __device__ __forceinline__ void add_plain(float (&sum)[BN / 2], u32 scales, int k_tile,
                                            const bool (&plain)[2]) const {
    bool rows[2];
    u64 columns = 0;
    {
      const int r = row + (lane_id() >> 2), c = 2 * (lane_id() & 3);
#pragma unroll
      for (int h = 0; h < 2; ++h) rows[h] = plain[h] && r + 8 * h < this->rows();
#pragma unroll
      for (int i = 0; i < BN / 4; i += 2) {
        const float2 s = load_shared64(scales + 4 * (BM + c + 4 * i));
        columns |= static_cast<u64>(column + c + 4 * i < p.N && s.x < 0.0f) << i;
        columns |= static_cast<u64>(column + c + 4 * i + 1 < p.N && s.y < 0.0f) << (i + 1);
      }
    }
    if (!__any_sync(0xffffffffu, rows[0] || rows[1] || columns)) return;
    const int end = min((k_tile + 1) * BK, tile.depth);
#pragma unroll 1
    for (int k = k_tile * BK; k < end; ++k) {
      const u32 lane = lane_id();
      const int r = row + (lane >> 2), c = column + 2 * (lane & 3);
      float a[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        a[h] = number<0>(min(r + 8 * h, this->rows() - 1), k);
#pragma unroll
      for (int i = 0; i < BN / 4; ++i) {
        const int n = min(c + 8 * (i >> 1) + (i & 1), p.N - 1), at = 4 * (i >> 1) + (i & 1);
        const float b = number<1>(n, k);
        const bool own = columns >> i & 1;
        if (own || rows[0]) sum[at] = fmaf(a[0], b, sum[at]);
        if (own || rows[1]) sum[at + 2] = fmaf(a[1], b, sum[at + 2]);
      }
    }
  }

  // Groups j to j + 3 of eight columns each, of rows so many numbers `apart`; `pairs`: rows begin on 8
  // bytes and have an even length.
  __device__ __forceinline__ void store(float* to, const float (&v)[BN / 2], int j, bool pairs,
                                        int apart) const {
    const u32 lane = lane_id();
    const int r = row + (lane >> 2), n = column + 2 * (lane & 3);
    float* const at[2] = {to + static_cast<long long>(r) * apart + n,
                          to + static_cast<long long>(r + 8) * apart + n};
    if (pairs) {
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 16; i += 2)
        if (r + 4 * (i & 2) < rows() && n + 2 * (i & ~3) < p.N)
          *reinterpret_cast<float2*>(at[i >> 1 & 1] + 2 * (i & ~3)) = {v[i], v[i + 1]};
    } else {
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 16; ++i)
        if (r + 4 * (i & 2) < rows() && n + 2 * (i & ~3) + (i & 1) < p.N)
          at[i >> 1 & 1][2 * (i & ~3) + (i & 1)] = v[i];
    }
  }

  // v += what lies there, alike, in dense rows.
  __device__ __forceinline__ void add(const float* from, float (&v)[BN / 2], int j, bool pairs) const {
    const u32 lane = lane_id();
    const int r = row + (lane >> 2), n = column + 2 * (lane & 3);
    const float* const at[2] = {from + static_cast<long long>(r) * p.N + n,
                                from + static_cast<long long>(r + 8) * p.N + n};
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 16; i += 2) {
      const float* const here = at[i >> 1 & 1] + 2 * (i & ~3);
      const int left = r + 4 * (i & 2) < rows() ? p.N - n - 2 * (i & ~3) : 0;
      if (pairs && left > 0) {
        const float2 old = *reinterpret_cast<const float2*>(here);
        v[i] += old.x, v[i + 1] += old.y;
      } else {
        if (left > 0) v[i] += here[0];
        if (left > 1) v[i + 1] += here[1];
      }
    }
  }

  // Where results of its rows begin, or of the group.
  __device__ __forceinline__ long long first_result() const {
    if (RAGGED_M) return static_cast<long long>(tile.lines.first) * p.y_row;
    return GROUPED ? group() * p.y_groups_apart : 0;
  }

  // Rows of no group.
  __device__ __forceinline__ void clear() const {
    const float zeros[BN / 2] = {};
#pragma unroll
    for (int j = 0; j < BN / 8; j += 4) store(p.y + first_result(), zeros, j, false, p.y_row);
  }

  __device__ __forceinline__ void finish(float (&sum)[BN / 2]) const {
    const bool last = p.slices == 1;
    const long long part = GROUPED ? group() * p.slices + slice : slice;
    const long long own = first_result();
    float* const to = last ? p.y + own : p.parts + part * (static_cast<long long>(p.M) * p.N);
    float* const pre = SAVE ? p.pre + own : nullptr;
    const int apart = GROUPED && last ? p.y_row : p.N;
    const bool pairs = p.N % 2 == 0 && apart % 2 == 0 && aligned(to) && (!SAVE || aligned(pre));
    const int first = column + 2 * (lane_id() & 3);
    float bias[BN / 4];  // read before anything is written, which might be this
    if (HAS_BIAS) {
#pragma unroll
      for (int i = 0; i < BN / 4; ++i) {
        const int n = first + 8 * (i >> 1) + (i & 1);
        bias[i] = last && n < p.N ? p.bias[GROUPED ? group() * p.N + n : n] : 0.0f;
      }
    }
#pragma unroll
    for (int j = 0; j < BN / 8; j += 4) {
      if (last) {
#pragma unroll
        for (int i = 4 * j; HAS_BIAS && i < 4 * j + 16; ++i) sum[i] += bias[i / 4 * 2 + i % 2];
        if (SAVE) store(pre, sum, j, pairs, apart);
#pragma unroll
        for (int i = 4 * j; !ANY_DERIVED && i < 4 * j + 16; ++i) sum[i] = act(sum[i]);
        if (ADDED) add(to, sum, j, pairs);
      }
      store(to, sum, j, pairs, apart);
    }
  }
};
