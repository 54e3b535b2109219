// The whole backward of a chain in one launch for Hopper (sm_90a): tiles of all its products are tasks,
// which blocks take in their order as soon as they are free.
//
// Step s has dpre g (M, n) of a layer, its weight W (n, k) and its input h (M, k), the last layer first:
//   down:    g of the layer below = g W, times the derivative of its activation; of the first layer dx
//   weights: dW (n, k) = gᵀ h,  db (n) = gᵀ ones, over a slice of the rows
// Before them, where the last activation has a derivative or TMA does not read dy: g of the last layer.
//
// A task waits for those that write what it reads: rows of g, and of h where that is recomputed on the
// way down. These come earlier in the order, and whoever took one goes on with it: nobody waits for
// ever, however many blocks run at once. Who writes rows counts them up when they are in memory.
// Sums of several slices are float32; the slice that is done last adds all up in their order:
// results are deterministic.
//
// A block is a producer warpgroup and CONSUMERS others, of 64 rows of a tile each; a tile has BN columns.
//
// hopper_words.h, activations/cuda.h and hopper_async.h come before this file. Macros from the host:
// IS_BF16 CONSUMERS STAGES BN MAX_LAYERS ACT FINAL RECOMPUTE (whether what is kept is what activations
// read), and the functions down, down_first, weights, weights_first for accumulators of BN / 2, and
// weights, weights_first for 4 (ones).

constexpr int BLOCK_BYTES = 64 * 128;  // 64 rows of 64 numbers, swizzled
constexpr int COLUMNS = BN / 64;
constexpr int STAGE_BYTES = (CONSUMERS + COLUMNS) * BLOCK_BYTES;
constexpr int BM = 64 * CONSUMERS;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int AHEAD = 2;               // tasks taken and not done
constexpr int SUMS = BN / 2 + 4;       // of a thread, db's included
constexpr int ONES_OFFSET = STAGES * STAGE_BYTES;
constexpr int BAR_OFFSET = ONES_OFFSET + 1024;
constexpr int TASK_BAR_OFFSET = BAR_OFFSET + 2 * STAGES * 8;
constexpr int TASK_OFFSET = TASK_BAR_OFFSET + 2 * AHEAD * 8;
constexpr int LAST_OFFSET = TASK_OFFSET + AHEAD * 4;  // of each consumer: whether its slice was the last

struct Params {
  TensorMap g[MAX_LAYERS], w[MAX_LAYERS], h[MAX_LAYERS];  // in boxes of 64 x 64
  const unsigned short *dy, *dy_saved;     // (M, n of the last layer)
  unsigned short* graded;                  // g of the last layer, or null where it is dy
  unsigned short* out[MAX_LAYERS];         // (M, k): g of the layer below, or dx; null: unwanted
  unsigned short* aside[MAX_LAYERS];       // (M, k): what the layer below gave, or null
  const unsigned short* saved[MAX_LAYERS]; // (M, k) that its derivative reads, or null
  unsigned short *dw[MAX_LAYERS], *db[MAX_LAYERS];  // dense, or null
  float* parts;                            // of tiles with several slices, SUMS of 128 threads each
  long long parts_at[MAX_LAYERS];
  int* counters;                           // 0: of tasks; then rows of each g; then slices of each tile
  long long dy_stride;
  int rows, steps, tasks;
  int n[MAX_LAYERS], k[MAX_LAYERS];
  int columns[MAX_LAYERS];                 // of dW: k, or 1 where only db is wanted
  int pitch[MAX_LAYERS + 1];               // of graded, then of each out and aside
  int begin[2 * MAX_LAYERS + 1];           // first task: of each step down, then weights, and the end
  int slices[MAX_LAYERS], slice_rows[MAX_LAYERS];  // rows: a multiple of BM
  int first_sum[MAX_LAYERS];               // number of its first tile among all that are summed up
  int graded_columns;                      // of a task that grades: a multiple of 64
};

