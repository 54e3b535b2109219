// Column sums of dy (m, n), rows `stride` apart, in shares of `each` rows: float32, in a fixed order.
// n is a multiple of 8, rows begin at multiples of 16 bytes.

struct DySums {
  static constexpr int kColumns = 256;  // of a warp's task: 8 of each lane, one share
  static constexpr int kAhead = 2;      // rows that a lane has under way

  const unsigned short* dy;
  float* shares;  // (shares, n)
  int m, n, stride, each;

  __device__ __forceinline__ int across() const { return (n + kColumns - 1) / kColumns; }
  __device__ __forceinline__ int tasks() const { return (m + each - 1) / each * across(); }

  __device__ __forceinline__ void add(int task, int lane) const {
    const int share = task / across(), column = task % across() * kColumns + lane * 8;
    if (column >= n) return;
    const int first = share * each, end = min(m, first + each);
    const unsigned short* from = dy + static_cast<u64>(first) * stride + column;
    float sum[8] = {};
#pragma unroll 1
    for (int row = first; row < end; row += kAhead, from += static_cast<u64>(stride) * kAhead) {
      uint4 v[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        v[i] = make_uint4(0, 0, 0, 0);
        if (row + i < end)
          v[i] = *reinterpret_cast<const uint4*>(from + static_cast<u64>(stride) * i);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const u32 words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float a, b;
          unpack(words[k], a, b);
          sum[2 * k] += a;
          sum[2 * k + 1] += b;
        }
      }
    }
    float4* to = reinterpret_cast<float4*>(shares + static_cast<u64>(share) * n + column);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  }
};
