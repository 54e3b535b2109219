// Weights (n, k) of any strides copied to rows that begin on 16 bytes, as TMA reads them: those of
// all layers in one launch. A block copies tiles of 64 x 64 of one layer, by way of shared memory:
// neighbours are read by neighbouring threads, whichever way they lie, and written 16 bytes at once.
//
// hopper_words.h, activations/cuda.h and hopper_async.h come before this file. Macro from the host:
// MAX_STEPS.

struct Params {
  const unsigned short* from[MAX_STEPS];
  unsigned short* to[MAX_STEPS];
  long long row[MAX_STEPS], column[MAX_STEPS];  // elements from one to the next
  int n[MAX_STEPS], k[MAX_STEPS], pitch[MAX_STEPS];  // elements from row to row of a copy
};

constexpr int TILE = 64, THREADS = 256, EACH = TILE * TILE / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS)
whole_mlp_row_copies(const __grid_constant__ Params p) {
  __shared__ __align__(4) unsigned short numbers[TILE][TILE + 2];
  const int i = blockIdx.y, n = p.n[i], k = p.k[i];
  const int across = (k + TILE - 1) / TILE, tiles = across * ((n + TILE - 1) / TILE);
  const bool along = p.column[i] == 1;  // neighbours in a row are read by neighbouring threads
  wait_for_previous();
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int first_row = tile / across * TILE, first_column = tile % across * TILE;
    const unsigned short* const from = p.from[i] + first_row * p.row[i] + first_column * p.column[i];
    unsigned short read[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int outer = (threadIdx.x + j * THREADS) / TILE, inner = threadIdx.x % TILE;
      const int row = along ? outer : inner, column = along ? inner : outer;
      const bool exists = first_row + row < n && first_column + column < k;
      read[j] = exists ? from[row * p.row[i] + column * p.column[i]] : 0;
    }
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int outer = (threadIdx.x + j * THREADS) / TILE, inner = threadIdx.x % TILE;
      numbers[along ? outer : inner][along ? inner : outer] = read[j];
    }
    __syncthreads();
    for (int word = threadIdx.x; word < TILE * TILE / 8; word += THREADS) {
      const int row = word / (TILE / 8), column = word % (TILE / 8) * 8;
      if (first_row + row < n && first_column + column < k) {
        const u32* const of = reinterpret_cast<const u32*>(&numbers[row][column]);
        const long long at = static_cast<long long>(first_row + row) * p.pitch[i] + first_column + column;
        *reinterpret_cast<uint4*>(p.to[i] + at) = {of[0], of[1], of[2], of[3]};
      }
    }
    __syncthreads();
  }
  let_next_start();
}
