// What hopper_words.h and hopper_async.h are to a kernel for Hopper, for a CPU: the threads of a block
// are fibers that take turns; TMA, barriers and wgmma do at once what they are asked. Shared memory
// begins as NaN. What waits for nothing it needs computes with what is not there yet.
//
// Macro from the host: IS_BF16. A TensorMap is an Extent here.

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
constexpr int BK = 64;

#define __device__
#define __constant__ const
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __align__(bytes)
#define __launch_bounds__(...)
#define __shared__

inline u32 __float_as_uint(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(u32 x) {
  float out;
  memcpy(&out, &x, 4);
  return out;
}
inline u32 __brev(u32 x) {
  u32 out = 0;
  for (int i = 0; i < 32; ++i) out |= (x >> i & 1) << (31 - i);
  return out;
}
inline u32 add_here(u32 a, u32 b) { return a + b; }
inline u32 xor_here(u32 a, u32 b) { return a ^ b; }
inline u32 __umulhi(u32 a, u32 b) { return static_cast<u64>(a) * b >> 32; }

struct alignas(8) uint2 {
  u32 x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct Index {
  int x;
};
struct Place {
  int x, y;
};

// ---------------------------------------------------------------- threads

struct Fiber {
  ucontext_t context;
  bool done;
};

struct Meeting {
  int waiting = 0;
  long turn = 0;
};

struct Mbarrier {
  int count = 0, pending = 0, bytes = 0, phase = 0;
};

struct Block {
  alignas(1024) unsigned char memory[1 << 18];
  std::map<u32, Mbarrier> barriers;
  Meeting named[16], warps[32], warpgroups[8];
  u32 exchange[32][32];
  long version = 0;  // of shared memory
};

Block block;
constexpr int MOST_THREADS = 1024;
Fiber fibers[MOST_THREADS];
int threads_of_block;
ucontext_t home;
int current;
Place blockIdx;
long long idle;
Index gridDim;
char smem[1];

#define threadIdx (Index{current})

inline void yield() {
  if (++idle > 400000000LL) {
    fprintf(stderr, "all threads wait\n");
    abort();
  }
  swapcontext(&fibers[current].context, &home);
}

inline void arrive(Meeting& meeting, int count) {
  if (++meeting.waiting == count) {
    meeting.waiting = 0;
    ++meeting.turn;
  }
}

inline void meet(Meeting& meeting, int count) {
  const long turn = meeting.turn;
  arrive(meeting, count);
  while (meeting.turn == turn) yield();
}

inline void bar_sync(int id, int threads) { meet(block.named[id], threads); }
inline void bar_arrive(int id, int threads) { arrive(block.named[id], threads); }
inline void __syncthreads() { bar_sync(0, threads_of_block); }
inline int __syncthreads_or(int v) {
  static int found;
  if (v) found = 1;
  __syncthreads();
  const int all = found;
  __syncthreads();
  found = 0;
  __syncthreads();
  return all;
}
inline void __syncwarp() { meet(block.warps[current / 32], 32); }
inline u32 lane_id() { return current % 32; }
inline void let_next_start() {}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> bits);
}
inline void wait_for_previous() {}

inline int __shfl_sync(u32, int v, int lane) {
  u32* const all = block.exchange[current / 32];
  all[current % 32] = v;
  __syncwarp();
  const int found = all[lane];
  __syncwarp();
  return found;
}

inline u32 __shfl_xor_sync(u32, u32 v, int apart) {
  return __shfl_sync(0, static_cast<int>(v), current % 32 ^ apart);
}

inline float __shfl_xor_sync(u32, float v, int apart) {
  return __uint_as_float(__shfl_xor_sync(0, __float_as_uint(v), apart));
}

inline bool __any_sync(u32, bool v) {
  u32 found = v;
  for (int apart = 1; apart < 32; apart *= 2) found |= __shfl_xor_sync(0, found, apart);
  return found;
}

