// Numbers of float32 as two planes of float16, which tensor cores multiply at full speed.
//
//   x = s (h + l / 2^11)
//
// s is a power of two for each segment: 64 numbers along K of a line, that is of a row, or of a column
// where K is the dimension of rows. It puts their largest near 2^15. Numbers below s / 2^14 have planes of
// their own, with a scale of s / 2^29: a number up to 2^58 times smaller than the largest keeps 22 bits.
// Below that bits are lost: 2^-79 of the largest is the last step. These planes are written for segments
// side by side, 64 of them or 16, where one has such a number, and `small` says where.
//
// Some segments get no planes but zeros, and NO_PLANES in place of s: who multiplies then reads the
// numbers themselves. They hold an infinity or NaN, or numbers so large or small that sums would leave
// float32's range before both operands' s are in, or numbers that lie 2^29 below the largest in the mean,
// of which two levels might not reach many.
//
// A block of 64 segments takes one scale where that keeps all bits: then products need not look at lines'
// scales, and planes by rows are planes by columns.
//
// A matrix may be derived from two or three others, where a pass of its own to write it would cost more.
//
// hopper_words.h, with IS_BF16 0, activations/cuda.h and ragged.h come before this file. Macros from the
// host: DERIVED_NONE to DERIVED_GATE_GRADIENT, as Derivation of planes.py numbers them.

constexpr int SEGMENT = BLOCK_ROWS;  // numbers along K; of planes by columns these are rows
constexpr float NO_PLANES = -1.0f;
constexpr int TOP = 14;                // where the largest number goes: 2^14 to 2^15
constexpr int LEVEL = 29;              // bits between the levels; the mean number may lie so many below
constexpr int HAS_SMALL = 1;           // of 64 lines' segments: there are planes of the second level
constexpr int UNIFORM = 2;             // all 64 have one scale
constexpr int SHARED = 4;              // by columns: and the planes are those by rows
constexpr u32 LEAST = 1u << 13;        // the bits of 2^-136
constexpr u32 MOST = (127 + 90) << 23; // of 2^90

// s of numbers of which the largest has these bits, where they have planes.
__device__ __forceinline__ float scale_of(u32 largest) {
  return __uint_as_float(static_cast<u32>(max(static_cast<int>(largest >> 23) - TOP, 1)) << 23);
}

__device__ __forceinline__ bool in_range(u32 largest) { return largest - LEAST < MOST - LEAST; }

// Whether numbers of which the least, less 1 in its bits, is this have planes of the second level.
__device__ __forceinline__ bool below(u32 least, float s) {
  return least < __float_as_uint(s / (1 << TOP)) - 1;
}

// Which numbers a segment, or a part of it, lies between.
struct Span {
  u32 largest = 0;         // of their bits without the sign: the order of magnitudes
  u32 least = 0xffffffff;  // of those that are not 0, less 1

  __device__ __forceinline__ void add(float x) {
    const u32 bits = __float_as_uint(x) & 0x7fffffffu;
    largest = max(largest, bits);
    least = min(least, bits - 1);
  }

  __device__ __forceinline__ void add(const Span& more) {
    largest = max(largest, more.largest);
    least = min(least, more.least);
  }

  // With that of a lane so many from this one.
  __device__ __forceinline__ void add_across(int apart) {
    const u32 more = __shfl_xor_sync(0xffffffffu, least, apart);
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
    least = min(least, more);
  }

  // Whether s follows from it: then no number has planes of the second level, and the mean is in reach.
  __device__ __forceinline__ bool tells() const {
    return !largest || (in_range(largest) && !below(least, scale_of(largest)));
  }

  __device__ __forceinline__ float scale() const { return largest ? scale_of(largest) : 1.0f; }

  // Whether all are whole on this scale, and products of two such scales far from float32's ends.
  __device__ __forceinline__ bool is_uniform() const {
    constexpr u32 kLeast = (127 - 40) << 23, kMost = (127 + 40) << 23;
    return !largest || (largest - kLeast < kMost - kLeast && !below(least, scale_of(largest)));
  }
};

// What is known of the numbers of a segment, or of some of them, where that does not tell s.
struct Known {
  u32 largest = 0;  // as Span's
  u32 others = 0;   // the sum of exponents as they are stored, and 2^16 for each number that is not 0

  __device__ __forceinline__ void add(float x) {
    const u32 bits = __float_as_uint(x) & 0x7fffffffu;
    largest = max(largest, bits);
    others += (bits >> 23) + (bits ? 1u << 16 : 0u);
  }

  __device__ __forceinline__ void add(const Known& more) {
    largest = max(largest, more.largest);
    others += more.others;
  }

  // With what a lane so many from this one knows.
  __device__ __forceinline__ void add_across(int apart) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
    others += __shfl_xor_sync(0xffffffffu, others, apart);
  }

  // s, or NO_PLANES.
  __device__ __forceinline__ float scale() const {
    const int top = largest >> 23, count = others >> 16, exponents = others & 0xffff;
    const bool narrow = top * count - exponents <= LEVEL * count;
    if (!largest) return 1.0f;
    return narrow && in_range(largest) ? scale_of(largest) : NO_PLANES;
  }
};

// 1 / s
__device__ __forceinline__ float inverse(float s) {
  return __uint_as_float((254u << 23) - __float_as_uint(s));
}

// x / s; of segments without planes 0, and not NaN.
__device__ __forceinline__ float scaled(float x, float s) { return s < 0.0f ? 0.0f : x * inverse(s); }

// Two numbers' planes, a pair in a word each.
__device__ __forceinline__ void split(float x, float y, u32& high, u32& low) {
  high = pack(x, y);
  float a, b;
  unpack(high, a, b);
  low = pack((x - a) * 2048.0f, (y - b) * 2048.0f);
}

// Of a number on its scale, whether it has planes of the second level.
__device__ __forceinline__ bool is_small(float x) { return fabsf(x) < 1.0f / (1 << TOP) && x != 0.0f; }

// Of a number on its scale, for planes of the first level (1) or the second (2); or of all (0).
template <int kLevel>
__device__ __forceinline__ float of_level(float x) {
  if (kLevel == 0) return x;
  if (is_small(x) != (kLevel == 2)) return 0.0f;
  return kLevel == 2 ? x * (1 << LEVEL) : x;
}

// Four numbers' planes of a level.
template <int kLevel>
__device__ __forceinline__ void split(float x, float y, float z, float w, uint2& high, uint2& low) {
  split(of_level<kLevel>(x), of_level<kLevel>(y), high.x, low.x);
  split(of_level<kLevel>(z), of_level<kLevel>(w), high.y, low.y);
}

// A number of a matrix that is derived from others.
//
// DERIVED_NONE: x. DERIVED_GRADIENT: x act'(saved), with what the activation saves.
// DERIVED_GATED: x act(saved). DERIVED_GATE_GRADIENT: x other act'(saved). Of these two `saved` is what
// comes before the activation.
__device__ __forceinline__ float derived(int derivation, float x, float saved, float other) {
  if (ACT == ACT_NONE && derivation == DERIVED_GRADIENT) return x;
  if (derivation == DERIVED_GRADIENT) return graded(x, saved);
  if (derivation == DERIVED_GATED) return x * act(saved);
  if (derivation == DERIVED_GATE_GRADIENT) return graded_before(x * other, saved);
  return x;
}
