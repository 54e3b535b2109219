// Tiles of strips in shared memory, which block takes which, and products with weights in registers.
//
// Rows of a group need not begin at 16 bytes in shared memory. Matrices are read from a window that
// begins up to SHIFT words early. A word is 4 bytes: two 16-bit numbers. Macros: SIZE, bytes of a
// number; P, groups of a strip; SHARED, whether these are not groups but tokens of one group, P one
// behind the other, to which rows then belong; NARROW, whether boxes may be of 64 bytes.

constexpr int ROWS = 32;

// The fewest boxes of at most 256 columns into which so many columns are cut, at 16 bytes each.
__device__ constexpr int boxes_of(int columns) {
  int boxes = 1;
  while (columns / boxes > 256 || columns % (16 / SIZE * boxes)) ++boxes;
  return boxes;
}

// The smallest power of two that is no less.
__device__ constexpr int smallest_power(int least) {
  int power = 1;
  while (power < least) power *= 2;
  return power;
}

// A tile of a tensor of so many features a group, as it lies in shared memory: rows one behind the
// other, or boxes of 128 or 64 bytes a row, swizzled, where a strip's row is a multiple of that. Rows
// of an odd multiple of 64 bytes would else have every other one in the same banks.
template <int FEATURES>
struct Tile {
  static constexpr int ROW = P * FEATURES * SIZE, WORDS = FEATURES * SIZE / 4;
  static constexpr int BYTES = ROWS * ROW, ROOM = (BYTES + 1023) / 1024 * 1024;
  static constexpr bool ALIGNED = P == 1 || WORDS % 4 == 0;  // groups begin at 16 bytes
  static constexpr int SWIZZLE = !ALIGNED ? 0 : ROW % 128 == 0 ? 128 : NARROW && ROW % 64 == 0 ? 64 : 0;
  static constexpr bool SWIZZLED = SWIZZLE > 0;
  static constexpr int BOXES = SWIZZLED ? ROW / SWIZZLE : boxes_of(P * FEATURES);
  static constexpr int BOX_COLUMNS = P * FEATURES / BOXES, BOX_BYTES = BYTES / BOXES;
  static constexpr int PITCH = SIZE * BOX_COLUMNS;  // bytes between rows
  static constexpr bool TOGETHER = SHARED && !SWIZZLED && BOXES == 1;  // in memory, too
  // Words by which a group's window begins early, at most; words of a window; steps of 8 words to
  // multiply by, the last maybe of 4.
  static constexpr int SHIFT = ALIGNED ? 0 : WORDS % 2 ? 3 : 2;
  static constexpr int WINDOW = WORDS + SHIFT;
  static constexpr int STEPS = (WINDOW + 7) / 8;
  static constexpr bool HALF = WINDOW % 8 && WINDOW % 8 <= 4;

  static __device__ __forceinline__ u32 at(int row, int byte) {
    if (SWIZZLE == 128) return (byte >> 7) * BOX_BYTES + row * 128 + ((byte & 127) ^ ((row & 7) << 4));
    if (SWIZZLE == 64) return (byte >> 6) * BOX_BYTES + row * 64 + ((byte & 63) ^ ((row & 6) << 3));
    if (BOXES == 1) return row * ROW + byte;
    const int box = min(byte / PITCH, BOXES - 1);  // a window may end behind the last
    return box * BOX_BYTES + row * PITCH + byte - box * PITCH;
  }
  static __device__ __forceinline__ int shift(int p) { return p * WORDS & 3; }
  static __device__ __forceinline__ int window(int p) { return p * (FEATURES * SIZE) & ~15; }
};

// One of a kernel's tensors: its map and, where its tiles lie together, its address. A strip has so
// many rows.
template <class T>
struct Moved {
  const TensorMap* map;
  char* begin;
  int rows;

  __device__ __forceinline__ bool whole(int row) const { return T::TOGETHER && row + ROWS <= rows; }
  __device__ __forceinline__ char* at(int strip, int row) const {
    return begin + (static_cast<long long>(strip) * rows + row) * T::ROW;
  }
  __device__ __forceinline__ void load(u32 to, u32 bar, int strip, int row) const {
    if (whole(row))
      load_bytes(to, at(strip, row), bar, T::BYTES);
    else
      load_tile<T>(to, map, bar, strip, row);
  }
  __device__ __forceinline__ void store(u32 from, int strip, int row) const {
    if (whole(row))
      store_bytes(at(strip, row), from, T::BYTES);
    else
      store_tile<T>(map, from, strip, row);
  }
};