template <int>
inline void fewer_registers() {}
template <int>
inline void more_registers() {}

// ---------------------------------------------------------------- numbers

inline float wide(unsigned short v) {
#if IS_BF16
  return __uint_as_float(static_cast<u32>(v) << 16);
#else
  _Float16 out;
  memcpy(&out, &v, 2);
  return out;
#endif
}

inline unsigned short narrow(float v) {
#if IS_BF16
  const u32 bits = __float_as_uint(v);
  return v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#else
  const _Float16 half = v;
  unsigned short out;
  memcpy(&out, &half, 2);
  return out;
#endif
}

inline u32 pack(float lo, float hi) { return narrow(lo) | static_cast<u32>(narrow(hi)) << 16; }

inline void unpack(u32 in, float& lo, float& hi) {
  lo = wide(static_cast<unsigned short>(in));
  hi = wide(static_cast<unsigned short>(in >> 16));
}

// ---------------------------------------------------------------- shared memory

inline u32 smem_addr(const void*) { return 0; }
inline u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }

template <class T>
inline T load(u32 at) {
  T v;
  memcpy(&v, block.memory + at, sizeof(T));
  return v;
}
inline unsigned short load_shared16(u32 at) { return load<unsigned short>(at); }
inline u32 load_shared32(u32 at) { return load<u32>(at); }
inline float2 load_shared64(u32 at) { return load<float2>(at); }
inline uint4 load_shared128(u32 at) { return load<uint4>(at); }
inline void load_shared128(u32 at, float& a, float& b, float& c, float& d) {
  const float4 v = load<float4>(at);
  a = v.x, b = v.y, c = v.z, d = v.w;
}
inline void store_shared128(u32 at, float a, float b, float c, float d) {
  const float4 v = {a, b, c, d};
  ++block.version, memcpy(block.memory + at, &v, 16);
}
inline void store_shared16(u32 at, unsigned short v) { ++block.version, memcpy(block.memory + at, &v, 2); }
inline void store_shared32(u32 at, u32 v) { ++block.version, memcpy(block.memory + at, &v, 4); }
inline void store_shared64(u32 at, uint2 v) { ++block.version, memcpy(block.memory + at, &v, 8); }
inline void store_shared128(u32 at, uint4 v) { ++block.version, memcpy(block.memory + at, &v, 16); }

inline void stmatrix(u32 at, u32 a, u32 b, u32 c, u32 d) {
  u32* const all = block.exchange[current / 32];
  const int lane = current % 32;
  const u32 words[4] = {a, b, c, d};
  ++block.version;
  all[lane] = at;
  __syncwarp();
  for (int m = 0; m < 4; ++m)
    memcpy(block.memory + all[8 * m + lane / 4] + lane % 4 * 4, &words[m], 4);
  __syncwarp();
}

// ---------------------------------------------------------------- barriers and TMA

inline void settle(Mbarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.count;
}

inline void mbar_init(u32 bar, u32 count) {
  block.barriers[bar] = {static_cast<int>(count), static_cast<int>(count), 0, 0};
}

inline void mbar_expect(u32 bar, u32 bytes) {
  Mbarrier& barrier = block.barriers.at(bar);
  barrier.bytes += bytes;
  --barrier.pending;
  settle(barrier);
}

inline void mbar_arrive(u32 bar) {
  Mbarrier& barrier = block.barriers.at(bar);
  --barrier.pending;
  settle(barrier);
  yield();  // who waited for it may be faster
}

inline void mbar_wait(u32 bar, u32 parity) {
  while (block.barriers.at(bar).phase == static_cast<int>(parity)) yield();
}

inline void mbar_arrive_cta(u32 bar, u32) { mbar_arrive(bar); }  // clusters have one block here
inline u32 cluster_rank() { return 0; }
inline void cluster_sync() {}