__device__ __forceinline__ int blocks_of(int n) { return (n + 63) / 64; }
__device__ __forceinline__ int over(int n, int each) { return (n + each - 1) / each; }

// ---------------------------------------------------------------- tasks

enum Kind { GRADE, DOWN, WEIGHTS };

struct Task {
  int kind, s;
  int row, column;   // where its tile begins
  int slice, tile;   // WEIGHTS
  int first_row, steps;  // of the reduction: where, and how many times 64

  __device__ __forceinline__ Task(const Params& p, int t) : s(0), column(0), slice(0), tile(0), first_row(0) {
    if (t < p.begin[0]) {
      const int across = over(p.n[0], p.graded_columns);
      kind = GRADE;
      row = t / across * BM;
      column = t % across * p.graded_columns;
      steps = 0;
      return;
    }
    int group = 0;
    while (t >= p.begin[group + 1]) ++group;
    t -= p.begin[group];
    s = group >> 1;
    const int columns = over(group & 1 ? p.columns[s] : p.k[s], BN);
    if ((group & 1) == 0) {
      kind = DOWN;
      row = t / columns * BM;
      column = t % columns * BN;
      steps = blocks_of(p.n[s]);
    } else {
      kind = WEIGHTS;
      const int tiles = over(p.n[s], BM) * columns;
      slice = t / tiles;
      tile = t % tiles;
      row = tile / columns * BM;
      column = tile % columns * BN;
      first_row = slice * p.slice_rows[s];
      steps = blocks_of(min(p.slice_rows[s], p.rows - first_row));
    }
  }
};

// Rows of g of step s that are in memory, one block of BM rows.
__device__ __forceinline__ int* rows_done(const Params& p, int s, int block) {
  return p.counters + 1 + s * over(p.rows, BM) + block;
}

__device__ __forceinline__ int* slices_done(const Params& p, int sum) {
  return p.counters + 1 + (p.steps + 1) * over(p.rows, BM) + sum;
}

// Waits until the rows of g of step s, and what lies aside with them, are there.
__device__ __forceinline__ void wait_rows(const Params& p, int s, int block) {
  const int graded = p.graded == nullptr ? 0 : over(p.n[0], p.graded_columns);
  const int count = (s == 0 ? graded : over(p.k[s - 1], BN)) * CONSUMERS;
  const int* const at = rows_done(p, s, block);
  while (load_acquire(at) < count) wait_a_little();
}

__device__ __forceinline__ void wait_inputs(const Params& p, const Task& t) {
  if (t.kind == DOWN) {
    wait_rows(p, t.s, t.row / BM);
  } else {
    const int begin = t.first_row / BM, end = over(min(t.first_row + t.steps * 64, p.rows), BM);
    for (int block = begin; block < end; ++block) {
      wait_rows(p, t.s, block);
      if (p.aside[t.s] != nullptr) wait_rows(p, t.s + 1, block);
    }
  }
  fence_async_global();  // others stored it, TMA reads it
}

// ---------------------------------------------------------------- the producer

__device__ __forceinline__ void load(const Params& p, const Task& t, u32 to, u32 bar, int kt) {
  const TensorMap *const g = &p.g[t.s], *const other = t.kind == DOWN ? &p.w[t.s] : &p.h[t.s];
  const int at = t.first_row + kt * 64;
#pragma unroll
  for (int c = 0; c < CONSUMERS; ++c) {
    const int row = t.row + c * 64;
    tma_load<1>(to + c * BLOCK_BYTES, g, bar, t.kind == DOWN ? at : row, t.kind == DOWN ? row : at);
  }
#pragma unroll
  for (int b = 0; b < COLUMNS; ++b)
    tma_load<1>(to + (CONSUMERS + b) * BLOCK_BYTES, other, bar, t.column + b * 64, at);
}

