// Sizes of wide_backward.cu, where things lie in a block's shared memory, and what its dact warps
// do: dpre over dy, and db. The texts that it names and its macros stand before this one.

constexpr int TOKENS = BK, HALF = 128;
constexpr int HALVES = (K + HALF - 1) / HALF;
constexpr int BOX = TOKENS * 128, N_BOXES = BN / 64, K_BOXES = (K + 63) / 64;
constexpr bool CARRIES = BY_WORDS<N> || BY_WORDS<K> && NEED_DW;  // what no box brings, dact warps do
constexpr bool DERIVES = ACT != ACT_NONE || CARRIES, SAVED_BOXES = ACT != ACT_NONE && !SIGNS;
constexpr bool W_BY_WORDS = K % 8 != 0;  // what of W is in shared memory
constexpr bool HAS_DACT_WARPS = DERIVES || NEED_DB;

constexpr int DY_BYTES = N_BOXES * BOX, X_BYTES = NEED_DW ? 2 * BOX : 0;
constexpr int TILE = DY_BYTES + X_BYTES;
constexpr int SAVED_AT = TILES * TILE;
constexpr int OUT_AT = SAVED_AT + (SAVED_BOXES ? PARTS * (DY_BYTES / 2) : 0);
constexpr int W_AT = OUT_AT + (NEED_DX ? OUTS * 2 * BOX : 0), W_BOXES = NEED_DX ? N_BOXES - HELD : 0;
constexpr int DB_AT = W_AT + W_BOXES * 2 * BOX;

// Each dact warp has a box of half a tile, or one half of its rows.
constexpr int SHARERS = N_BOXES > 2 ? 1 : 2, DACT_WARPS = SHARERS * N_BOXES, ROWS = TOKENS / 2 / SHARERS;
// Blocks that it has under way, as registers allow.
constexpr bool LIGHT = ACT == ACT_NONE || ACT == ACT_RELU || ACT == ACT_LEAKY_RELU;
constexpr int AT_ONCE = !LIGHT ? 1 : SIGNS && SPLIT && ACT == ACT_RELU ? 4 : 2;
constexpr int OWN_HALVES = SPLIT ? 1 : 2;  // of a tile, those that this block grades
constexpr int DB_BYTES = NEED_DB && !CHANNELS ? CLUSTER * DACT_WARPS * 64 * 4 : 0;

constexpr int FULL_AT = DB_AT + DB_BYTES;  // barriers: dy, saved and x are there
constexpr int GRADED_AT = FULL_AT + 8 * TILES;
constexpr int FREE_AT = GRADED_AT + 8 * TILES;
constexpr int PART_FREE_AT = FREE_AT + 8 * TILES;
constexpr int W_FULL_AT = PART_FREE_AT + 8 * PARTS;

constexpr bool FEW = CARRIES && N_BOXES < 4;  // sums, and more to do for dact warps
constexpr int LEFT = FEW ? 72 : 56, TAKEN = FEW ? 216 : 224;  // registers of a thread

static_assert(LEFT + 2 * TAKEN <= 3 * LAUNCHED, "more would be waited for for ever");
static_assert(K <= 256 && N <= BN && BN <= 256, "sizes");
static_assert(CLUSTER == 1 || CLUSTER == HALVES, "a cluster is the blocks of the same tiles");
static_assert(!SPLIT || CLUSTER == 2 && DERIVES, "a tile is split between the blocks of a cluster");
static_assert(MMA_M == 1 && A_MN != CHANNELS && B_MN != CHANNELS, "as products() is used here");

// Tells the blocks that fill a place that this warp is done with it.
__device__ __forceinline__ void release(u32 bar, u32 lane) {
  if (CLUSTER > 1) {
    if (lane < CLUSTER) mbar_arrive_cta(bar, lane);
  } else if (lane == 0) {
    mbar_arrive(bar);
  }
}

// ---------------------------------------------------------------- dpre, db
// A dact warp has a half of a box, in blocks of 16 tokens of 16 outputs. A lane holds four words of
// a block as the multiplier has them: word 2j + h is token 8h + lane / 4, outputs 8j + 2 (lane % 4)
// and the next. With CHANNELS, where a box has a row for each output, these are read and written
// turned.

