// Rows sorted by group, where only the device knows the sizes of the groups. Comes before what reads the
// table that ragged_table.cu writes.

constexpr int BLOCK_ROWS = 64, TILE_ROWS = 2 * BLOCK_ROWS;

// Rows side by side, of one group or of none (-1), and where the copy of the first lies.
struct __align__(16) Lines {
  int first, rows, group, planes;  // rows: from the first to the group's last
};

// The last group that begins at that place or before it, of groups that are not empty. ``first``: of each,
// and behind the last, in so many places.
template <class Numbers>
__device__ __forceinline__ int group_at(const Numbers& first, int groups, int place, int each = 1) {
  int low = 0, high = groups;  // first[low] * each <= place < first[high] * each
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first[middle] * each <= place) low = middle;
    else high = middle;
  }
  return low;
}

// Groups of rows, in a table. Tiles of 128 rows cover each group, and then the rows behind the last. Where
// rows are copied, as planes are, the copies of each group begin at a multiple of 64 rows.
struct Ragged {
  int* table;
  int groups, most_tiles, most_blocks;

  __device__ __forceinline__ Lines* of_tiles() const { return reinterpret_cast<Lines*>(table); }
  __device__ __forceinline__ Lines* of_blocks() const { return of_tiles() + most_tiles; }
  // Of each group, and behind the last: the first row, 64 rows of copies, tile.
  __device__ __forceinline__ int* rows() const { return reinterpret_cast<int*>(of_blocks() + most_blocks); }
  __device__ __forceinline__ int* blocks() const { return rows() + groups + 1; }
  __device__ __forceinline__ int* tiles() const { return blocks() + groups + 1; }
  __device__ __forceinline__ int* order() const { return tiles() + groups + 1; }  // where asked for
  __device__ __forceinline__ int* count() const { return order() + groups; }      // of all tiles
};