inline void fence_barriers() {}
inline void fence_async_global() {}
inline void __threadfence() {}
inline int load_acquire(const int* at) { return *at; }
inline float load_strong(const float* at) { return *at; }
inline void wait_a_little() { yield(); }
inline void add_release(int* at, int v) { *at += v; }
inline int atomicAdd(int* at, int v) {
  const int before = *at;
  *at += v;
  return before;
}
inline void fence_async() {}

struct Extent {
  const char* from;
  long long row_stride, plane_stride;
  int rows, columns, planes, box_rows, bytes;  // of a number

  char* at(int x, int y, int z) const {
    const bool exists = x >= 0 && y >= 0 && z >= 0 && x < columns && y < rows && z < planes;
    return exists ? const_cast<char*>(from) + (z * plane_stride + y * row_stride + x) * bytes : nullptr;
  }
};

struct alignas(64) TensorMap {
  char bytes[128];
};

inline void prefetch_map(const TensorMap*) {}

inline void tma_load_stack(u32 dst, const TensorMap* map, u32 bar, int x, int y, int z) {
  ++block.version;
  Extent extent;
  memcpy(&extent, map->bytes, sizeof(extent));
  const int bytes = extent.bytes;
  for (int r = 0; r < extent.box_rows; ++r) {
    for (int c = 0; c < 128 / bytes; ++c) {
      u32 v = 0;
      if (const char* const from = extent.at(x + c, y + r, z)) memcpy(&v, from, bytes);
      memcpy(block.memory + swizzled(dst + r * 128 + c * bytes), &v, bytes);
    }
  }
  Mbarrier& barrier = block.barriers.at(bar);
  barrier.bytes -= extent.box_rows * 128;
  settle(barrier);
}

template <int kPeers>
inline void tma_load(u32 dst, const TensorMap* map, u32 bar, int x, int y) {
  tma_load_stack(dst, map, bar, x, y, 0);
}

// A store reads shared memory as late as it may: when its thread waits for that.
struct Store {
  const TensorMap* map;  // null: none
  u32 src;
  int x, y, z;
};
static std::vector<Store> stores_of[MOST_THREADS];

inline void tma_store_some(size_t left) {
  std::vector<Store>& stores = stores_of[current];
  while (stores.size() > left) {
    const Store s = stores.front();
    stores.erase(stores.begin());
    if (!s.map) continue;
    Extent extent;
    memcpy(&extent, s.map->bytes, sizeof(extent));
    const int bytes = extent.bytes;
    for (int r = 0; r < extent.box_rows; ++r)
      for (int c = 0; c < 128 / bytes; ++c)
        if (char* const to = extent.at(s.x + c, s.y + r, s.z))
          memcpy(to, block.memory + swizzled(s.src + r * 128 + c * bytes), bytes);
  }
}

inline void tma_store_stack(const TensorMap* map, u32 src, int x, int y, int z) {
  stores_of[current].push_back({map, src, x, y, z});
}
template <bool kStream>
inline void tma_store(const TensorMap* map, u32 src, int x, int y) {
  tma_store_stack(map, src, x, y, 0);
}
inline void tma_store_none() { tma_store_stack(nullptr, 0, 0, 0, 0); }
template <int kLeft>
inline void tma_store_wait_read() {
  tma_store_some(kLeft);
}
inline void tma_store_wait_all() { tma_store_some(0); }

inline void bulk_load(u32 dst, const void* from, u32 bar, u32 bytes) {
  if ((dst | reinterpret_cast<u64>(from) | bytes) % 16 || !bytes) {
    fprintf(stderr, "%u bytes from %p to %u\n", bytes, from, dst);
    abort();
  }
  ++block.version;
  memcpy(block.memory + dst, from, bytes);
  Mbarrier& barrier = block.barriers.at(bar);
  barrier.bytes -= bytes;
  settle(barrier);
}

// ---------------------------------------------------------------- wgmma

template <bool kMn>
inline u64 make_desc(u32 at) {
  return static_cast<u64>(at >> 4) | (kMn ? 1ull << 62 : 0);
}

