// Weights (n, k) of any strides copied to rows that begin on 16 bytes, as TMA reads them: those of
// all layers in one launch. A block copies tiles of 64 x 64 of one layer.
//
// hopper_words.h, activations/cuda.h and hopper_async.h come before this file. Macro from the host:
// MAX_STEPS.

struct Params {
  const unsigned short* from[MAX_STEPS];
  unsigned short* to[MAX_STEPS];
  long long row[MAX_STEPS], column[MAX_STEPS];  // elements from one to the next
  int n[MAX_STEPS], k[MAX_STEPS], pitch[MAX_STEPS];  // elements from row to row of a copy
};

extern "C" __global__ void __launch_bounds__(256)
whole_mlp_row_copies(const __grid_constant__ Params p) {
  const int i = blockIdx.y, n = p.n[i], k = p.k[i], pitch = p.pitch[i];
  const int across = (k + 63) / 64, tiles = across * ((n + 63) / 64);
  const bool along = p.column[i] == 1;  // neighbours in a row are read by neighbouring threads
  wait_for_previous();
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int first_row = tile / across * 64, first_column = tile % across * 64;
#pragma unroll 4
    for (int e = threadIdx.x; e < 64 * 64; e += 256) {
      const int row = first_row + (along ? e / 64 : e % 64);
      const int column = first_column + (along ? e % 64 : e / 64);
      if (row < n && column < k)
        p.to[i][static_cast<long long>(row) * pitch + column] =
            p.from[i][row * p.row[i] + column * p.column[i]];
    }
  }
  let_next_start();
}
