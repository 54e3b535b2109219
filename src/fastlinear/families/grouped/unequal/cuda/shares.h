// Shares added up in order. Behind groups.h.

#if ADDS
__device__ __forceinline__ void store(Number* at, const float (&v)[4], int count) {
#if KIND == 2
  if (count >= 4) {
    *reinterpret_cast<float4*>(at) = {v[0], v[1], v[2], v[3]};
    return;
  }
  for (int n = 0; n < count; ++n) at[n] = v[n];
#else
  const u32 low = pack(v[0], v[1]), high = pack(v[2], v[3]);
  if (count >= 4) {
    *reinterpret_cast<uint2*>(at) = {low, high};
    return;
  }
  at[0] = static_cast<u16>(low);
  if (count > 1) at[1] = static_cast<u16>(low >> 16);
  if (count > 2) at[2] = static_cast<u16>(high);
#endif
}

// Four numbers of all shares a thread; `block` counts blocks of THREADS threads through all groups.
template <int THREADS>
__device__ __forceinline__ void add_shares(const Shares& shares, int count, int block) {
  const int g = group_of(shares, count, block), rows = shares.rows[g], cols = shares.cols[g];
  const u64 of_dw = share_of_dw(rows, cols), all = share_of(rows, cols);
  const u64 i = (static_cast<u64>(block - shares.first[g]) * THREADS + threadIdx.x) * 4;
  if (i >= all) return;
  const bool behind = i >= of_dw;  // db
  const u64 where = behind ? MODE == 3 ? 0 : shares.more[g] : shares.c[g];
  const u64 place = behind ? i - of_dw : i;
  if (!where) return;
  const float* from = reinterpret_cast<const float*>(shares.from[g]) + i;
  const int parts = shares.parts[g];
  float v[4];
  if (behind) {  // many numbers, of which little may be left
    double sum[4] = {};
    for (int p = 0; p < parts; ++p)
      for (int n = 0; n < 4; ++n) sum[n] += from[p * all + n];
    for (int n = 0; n < 4; ++n) v[n] = static_cast<float>(sum[n]);
  } else {
    float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll 8
    for (int p = 1; p < parts; ++p) {
      const float4 next = *reinterpret_cast<const float4*>(from + p * all);
      sum.x += next.x;
      sum.y += next.y;
      sum.z += next.z;
      sum.w += next.w;
    }
    v[0] = sum.x, v[1] = sum.y, v[2] = sum.z, v[3] = sum.w;
  }
  const u64 left = (behind ? rows : static_cast<u64>(rows) * cols) - place;
  const int there = left < 4 ? static_cast<int>(left) : 4;
#if MODE == 3
  if (shares.bias[g])
    for (int n = 0; n < there; ++n) v[n] += at(shares.bias[g])[(place + n) % cols];
  if (SAVE_PRE) store(to(shares.more[g]) + place, v, there);
#pragma unroll
  for (int n = 0; n < 4; ++n) v[n] = act(v[n]);
#endif
  store(to(where) + place, v, there);
}
#endif