__device__ __forceinline__ void produce(const Params& p, u32 base) {
  int stage = 0, slot = 0;
  u32 phase = 1, slot_phase = 1;  // a fresh barrier counts as "previous phase done"
  for (;;) {
    const u32 taken = base + TASK_BAR_OFFSET + slot * 8;
    mbar_wait(taken + AHEAD * 8, slot_phase);
    const int number = atomicAdd(p.counters, 1);
    store_shared32(base + TASK_OFFSET + slot * 4, number);
    mbar_arrive(taken);
    if (++slot == AHEAD) { slot = 0; slot_phase ^= 1; }
    if (number >= p.tasks) return;
    const Task t(p, number);
    if (t.kind == GRADE) continue;
    wait_inputs(p, t);
    for (int kt = 0; kt < t.steps; ++kt) {
      const u32 full = base + BAR_OFFSET + stage * 8;
      mbar_wait(full + STAGES * 8, phase);
      mbar_expect(full, STAGE_BYTES);
      load(p, t, base + stage * STAGE_BYTES, full, kt);
      if (++stage == STAGES) { stage = 0; phase ^= 1; }
    }
  }
}

// ---------------------------------------------------------------- consumers

struct Consumer {
  const Params& p;
  u32 base;
  int consumer, thread;
  int stage;
  u32 phase;