// dy * act'(pre) of two numbers, from what was saved.
__device__ __forceinline__ u32 graded_words(u32 dy, u32 saved) {
  if constexpr (ACT == ACT_NONE) return dy;
  if constexpr (ACT == ACT_RELU) return dy & positive(saved);
  float lo, hi, saved_lo, saved_hi;
  unpack(dy, lo, hi);
  unpack(saved, saved_lo, saved_hi);
  return pack(graded(lo, saved_lo), graded(hi, saved_hi));
}

// The same from signs, of word v of a block of the `outputs`-th 16 of 64; all but `signs` and dy are
// constants once unrolled. Word 2j + h of 64 outputs (j below 8) has its bits at 2 (j % 4) + h of two
// bytes, the upper two from output 32 on.
__device__ __forceinline__ u32 graded_by_signs(u32 dy, u32 signs, int outputs, int v) {
  const int bit = 4 * (outputs % 2) + v;
  u32 mask;  // copies of what is then the highest bit of these bytes
  if (outputs < 2)
    asm("prmt.b32 %0, %1, 0, 0x9988;" : "=r"(mask) : "r"(signs << (7 - bit)));
  else
    asm("prmt.b32 %0, %1, 0, 0xbbaa;" : "=r"(mask) : "r"(signs << (7 - bit)));
  if constexpr (ACT == ACT_RELU) return dy & mask;
  float lo, hi;
  unpack(dy, lo, hi);
  return (dy & mask) | (pack(0.01f * lo, 0.01f * hi) & ~mask);
}

template <bool kTurned>
__device__ __forceinline__ void load_block(u32 (&r)[4], u32 at) {
  if constexpr (kTurned)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

// acc (16, 8) += A (16, 16) B (16, 8)^T of warps; B is the same in both halves of its depth.
__device__ __forceinline__ void multiply(float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
#if IS_BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %8}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %8}, {%0, %1, %2, %3};"
#endif
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b));
}

__device__ __forceinline__ void store_block(u32 at, const u32 (&r)[4]) {
  if constexpr (CHANNELS) store_turned(at, r[0], r[1], r[2], r[3]);
  else stmatrix(at, r[0], r[1], r[2], r[3]);
}

// Where a lane's row of a block lies, from the first of a half's: eight lanes each for its four parts.
__device__ __forceinline__ u32 block_row(int lane) {
  const int row = CHANNELS ? lane / 16 * 8 + lane % 8 : lane % 16;
  const int piece = CHANNELS ? lane / 8 % 2 : lane / 16;
  return row * 128 + (piece ^ lane % 8) * 16;
}

// A dact warp's ROWS rows of a half are BANDS of four blocks side by side.
constexpr int BANDS = ROWS / 16;

// dpre over dy in a dact warp's rows of a half. dy, saved: where this lane's row of the first block
// is. signs: a word of each band; with CHANNELS of each block of a band, in its lower half.
__device__ __forceinline__ void grade(u32 dy, u32 saved, const u32 (&signs)[4]) {
#pragma unroll
  for (int band = 0; band < BANDS; ++band) {
#pragma unroll
    for (int side = 0; side < 4; side += AT_ONCE) {
      u32 r[AT_ONCE][4], s[AT_ONCE][4];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        load_block<CHANNELS>(r[i], (dy ^ (side + i) * 32) + band * 2048);
        if (SAVED_BOXES) load_block<CHANNELS>(s[i], (saved ^ (side + i) * 32) + band * 2048);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const u32 word = signs[CHANNELS ? side + i : band];
#pragma unroll
        for (int v = 0; v < 4; ++v)
          r[i][v] = SIGNS ? graded_by_signs(r[i][v], word, CHANNELS ? band : side + i, v)
                          : graded_words(r[i][v], s[i][v]);
        store_block((dy ^ (side + i) * 32) + band * 2048, r[i]);
      }
    }
  }
}

// Sums over tokens that a lane keeps. Beside derivatives they come from products with ones, for which
// these have no registers: two of the (lane % 4)-th 16 outputs. Without there is no time for products,
// which wait for those of the other warps, and a lane keeps sums of all the outputs that it holds.
constexpr int SUM_HALVES = CHANNELS && CLUSTER == 1 ? 2 : 1;
constexpr int SUMS = DERIVES ? 2 : CHANNELS ? 4 * BANDS * SUM_HALVES : 16;

