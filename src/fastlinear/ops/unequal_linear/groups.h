// What the kernels of layers of unequal sizes share: groups, activations.
//
// MODE 0: c = act(a b^T + bias), with the pre-activation where SAVE_PRE; a is x, b is W
// MODE 1: c = d b, d = dy act'(saved); a is dy, b is W: dx
// MODE 2: c = d^T b, d as above, and its sums over tokens; a is dy, b is x: dW and db
//
// What a launch has beside that is compiled in where it is wanted, and costs nothing elsewhere:
// PARTS: MODE 2 divides tokens among `parts` blocks a tile. Where there are several each leaves a share
//        in float32, of dW (rows, cols) and of db, and the launch of MODE 1 behind adds them up in order
// WRITES: MODE 2 writes d where there is room for it, so that MODE 1 can read it as its a
// ODD: rows of some groups begin at less than 16 bytes, in 16-bit dtypes
// EARLY: the launch of MODE 1 begins under the end of that of MODE 2 before it, on sm_90 and later
//
// All matrices are dense; where PITCHED, of x and dy only rows are. A block computes one tile of one
// group; tiles are numbered through all groups, and a launch carries the groups' pointers and sizes
// among its arguments. Words are 4 bytes: two 16-bit numbers or one float32. Sums are float32, in a
// fixed order.
//
// Macros from the host: MODE KIND (0 float16, 1 bfloat16, 2 float32) ACT (a number below) SAVE_PRE
// PITCHED PARTS WRITES ODD EARLY GROUPS (most groups of a launch) TILE_M TILE_N; for 16-bit numbers
// WARPS_M WARPS_N STAGES BLOCKS.

enum { NONE, RELU, RELU2, SILU, GELU, GELU_TANH, SIGMOID, TANH, QUICK_GELU, LEAKY_RELU };

constexpr bool A_TURNED = MODE == 2, B_TURNED = MODE != 0;
constexpr bool DERIVED = MODE != 0 && ACT != NONE, SPLIT = MODE == 2 && PARTS;

#if KIND == 2
typedef float Number;
#else
typedef u16 Number;
#endif

#if PARTS
// Groups whose shares are added up.
struct Shares {
  u64 from[GROUPS], dw[GROUPS], db[GROUPS];  // addresses, 0 for none
  int rows[GROUPS], cols[GROUPS], parts[GROUPS];
  int first[GROUPS];  // block
};
#endif

struct Groups {
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
#if MODE == 1 && PARTS
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

__device__ __forceinline__ float logistic(float v) { return 1.0f / (1.0f + expf(-v)); }

__device__ __forceinline__ float activated(float v) {
  if (ACT == RELU) return v < 0.0f ? 0.0f : v;
  if (ACT == RELU2) return v < 0.0f ? 0.0f : v * v;
  if (ACT == SILU) return v / (1.0f + expf(-v));
  if (ACT == QUICK_GELU) return v / (1.0f + expf(-1.702f * v));
  if (ACT == GELU) return 0.5f * v * erfcf(-0.7071067811865476f * v);
  if (ACT == GELU_TANH) {
    const float twice = v * (1.5957691216057308f + 0.07135481627260025f * v * v);
    return v / (1.0f + expf(-twice));
  }
  if (ACT == SIGMOID) return logistic(v);
  if (ACT == TANH) return tanhf(v);
  if (ACT == LEAKY_RELU) return v < 0.0f ? 0.01f * v : v;
  return v;
}

// dy act'(pre), from the output of relu, leaky_relu, sigmoid and tanh, else the pre-activation.
__device__ __forceinline__ float derived(float dy, float s) {
  if (ACT == RELU) return s <= 0.0f ? 0.0f : dy;
  if (ACT == LEAKY_RELU) return s > 0.0f ? dy : 0.01f * dy;
  if (ACT == RELU2) return s <= 0.0f ? 0.0f : dy * (2.0f * s);
  if (ACT == SIGMOID) return dy * (s * (1.0f - s));
  if (ACT == TANH) return dy * (1.0f - s * s);
  if (ACT == SILU) {
    const float g = logistic(s);
    return dy * (g * (1.0f + s * (1.0f - g)));
  }
  if (ACT == QUICK_GELU) {
    const float g = logistic(1.702f * s);
    return dy * (g * (1.0f + 1.702f * s * (1.0f - g)));
  }
  if (ACT == GELU_TANH) {
    const float u = s * (0.7978845608028654f + 0.035677408136300125f * s * s);
    const float slope = 0.7978845608028654f + 0.10703222440890037f * s * s, t = tanhf(u);
    return dy * (0.5f * (1.0f + t) + 0.5f * s * (1.0f - t * t) * slope);
  }
  if (ACT == GELU) {
    const float density = 0.3989422804014327f * expf(-0.5f * s * s);
    return dy * (0.5f * erfcf(-0.7071067811865476f * s) + s * density);
  }
  return dy;
}