  // All threads' stores are in memory: who waits for them may know.
  __device__ __forceinline__ void publish(int* counter) const {
    __threadfence();
    bar_sync(1 + consumer, 128);
    if (thread == 0) add_release(counter, 1);
  }

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }

  __device__ __forceinline__ void release(int which) const {
    if (lane_id() == 0) mbar_arrive(base + BAR_OFFSET + (STAGES + which) * 8);
  }

  template <bool kDown, bool kFirst>
  __device__ __forceinline__ void products(float (&acc)[BN / 2], float (&sums)[4]) const {
    const u32 at = base + stage * STAGE_BYTES;
    const u64 a = make_desc<!kDown>(at + consumer * BLOCK_BYTES);
    const u64 b = make_desc<true>(at + CONSUMERS * BLOCK_BYTES), ones = make_desc<false>(base + ONES_OFFSET);
    constexpr u64 kStepA = (kDown ? 32 : 16 * 128) >> 4, kStepB = (16 * 128) >> 4;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kDown) {
        if (kFirst && k == 0) down_first(acc, a, b);
        else down(acc, a + k * kStepA, b + k * kStepB);
      } else {
        if (kFirst && k == 0) {
          weights_first(acc, a, b);
          weights_first(sums, a, ones);
        } else {
          weights(acc, a + k * kStepA, b + k * kStepB);
          weights(sums, a + k * kStepA, ones);
        }
      }
    }
    wgmma_commit();
  }

  template <bool kDown>
  __device__ __forceinline__ void multiply(float (&acc)[BN / 2], float (&sums)[4], int steps) {
    mbar_wait(base + BAR_OFFSET + stage * 8, phase);
    products<kDown, true>(acc, sums);
    int previous = stage;
    advance();
    for (int i = 1; i < steps; ++i) {
      mbar_wait(base + BAR_OFFSET + stage * 8, phase);
      products<kDown, false>(acc, sums);
      wgmma_wait<1>();  // all but the step just issued
      release(previous);
      previous = stage;
      advance();
    }
    wgmma_wait<0>();
    settle(acc);
    if constexpr (!kDown) settle(sums);
    release(previous);
  }

  static __device__ __forceinline__ bool on_4_bytes(const void* at) {
    return (reinterpret_cast<u64>(at) & 3) == 0;
  }

  // The word of two numbers; zeros beyond the width.
  static __device__ __forceinline__ u32 read(const unsigned short* from, long long at, int left) {
    from += at;
    if (left > 1 && on_4_bytes(from)) return *reinterpret_cast<const u32*>(from);
    return left > 0 ? from[0] | (left > 1 ? static_cast<u32>(from[1]) << 16 : 0) : 0;
  }

  static __device__ __forceinline__ void write(unsigned short* to, long long at, u32 word, int left) {
    to += at;
    if (left > 1 && on_4_bytes(to)) {
      *reinterpret_cast<u32*>(to) = word;
    } else {
      to[0] = static_cast<unsigned short>(word);
      if (left > 1) to[1] = static_cast<unsigned short>(word >> 16);
    }
  }

  // 64 rows of dy times the derivative of the last activation, in rows that TMA reads. A warp takes
  // every fourth row, and has all of 64 columns under way at once.
  __device__ __forceinline__ void grade(const Task& t) const {
    constexpr int EACH = 16;
    const int n = p.n[0], end = min(n, t.column + p.graded_columns);
    const int first = t.row + consumer * 64 + thread / 32;
    for (int column = t.column + 2 * (thread % 32); column < end; column += 64) {
      const int left = n - column;
      u32 words[EACH], known[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const long long row = first + 4 * j;
        words[j] = row < p.rows ? read(p.dy, row * p.dy_stride + column, left) : 0;
        if (FINAL != ACT_NONE) known[j] = row < p.rows ? read(p.dy_saved, row * n + column, left) : 0;
      }
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const long long row = first + 4 * j;
        if (row >= p.rows) continue;
        if (FINAL != ACT_NONE) {
          float a, b, c, d;
          unpack(words[j], a, b);
          unpack(known[j], c, d);
          words[j] = pack(graded<FINAL>(a, c), graded<FINAL>(b, d));
        }
        write(p.graded, row * p.pitch[0] + column, words[j], left);
      }
    }
    publish(rows_done(p, 0, t.row / BM));
  }

  __device__ __forceinline__ void down_task(const Task& t) {
    const int s = t.s, k = p.k[s], pitch = p.pitch[s + 1];
    const int row = t.row + consumer * 64 + thread / 32 * 16 + (lane_id() >> 2);
    const int column = t.column + 2 * (lane_id() & 3);
    const unsigned short* const saved = p.saved[s];
    u32 words[BN / 4];  // what the derivative reads, on its way under the products
#pragma unroll
    for (int i = 0; i < BN / 4; ++i) {
      const int r = row + (i & 1) * 8, c = column + 8 * (i >> 1);
      words[i] = saved != nullptr && r < p.rows ? read(saved, static_cast<long long>(r) * k + c, k - c) : 0;
    }
    float acc[BN / 2], sums[4];
    multiply<true>(acc, sums, t.steps);
#pragma unroll
    for (int i = 0; i < BN / 4; ++i) {
      const int r = row + (i & 1) * 8, c = column + 8 * (i >> 1);
      if (r >= p.rows || c >= k) continue;
      const long long at = static_cast<long long>(r) * pitch + c;
      float a = acc[2 * i], b = acc[2 * i + 1];
      if (saved != nullptr) {
        float x, y;
        unpack(words[i], x, y);
        if (p.aside[s] != nullptr) {
          u32 given = words[i];
          if (RECOMPUTE) {
            const float v = act_and_grad<ACT>(x, a, a), w = act_and_grad<ACT>(y, b, b);
            given = pack(v, w);
          } else {
            a = graded<ACT>(a, x), b = graded<ACT>(b, y);
          }
          write(p.aside[s], at, given, k - c);
        } else {
          a = graded<ACT>(a, x), b = graded<ACT>(b, y);
        }
      }
      if (p.out[s] != nullptr) write(p.out[s], at, pack(a, b), k - c);
    }
    publish(rows_done(p, s + 1, t.row / BM));
  }

  __device__ __forceinline__ void weights_task(const Task& t) {
    const int s = t.s, n = p.n[s], k = p.columns[s], slices = p.slices[s];
    float acc[BN / 2], sums[4];
    multiply<false>(acc, sums, t.steps);
    if (slices > 1) {
      const int sum = p.first_sum[s] + t.tile * CONSUMERS + consumer;
      const long long tile = static_cast<long long>(t.tile * CONSUMERS + consumer) * slices;
      float* const first = p.parts + p.parts_at[s] + tile * (SUMS * 128) + thread;
      float* const own = first + static_cast<long long>(t.slice) * (SUMS * 128);
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) own[i * 128] = acc[i];
#pragma unroll
      for (int i = 0; i < 4; ++i) own[(BN / 2 + i) * 128] = sums[i];
      const u32 last = base + LAST_OFFSET + consumer * 4;
      __threadfence();
      bar_sync(1 + consumer, 128);
      if (thread == 0) store_shared32(last, atomicAdd(slices_done(p, sum), 1) == slices - 1);
      bar_sync(1 + consumer, 128);
      if (!load_shared32(last)) return;
      __threadfence();
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) acc[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
#pragma unroll 1
      for (int slice = 0; slice < slices; ++slice) {
        const float* const from = first + static_cast<long long>(slice) * (SUMS * 128);
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) acc[i] += load_strong(from + i * 128);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += load_strong(from + (BN / 2 + i) * 128);
      }
    }
    const int row = t.row + consumer * 64 + thread / 32 * 16 + (lane_id() >> 2);
    const int column = t.column + 2 * (lane_id() & 3);