// Adds the tokens of a dact warp's rows of a half up; kFirst: which 16 outputs of a lane's are the
// first.
template <int kFirst>
__device__ __forceinline__ void add_tokens(float (&sums)[SUMS], u32 dpre, int lane) {
#pragma unroll
  for (int outer = 0; outer < (CHANNELS ? BANDS : 4); ++outer) {
    float all[4] = {};
#pragma unroll
    for (int inner = 0; inner < (CHANNELS ? 4 : BANDS); ++inner) {
      const int band = CHANNELS ? outer : inner, side = CHANNELS ? inner : outer;
      const u32 at = (dpre ^ side * 32) + band * 2048;
      u32 r[4];
      if constexpr (DERIVES) {
        load_block<!CHANNELS>(r, at);
        multiply(all, r[0], r[2], r[1], r[3], IS_BF16 ? 0x3f803f80u : 0x3c003c00u);
      } else {
        load_block<CHANNELS>(r, at);
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          float lo, hi;
          unpack(r[v], lo, hi);
          sums[4 * (kFirst + outer) + v / 2 * 2] += lo;
          sums[4 * (kFirst + outer) + v / 2 * 2 + 1] += hi;
        }
      }
    }
    if constexpr (DERIVES) {
      if (lane % 4 != kFirst + outer) continue;
      sums[0] += all[0];  // of output lane / 4, the same in all columns
      sums[1] += all[2];
    }
  }
}

// The sums that a lane is to store, and where each belongs among a dact warp's columns; -1:
// nowhere.
__device__ __forceinline__ void gather(float (&sums)[SUMS]) {
  if (DERIVES) return;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
#pragma unroll
    for (int far = 4; far < 32; far *= 2) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], far);
  }
}

__device__ __forceinline__ int column_of(int i, int lane) {
  const int which = DERIVES ? lane % 4 : i / 4;
  const int within = DERIVES ? 8 * i + lane / 4 : i / 2 % 2 * 8 + lane % 4 * 2 + i % 2;
  if (!DERIVES && lane >= 4) return -1;
  if (!CHANNELS) return 16 * which + within;
  return which < BANDS * SUM_HALVES ? which / BANDS * 32 + which % BANDS * 16 + within : -1;
}

// With CHANNELS: a dact warp's sums into db or its share, as they are all there is of these
// outputs.
__device__ __forceinline__ void put_sums(const float (&sums)[SUMS], char* db, bool rounded, int first,
                                         int lane) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    const int column = column_of(i, lane), n = first + column;
    if (column < 0 || n >= N) continue;
    if (rounded)
      reinterpret_cast<unsigned short*>(db)[n] = static_cast<unsigned short>(pack(sums[i], 0.0f));
    else
      reinterpret_cast<float*>(db)[n] = sums[i];
  }
}

// Else: a dact warp's sums of 64 columns into the first block's room for them.
__device__ __forceinline__ void give_sums(u32 room, int rank, int dact_warp, int lane,
                                          const float (&sums)[SUMS]) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    const int column = column_of(i, lane);
    const u32 to = room + ((rank * DACT_WARPS + dact_warp) * 64 + column) * 4;
    if (column < 0) continue;
    if (CLUSTER > 1) store_float_cta(to, 0, sums[i]); else store_float(to, sums[i]);
  }
}

// The dact warps' sums of two columns, added up in order, into db or its share.
__device__ __forceinline__ void store_db(u32 room, char* db, bool rounded, int column) {
  if (column >= N) return;
  float lo = 0.0f, hi = 0.0f;
#pragma unroll
  for (int i = 0; i < CLUSTER * SHARERS; ++i) {
    const int dact_warp = i / SHARERS * DACT_WARPS + column / 64 * SHARERS + i % SHARERS;
    float of[2];
    load_pair(of, room + (dact_warp * 64 + column % 64) * 4);
    lo += of[0];
    hi += of[1];
  }
  if (rounded)
    *reinterpret_cast<u32*>(db + 2 * column) = pack(lo, hi);
  else
    *reinterpret_cast<float2*>(db + 4 * column) = make_float2(lo, hi);
}