inline void wgmma_fence() {}
inline void wgmma_commit() {}
// A product is the whole warpgroup's: it is done once all have read their operands.
template <int>
inline void wgmma_wait() {
  meet(block.warpgroups[current / 128], 128);
}

// Number k (of 16) of row r of an operand.
inline float operand(u64 desc, int r, int k) {
  const u32 at = static_cast<u32>(desc & 0x3fff) << 4;
  if (desc >> 62) return wide(load<unsigned short>(swizzled(at + r / 64 * 8192 + k * 128 + r % 64 * 2)));
  return wide(load<unsigned short>(swizzled(at + r * 128 + k * 2)));
}

// What wgmma read of B, decoded: all threads of a warpgroup read the same.
struct Decoded {
  u64 desc = 0;
  long version = -1;
  int count = 0;
  float values[256][16];
};
static Decoded every_decoded[64];

// Towards zero, as tensor cores add.
inline float truncated(double x) {
  const float near = static_cast<float>(x);
  return fabs(static_cast<double>(near)) > fabs(x) ? nextafterf(near, 0.0f) : near;
}

template <int kCount>
inline void wgmma(float (&acc)[kCount], u64 a, u64 b) {
  const int lane = current % 32, warp = current / 32 % 4;
  Decoded& decoded = every_decoded[(b ^ b >> 6 ^ b >> 12) % 64];
  if (decoded.desc != b || decoded.version != block.version || decoded.count < 2 * kCount) {
    decoded.desc = b, decoded.version = block.version, decoded.count = 2 * kCount;
    for (int n = 0; n < 2 * kCount; ++n)
      for (int k = 0; k < 16; ++k) decoded.values[n][k] = operand(b, n, k);
  }
  for (int h = 0; h < 2; ++h) {
    float row[16];
    for (int k = 0; k < 16; ++k) row[k] = operand(a, warp * 16 + lane / 4 + 8 * h, k);
    for (int j = 0; j < kCount / 4; ++j) {
      for (int e = 0; e < 2; ++e) {
        const float* const column = decoded.values[8 * j + lane % 4 * 2 + e];
        float& sum = acc[4 * j + 2 * h + e];
        double exact = sum;
        for (int k = 0; k < 16; ++k) exact += static_cast<double>(row[k]) * column[k];
        sum = truncated(exact);
      }
    }
  }
}

template <int kCount>
inline void wgmma_first(float (&acc)[kCount], u64 a, u64 b) {
  for (float& sum : acc) sum = 0;
  wgmma(acc, a, b);
}

template <int kCount>
inline void settle(float (&)[kCount]) {}

// ---------------------------------------------------------------- launches

static void run_grid(int columns, int rows, int threads, void (*body)()) {
  constexpr int kStack = 1 << 16;
  const std::unique_ptr<char[]> stacks(new char[threads * kStack]);  // a library stays, these do not
  threads_of_block = threads;
  gridDim.x = columns;
  for (int i = 0; i < columns * rows; ++i) {
    blockIdx = {i % columns, i / columns};
    idle = 0;
    memset(block.memory, 0xff, sizeof(block.memory));
    ++block.version;
    block.barriers.clear();
    for (Meeting& m : block.named) m = Meeting();
    for (Meeting& m : block.warps) m = Meeting();
    for (Meeting& m : block.warpgroups) m = Meeting();
    for (int thread = 0; thread < threads; ++thread) {
      Fiber& fiber = fibers[thread];
      fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks.get() + thread * kStack;
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = &home;
      makecontext(&fiber.context, body, 0);
    }
    for (int left = threads; left;) {
      for (current = 0; current < threads; ++current) {
        if (fibers[current].done) continue;
        swapcontext(&home, &fibers[current].context);
        left -= fibers[current].done;
      }
    }
    for (const std::vector<Store>& stores : stores_of) {
      if (stores.empty()) continue;
      fprintf(stderr, "a block ended before its stores\n");
      abort();
    }
  }
}
