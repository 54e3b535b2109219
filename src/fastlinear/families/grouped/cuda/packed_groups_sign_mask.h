// Of every output one bit, whether it is positive: all that the derivative of relu and leaky_relu asks
// of it. The forward writes them, the backward reads them. The texts of packed_groups_instructions.h,
// packed_groups_tiles.h and derivatives.h stand before this one. Macros: N P SHARED IS_BF16, ACT and ACT_<NAME> of relu and
// leaky_relu.
//
// The signs of a tile of ROWS rows of a strip lie together: 32 bytes for every 8 columns. Of these byte
// 4 r + q is of columns 2 q and 2 q + 1, and of rows r, r + 8, r + 16 and r + 24, which the multiplier
// gives to one lane: bit 4 c + i of column 2 q + c, row 8 i + r. Tiles lie by tokens and then strips,
// SHARED by strips and then tokens, so that tokens first P makes no difference.

constexpr int SIGN_BYTES = ROWS * P * N / 8, SIGN_UNITS = P * N / 8;  // of a tile; of 8 columns

// All tiles' signs.
struct Signs {
  char* begin;
  int tiles, strips;  // tiles of a strip

  __device__ __forceinline__ char* at(int strip, int row) const {
    const int tile = row / ROWS;
    const long long before = SHARED ? static_cast<long long>(strip) * tiles + tile
                                    : static_cast<long long>(tile) * strips + strip;
    return begin + before * SIGN_BYTES;
  }
};

// What a lane has of the signs of a tile's outputs, TILES times 8 columns, while these are computed by
// blocks of 16 rows: of columns j four bits of either half of a word, one half for either column.
template <int TILES>
struct LaneSigns {
  u32 word[(TILES + 3) / 4] = {};

  __device__ __forceinline__ void next_block() {
#pragma unroll
    for (u32& w : word) w >>= 2;
  }
  __device__ __forceinline__ void add(int j, int h, u32 y) {
    word[j / 4] |= positive(y) & 0x00040004u << 4 * (j % 4) + h;
  }
  // Into a tile's signs: every `step`-th 8 columns from a group's word `first` on.
  __device__ __forceinline__ void store(u32 signs, int p, int first, int step, int lane) const {
    const int place = p * (N / 2) + first;
    const u32 at = signs + place / 4 * 32 + place % 4 + lane / 4 * 4;
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      const u32 w = word[j / 4];
      const u32 two = j % 2 ? w >> 4 & 0x0f0fu | w >> 16 & 0xf0f0u : w & 0x0f0fu | w >> 12 & 0xf0f0u;
      if (2 * first + 8 * step * j < N)
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(at + 32 * step * j), "r"(two >> j % 4 / 2 * 8)
                     : "memory");
    }
  }
};

// dy * act'(pre) of four words of a row, in place; `signs` are 8 columns' of rows r, of which the i-th
// is meant.
__device__ __forceinline__ void grade_words(u32 (&dy)[4], u32 signs, int i) {
  const u32 first = signs << (7 - i), second = signs << (3 - i);  // bytes whose highest bits are meant
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    u32 kept;  // __byte_perm would not repeat a byte's highest bit
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(kept) : "r"(first), "r"(second), "r"(0xcc88u + 0x1111u * q));
    if constexpr (ACT == ACT_RELU)
      dy[q] &= kept;
    else
      dy[q] = dy[q] & kept | pack(0.01f * half_of(dy[q], 0), 0.01f * half_of(dy[q], 1)) & ~kept;
  }
}

// dpre over dy of a strip's tile T, by so many warps.
template <class T, int COUNT>
__device__ __forceinline__ void grade_by_signs(u32 dy, u32 signs, int warp, int lane) {
  constexpr int TURNS = (SIGN_UNITS + 4 * COUNT - 1) / (4 * COUNT);
  const int r = lane % 8;
#pragma unroll 1
  for (int turn = 0; turn < TURNS; ++turn) {
    const int unit = 4 * (warp + COUNT * turn) + lane / 8;
    if (unit < SIGN_UNITS) {
      u32 s[1], v[ROWS / 8][4];
      load_words<1>(s, signs + 32 * unit + 4 * r);
#pragma unroll
      for (int i = 0; i < ROWS / 8; ++i) load_words<4>(v[i], dy + T::at(8 * i + r, 16 * unit));
#pragma unroll
      for (int i = 0; i < ROWS / 8; ++i) {
        grade_words(v[i], s[0], i);
        store_words<4>(dy + T::at(8 * i + r, 16 * unit), v[i]);
      }
    }
  }
}
