// What the kernels of layers of unequal sizes need of CUDA, for a CPU: the threads of a block are
// fibers that take turns, copies arrive when they are waited for, and shared memory begins as NaN.
// In place of instructions.h.

#include <math.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define __device__
#define __constant__ const
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __shared__ static
#define SHARED_MEMORY unsigned char* memory = shared_memory

inline u32 __float_as_uint(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(u32 x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
inline u32 __umulhi(u32 a, u32 b) { return static_cast<u64>(a) * b >> 32; }

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  u32 x, y;
};
struct uint4 {
  u32 x, y, z, w;
};

constexpr int BLOCK = 32 * WARPS_M * WARPS_N * WARPS_K;
static_assert(BLOCK <= 256, "fibers there are");
__attribute__((aligned(128))) unsigned char shared_memory[1 << 18];

struct Copy {
  u32 to;
  const void* from;
  int bytes, valid;
};

struct Fiber {
  ucontext_t context;
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> copies;
  bool done;
};

struct Barrier {
  int waiting = 0;
  long turn = 0;
};

struct Index {
  int x;
};

Fiber fibers[256];
ucontext_t home;
int current;
Index blockIdx;
Barrier whole, of_warp[8];
u32 exchange[8][32][6];
double exchanged[8][32];
#define threadIdx (Index{current})

void meet(Barrier& barrier, int count) {
  const long turn = barrier.turn;
  if (++barrier.waiting == count) {
    barrier.waiting = 0;
    ++barrier.turn;
  }
  while (barrier.turn == turn) swapcontext(&fibers[current].context, &home);
}

void let_next_start() {}
void wait_for_previous() {}
void __syncthreads() { meet(whole, BLOCK); }
void meet_warp() { meet(of_warp[current / 32], 32); }

double __shfl_xor_sync(u32, double v, int mask) {
  double(&all)[32] = exchanged[current / 32];
  all[current % 32] = v;
  meet_warp();
  const double found = all[current % 32 ^ mask];
  meet_warp();
  return found;
}

u32 shared_address(const void*) { return 0; }

template <int BYTES = 16>
void copy_async(u32 to, const void* from, int valid) {
  fibers[current].copies.push_back({to, from, BYTES, valid});
}

void commit() {
  fibers[current].groups.push_back(fibers[current].copies);
  fibers[current].copies.clear();
}

template <int PENDING>
void wait() {
  for (auto& groups = fibers[current].groups; groups.size() > PENDING; groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      memset(shared_memory + copy.to, 0, copy.bytes);
      memcpy(shared_memory + copy.to, copy.from, copy.valid);
    }
  }
}

#if KIND != 2
inline float wide(u16 v) {
#if KIND == 1
  const u32 bits = static_cast<u32>(v) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
#else
  _Float16 out;
  memcpy(&out, &v, 2);
  return out;
#endif
}

inline u16 narrow(float v) {
#if KIND == 1
  u32 bits;
  memcpy(&bits, &v, 4);
  return v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#else
  const _Float16 half = v;
  u16 out;
  memcpy(&out, &half, 2);
  return out;
#endif
}

inline u32 pack(float low, float high) {
  return narrow(low) | static_cast<u32>(narrow(high)) << 16;
}

void store_shared(u32 to, u32 v) { memcpy(shared_memory + to, &v, 4); }
void __syncwarp() { meet_warp(); }

u32 from_next_lane(u32 v) {
  auto& all = exchange[current / 32];
  all[current % 32][0] = v;
  meet_warp();
  const u32 found = all[min(current % 32 + 1, 31)][0];
  meet_warp();
  return found;
}

template <bool TURNED>
void load_matrices(u32 (&v)[4], u32 from) {
  auto& all = exchange[current / 32];
  const int lane = current % 32;
  all[lane][0] = from;
  meet_warp();
  for (int m = 0; m < 4; ++m) {
    u16 two[2];
    for (int i = 0; i < 2; ++i) {
      const int row = TURNED ? lane % 4 * 2 + i : lane / 4, col = TURNED ? lane / 4 : lane % 4 * 2 + i;
      memcpy(&two[i], shared_memory + all[8 * m + row][0] + 2 * col, 2);
    }
    v[m] = two[0] | static_cast<u32>(two[1]) << 16;
  }
  meet_warp();
}

void multiply(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
  auto& all = exchange[current / 32];
  const int lane = current % 32;
  memcpy(all[lane], a, 16);
  all[lane][4] = b0;
  all[lane][5] = b1;
  meet_warp();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), col = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const u32 left = all[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
      const u32 right = all[col * 4 + k % 8 / 2][4 + k / 8];
      c[i] += wide(static_cast<u16>(left >> 16 * (k % 2))) *
              wide(static_cast<u16>(right >> 16 * (k % 2)));
    }
  }
  meet_warp();
}
#endif

void run_blocks(int blocks, void (*body)()) {
  constexpr int kStack = 1 << 17;
  const std::unique_ptr<char[]> stacks(new char[BLOCK * kStack]);  // a library stays, these do not
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    memset(shared_memory, 0xff, sizeof(shared_memory));
    for (int i = 0; i < BLOCK; ++i) {
      Fiber& fiber = fibers[i];
      fiber.done = false;
      fiber.groups.clear();
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks.get() + i * kStack;
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = &home;
      makecontext(&fiber.context, body, 0);
    }
    for (int left = BLOCK; left;) {
      for (current = 0; current < BLOCK; ++current) {
        if (fibers[current].done) continue;
        swapcontext(&home, &fibers[current].context);
        left -= fibers[current].done;
      }
    }
  }
}
