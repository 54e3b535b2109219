// whole.cu: products of one block of K, and how results are put into memory.

// ---------------------------------------------------------------- products

__device__ __forceinline__ void read_pieces(Pieces& w, u32 ring) {
#pragma unroll
  for (int tw = 0; tw < TW; ++tw) {
    w[tw][0] = load16(ring + tw * 1024);
    w[tw][1] = load16(ring + tw * 1024 + 512);
  }
}

// acc[part] + odd[part] += the products of one k-block.
__device__ __forceinline__ void multiply(float (&acc)[PARTS][4], float (&odd)[PARTS][4],
                                         const Pieces& w, u32 input) {
  uint4 b[NB];
#pragma unroll
  for (int nb = 0; nb < NB; ++nb) b[nb] = load16(input + nb * 128);
  if constexpr (DTYPE != 2) {
#pragma unroll
    for (int tw = 0; tw < TW; ++tw) {
      const uint4 lo = w[tw][0], hi = w[tw][1];
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        mma(acc[tw * NB + nb], lo.x, hi.x, lo.y, hi.y, b[nb].x, b[nb].y);
        mma(odd[tw * NB + nb], lo.z, hi.z, lo.w, hi.w, b[nb].z, b[nb].w);
      }
    }
  } else {
    uint4 bh[NB], bl[NB];
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) split4(b[nb], bh[nb], bl[nb]);
#pragma unroll
    for (int tw = 0; tw < TW; ++tw) {
      uint4 loh, lol, hih, hil;
      split4(w[tw][0], loh, lol);
      split4(w[tw][1], hih, hil);
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        const int q = tw * NB + nb;
        float first[4] = {}, second[4] = {};
        mma(first, loh.x, hih.x, loh.y, hih.y, bh[nb].x, bh[nb].y);
        mma(second, loh.z, hih.z, loh.w, hih.w, bh[nb].z, bh[nb].w);
        mma(odd[q], loh.x, hih.x, loh.y, hih.y, bl[nb].x, bl[nb].y);
        mma(odd[q], lol.x, hil.x, lol.y, hil.y, bh[nb].x, bh[nb].y);
        mma(odd[q], loh.z, hih.z, loh.w, hih.w, bl[nb].z, bl[nb].w);
        mma(odd[q], lol.z, hil.z, lol.w, hil.w, bh[nb].z, bh[nb].w);
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[q][e] += first[e];
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[q][e] += second[e];
      }
    }
  }
}

// sum[tile][column g or g + 8][row] += this thread's quarter of a k-block, float32 arithmetic.
__device__ __forceinline__ void multiply_simt(float (&sum)[TW][2][ROWS], const Pieces& w,
                                              u32 input) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const uint4 x = load16(input + r * 16);
#pragma unroll
    for (int tw = 0; tw < TW; ++tw) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float v = sum[tw][h][r];
        v = fmaf(__uint_as_float(w[tw][h].x), __uint_as_float(x.x), v);
        v = fmaf(__uint_as_float(w[tw][h].y), __uint_as_float(x.y), v);
        v = fmaf(__uint_as_float(w[tw][h].z), __uint_as_float(x.z), v);
        sum[tw][h][r] = fmaf(__uint_as_float(w[tw][h].w), __uint_as_float(x.w), v);
      }
    }
  }
}

// Adds up the quad's quarters; thread t keeps rows 2t and 2t + 1, as an mma accumulator lies.
__device__ __forceinline__ void gather_simt(float (&acc)[PARTS][4],
                                            const float (&sum)[TW][2][ROWS], int t) {
#pragma unroll
  for (int q = 0; q < PARTS; ++q) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* const v = sum[q / NB][h] + q % NB * 8;
      float half[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float give = t & 2 ? v[e] : v[e + 4];
        const float keep = t & 2 ? v[e + 4] : v[e];
        half[e] = keep + __shfl_xor_sync(0xffffffffu, give, 2);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float give = t & 1 ? half[e] : half[e + 2];
        const float keep = t & 1 ? half[e + 2] : half[e];
        acc[q][2 * h + e] = keep + __shfl_xor_sync(0xffffffffu, give, 1);
      }
    }
  }
}

// ---------------------------------------------------------------- results

// Puts a 16 x 8 accumulator as TILE_UNITS units, `stride` bytes apart, of 8 rows of 16 bytes.
__device__ __forceinline__ void put(u32 base, int stride, const float (&v)[4], int lane) {
  const int g = lane >> 2, t = lane & 3;
  if constexpr (DTYPE == 2) {
    const u32 addr = base + (g >> 2) * stride + t * 32 + (g & 3) * 4;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr + (e >> 1) * (2 * stride) + (e & 1) * 16),
                   "f"(v[e])
                   : "memory");
    }
  } else {
    stmatrix_trans(base + ((lane >> 3) & 1) * stride + (lane & 7) * 16, pack(v[0], v[1]),
                   pack(v[2], v[3]));
  }
}

// Writes a staged accumulator to out (rows, n) at (row, column).
__device__ __forceinline__ void write_out(void* out, int rows, int n, int row, int column,
                                          u32 stage, int lane) {
  if (lane >= TILE_UNITS * 8) return;
  row += lane & 7;
  column += (lane >> 3) * PIECE;
  if (row >= rows || column >= n) return;
  const uint4 v = load16(stage + lane * 16);
  char* const at = static_cast<char*>(out) + (static_cast<long long>(row) * n + column) * ES;
  if ((n * ES) % 16 == 0) {
    *reinterpret_cast<uint4*>(at) = v;
    return;
  }
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int e = 0; e < PIECE; ++e) {
    if (column + e >= n) break;
    if constexpr (DTYPE == 2) {
      reinterpret_cast<u32*>(at)[e] = words[e];
    } else {
      reinterpret_cast<unsigned short*>(at)[e] =
          static_cast<unsigned short>(words[e >> 1] >> ((e & 1) * 16));
    }
  }
}