#pragma unroll
    for (int i = 0; i < BN / 4; ++i) {
      const int r = row + (i & 1) * 8, c = column + 8 * (i >> 1);
      if (r < n && c < k && p.dw[s] != nullptr)
        write(p.dw[s], static_cast<long long>(r) * k + c, pack(acc[2 * i], acc[2 * i + 1]), k - c);
    }
    if (t.column == 0 && (lane_id() & 3) == 0 && p.db[s] != nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (row + 8 * h < n) p.db[s][row + 8 * h] = static_cast<unsigned short>(pack(sums[2 * h], 0.0f));
    }
  }

  __device__ __forceinline__ void run() {
    int slot = 0;
    u32 slot_phase = 0;
    for (;;) {
      const u32 taken = base + TASK_BAR_OFFSET + slot * 8;
      mbar_wait(taken, slot_phase);
      const int number = load_shared32(base + TASK_OFFSET + slot * 4);
      __syncwarp();
      if (lane_id() == 0) mbar_arrive(taken + AHEAD * 8);
      if (++slot == AHEAD) { slot = 0; slot_phase ^= 1; }
      if (number >= p.tasks) return;
      const Task t(p, number);
      if (t.kind == DOWN) down_task(t);
      else if (t.kind == WEIGHTS) weights_task(t);
      else grade(t);
    }
  }
};

// ---------------------------------------------------------------- the kernels

extern "C" __global__ void __launch_bounds__(THREADS, 1) mlp_tasks(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = smem_addr(smem);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);

  for (int i = threadIdx.x; i < 512; i += THREADS)
    store_shared16(base + ONES_OFFSET + 2 * i, IS_BF16 ? 0x3f80 : 0x3c00);
  fence_async();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(base + BAR_OFFSET + i * 8, 1);
      mbar_init(base + BAR_OFFSET + (STAGES + i) * 8, 4 * CONSUMERS);
    }
    for (int i = 0; i < AHEAD; ++i) {
      mbar_init(base + TASK_BAR_OFFSET + i * 8, 1);
      mbar_init(base + TASK_BAR_OFFSET + (AHEAD + i) * 8, 4 * CONSUMERS);
    }
    fence_barriers();
  }
  __syncthreads();
  wait_for_previous();

  if (warpgroup == 0) {
    if constexpr (CONSUMERS == 2) fewer_registers<40>();
    if (threadIdx.x == 0) produce(p, base);
  } else {
    if constexpr (CONSUMERS == 2) more_registers<232>();
    Consumer{p, base, warpgroup - 1, static_cast<int>(threadIdx.x % 128), 0, 0}.run();
  }
}

struct BeginParams {
  int* counters;
  int count;
};

// The launch before: no task is taken, nothing is done.
extern "C" __global__ void __launch_bounds__(256) mlp_tasks_begin(const __grid_constant__ BeginParams p) {
  let_next_start();
  wait_for_previous();
  for (int i = threadIdx.x; i < p.count; i += 256) p.counters[i] = 0;
}