// Block b takes tiles begin(b) to begin(b + 1) of strips * tiles in all, those of a strip together.
struct Work {
  int tiles, each, more;  // of a strip; of a block; blocks that take one more

  __device__ __forceinline__ int begin(int block) const { return block * each + min(block, more); }
  __device__ __forceinline__ int block_of(int tile) const {
    const int full = more * (each + 1);
    return tile < full ? tile / (each + 1) : more + (tile - full) / each;
  }
  __device__ __forceinline__ int first(int strip) const { return block_of(strip * tiles); }
  __device__ __forceinline__ int last(int strip) const { return block_of((strip + 1) * tiles - 1); }

  // Which tokens the block's step-th tile is: those of a strip's blocks in turn, so that all blocks
  // are at about the same tokens at a time, and lines that two strips share are read once. All lanes.
  __device__ __forceinline__ int tokens(int block, int step, int strip, int lane) const {
    int before = 0;
    const int end = last(strip);
    for (int b = first(strip) + lane; b <= end; b += 32) {
      const int from = begin(b), start = max(strip * tiles - from, 0);
      const int stop = min((strip + 1) * tiles, begin(b + 1)) - from;
      before += min(max(step + (b < block ? 1 : 0) - start, 0), stop - start);
    }
    return __reduce_add_sync(0xffffffffu, before);
  }
};

// Work's strip and tokens of one step after another, with the divisions made once a strip. All lanes.
struct Walk {
  Work work;
  int block, lane, strip, next;  // next: the step at which another strip begins
  int start, most;               // of the lane's block: when it begins with the strip, its tiles
  bool few;                      // blocks of the strip, a lane each

  __device__ __forceinline__ void enter(int s) {
    const int begin = s * work.tiles, end = begin + work.tiles, last = work.last(s);
    const int first = work.first(s), b = first + lane, from = work.begin(b);
    strip = s;
    next = end - work.begin(block);
    start = max(begin - from, 0) - (b < block ? 1 : 0);
    most = b <= last ? min(end, work.begin(b + 1)) - max(begin, from) : 0;
    few = last - first < 32;
  }
  __device__ __forceinline__ int tokens(int step) {
    if (step == next) enter(strip + 1);
    if (!few) return work.tokens(block, step, strip, lane);
    return __reduce_add_sync(0xffffffffu, min(max(step - start, 0), most));
  }
};

// TILES of 8 columns for 16 tokens, added to acc: a group's window of a Tile T times its weights.
template <class T, int TILES, int NT>
__device__ __forceinline__ void multiply_windows(float (&acc)[NT][4], const u32 (&w)[NT][T::STEPS][2],
                                                 u32 tile, int block, int p, int lane) {
  const int row = 16 * block + lane % 16, shift = T::shift(p);
  const int byte = T::window(p) + lane / 16 * 16;
#pragma unroll
  for (int s = 0; s < T::STEPS; ++s) {
    constexpr int LAST = T::STEPS - 1;
    u32 a[4] = {0u, 0u, 0u, 0u};
    if (T::HALF && s == LAST)
      load_two<false>(a[0], a[1], tile + T::at(row, T::window(p) + 32 * s));
    else
      load_four<false>(a, tile + T::at(row, byte + 32 * s));
    if (8 * s < T::SHIFT || 8 * s + 8 > T::WORDS) {  // a neighbour's numbers may be among them
      const u32 word = 8 * s + lane % 4 - shift;
      if (word >= T::WORDS) a[0] = a[1] = 0u;
      if (word + 4 >= T::WORDS) a[2] = a[3] = 0u;
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      if (T::HALF && s == LAST)
        multiply<true>(acc[j], a, w[j][s][0], 0u);
      else
        multiply<false>(acc[j], a, w[j][s][0], w[j][s][1]);
    }
  }
}
