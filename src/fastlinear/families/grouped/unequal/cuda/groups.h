// What the kernels of layers of unequal sizes share: groups. activations/cuda.h comes before this file.
//
// MODE 0: c = act(a b^T + bias), with the pre-activation where SAVE_PRE; a is x, b is W
// MODE 1: c = d b, d = dy act'(saved); a is dy, b is W: dx
// MODE 2: c = d^T b, d as above, and its sums over tokens; a is dy, b is x: dW and db
// MODE 3: shares of MODE 0 or of MODE 1 added up, in float32
//
// What a launch has beside that is compiled in where it is wanted, and costs nothing elsewhere:
// PARTS: the depth is divided among `parts` blocks a tile. Where there are several each leaves a share
//        in float32: of c (rows, cols), and of db
// ADDS: shares are added up in order: those of MODE 2 by blocks of the launch of MODE 1 behind it,
//       others by a launch of MODE 3
// WRITES: MODE 2 writes d where there is room for it, so that MODE 1 can read it as its a
// ODD: rows of some groups begin at less than 16 bytes, in 16-bit dtypes
// EARLY: the launch of MODE 1 begins under the end of that of MODE 2 before it, and a launch of MODE 3
//        under the end of the one before, on sm_90 and later
//
// All matrices are dense; where PITCHED, of x and dy only rows are. A block computes one tile of one
// group; tiles are numbered through all groups, and a launch carries the groups' pointers and sizes
// among its arguments. Words are 4 bytes: two 16-bit numbers or one float32. Sums are float32, in a
// fixed order.
//
// Macros from the host: MODE KIND (0 float16, 1 bfloat16, 2 float32) ACT ACT_<NAME> SAVE_PRE
// PITCHED PARTS ADDS WRITES ODD EARLY GROUPS (most groups of a launch) TILE_M TILE_N WARPS_M WARPS_N
// STAGES BLOCKS; for float32 WARPS_K WORDS.

constexpr bool A_TURNED = MODE == 2, B_TURNED = MODE != 0;
constexpr bool DERIVED = MODE != 0 && ACT != ACT_NONE;

#if KIND == 2
typedef float Number;
#else
typedef u16 Number;
#endif

#if ADDS
// Groups whose shares are added up.
struct Shares {
  u64 from[GROUPS], c[GROUPS], more[GROUPS];  // addresses, 0 for none; more: db or the pre-activation
#if MODE == 3
  u64 bias[GROUPS];
#endif
  int rows[GROUPS], cols[GROUPS], parts[GROUPS];
  int first[GROUPS];  // block
};
#endif

struct Groups {
#if MODE != 3
  u64 a[GROUPS], saved[GROUPS], b[GROUPS], bias[GROUPS];  // addresses, 0 for none; bias: or of d
  u64 c[GROUPS], more[GROUPS];  // results, or shares of parts; the pre-activation, or db
  int rows[GROUPS], cols[GROUPS], depth[GROUPS];
  int first[GROUPS];  // tile
#if PARTS
  int parts[GROUPS];  // of the depth
#endif
#if PITCHED
  int a_pitch[GROUPS], b_pitch[GROUPS];  // numbers from a row to the next
#endif
#endif
#if ADDS
  Shares shares;
  int shared, tiles;  // how many of them, and how many blocks there are in front of theirs
#endif
};

#if PITCHED
#define PITCH_OF(which, width) groups.which##_pitch[g]
#else
#define PITCH_OF(which, width) (width)
#endif

#if PARTS
#define PARTS_OF groups.parts[g]
#else
#define PARTS_OF 1
#endif

// The last group whose first tile is not past this block's.
template <class Table>
__device__ __forceinline__ int group_of(const Table& groups, int count, int block) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (groups.first[middle] <= block)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__device__ __forceinline__ const Number* at(u64 address) {
  return reinterpret_cast<const Number*>(address);
}

__device__ __forceinline__ Number* to(u64 address) { return reinterpret_cast<Number*>(address); }

// Numbers of a share: of dW, and of db behind it, each in whole 16 bytes.
__device__ __forceinline__ u64 share_of_dw(int rows, int cols) {
  return (static_cast<u64>(rows) * cols + 3) / 4 * 4;
}

__device__ __forceinline__ u64 share_of(int rows, int cols) {
  return share_of_dw(rows, cols) + (rows + 3) / 4 * 4;
}
