// What a block of wide_backward.cu takes, and how its dact warps bring that in. The texts of
// wide_instructions.h and wide_backward.h stand before this one.

// What one block does: tiles chunk, chunk + chunks, ... of a group.
struct Part {
  int half, group, chunk, boxes;  // which half of the K features, in how many boxes

  // Features of one of these.
  __device__ __forceinline__ int own(int box) const { return min(64, K - HALF * half - 64 * box); }

  __device__ __forceinline__ Part(int groups) {
    const int block = block_id(), pair = block / HALVES;
    half = block % HALVES;
    boxes = HALVES == 1 || half == 0 ? min(2, K_BOXES) : K_BOXES - 2;
    group = pair % groups;
    chunk = pair / groups;
  }
};

// What one dact warp brings in: of each tile its box of dy and saved, and of x, once there is room.
// What has no boxes the whole warp does: these rows of x by all dact warps.
struct Tiles {
  const TensorMap *dy, *saved, *x, *weight;
  Strided dy_rows, saved_rows, x_rows;
  u32 base;
  int dact_warp, groups, each, tokens;  // `each`: as Where has it
  int tile, turn;                    // the next tile

  // Whether there is a next tile, and all its room is free.
  __device__ __forceinline__ bool has_room(int tiles) const {
    const int slot = turn % TILES;
    if (tile >= tiles || !mbar_test(base + FREE_AT + 8 * slot, (turn / TILES & 1) ^ 1)) return false;
    if (SAVED_BOXES) {
#pragma unroll
      for (int h = 0; h < OWN_HALVES; ++h) {
        const int half = OWN_HALVES * turn + h;
        if (!mbar_test(base + PART_FREE_AT + 8 * (half % PARTS), (half / PARTS & 1) ^ 1)) return false;
      }
    }
    return true;
  }

  // Where the h-th half of this block's of what was saved is, of all boxes.
  __device__ __forceinline__ u32 saved_half(int h) const {
    return base + SAVED_AT + (OWN_HALVES * turn + h) % PARTS * (DY_BYTES / 2);
  }

  __device__ __forceinline__ void bring(const Part& p, int chunks, int lane) {
    const int slot = turn % TILES, box = dact_warp / SHARERS, own = SPLIT ? p.half : 0;
    const u32 bar = base + FULL_AT + 8 * slot, to = base + slot * TILE;
    const Where at(tile, p.group, groups, each);
    if (lane == 0) bring_boxes(p, at, bar, to, box, own);
    if constexpr (BY_WORDS<N>) {
      const int columns = N - 64 * box;
#pragma unroll 1
      for (int r = own * (TOKENS / 2) + 8 * (dact_warp % SHARERS);
           r < (SPLIT ? own + 1 : 2) * (TOKENS / 2);
           r += 8 * SHARERS) {
        const int token = at.token + r;
        copy_rows<N>(to + box * BOX + 128 * r, dy_rows.at(at.plane, token) + 128 * box, 2 * dy_rows.row,
                     tokens - token, columns, lane);
        if constexpr (SAVED_BOXES)
          copy_rows<N>(saved_half(SPLIT ? 0 : r / (TOKENS / 2)) + box * (BOX / 2) + r % (TOKENS / 2) * 128,
                       saved_rows.at(at.plane, token) + 128 * box, 2 * saved_rows.row, tokens - token, columns,
                       lane);
      }
    }
    if constexpr (BY_WORDS<K> && NEED_DW) {
#pragma unroll 1
      for (int i = dact_warp; i < p.boxes * (TOKENS / 8); i += DACT_WARPS) {
        const int b = i / (TOKENS / 8), r = i % (TOKENS / 8) * 8, token = at.token + r;
        copy_rows<K>(to + DY_BYTES + b * BOX + 128 * r,
                     x_rows.at(at.plane, token) + 2 * HALF * p.half + 128 * b, 2 * x_rows.row, tokens - token,
                     p.own(b), lane);
      }
    }
    if (CARRIES) arrive_with_rows(bar);
    tile += chunks;
    ++turn;
  }

  __device__ __forceinline__ void bring_boxes(const Part& p, const Where& at, u32 bar, u32 to, int box,
                                              int own) const {
    constexpr int SENDERS = SPLIT ? 1 : CLUSTER;  // blocks that bring in each other's boxes
    constexpr int READ = BOX * (SAVED_BOXES ? 2 : 1) / (SPLIT ? 2 : 1);
    const auto row = [](int half) { return half * (TOKENS / 2); };  // of half a box, its first
    const bool of_box = !BY_WORDS<N> && dact_warp % SHARERS == 0;
    const bool of_x = NEED_DW && !BY_WORDS<K> && dact_warp < p.boxes;
    mbar_expect(bar, (of_box ? READ : 0) + (of_x ? BOX : 0));
    if (of_box && (SENDERS == 1 || box % SENDERS == p.half)) {
      load_tokens<SENDERS>(to + box * BOX + own * (BOX / 2), dy, bar,
                           64 * box + (CHANNELS ? row(own) : 0), at.plane,
                           at.token + (CHANNELS ? 0 : row(own)));
      if (SAVED_BOXES) {
#pragma unroll
        for (int h = 0; h < OWN_HALVES; ++h)
          load_tokens<SENDERS>(saved_half(h) + box * (BOX / 2), saved, bar,
                               64 * box + (CHANNELS ? row(own + h) : 0), at.plane,
                               at.token + (CHANNELS ? 0 : row(own + h)));
      }
    }
    if (of_x)
      load_tokens<1>(to + DY_BYTES + dact_warp * BOX, x, bar, HALF * p.half + 64 * dact_warp, at.plane,
                     at.token);
    if (!W_BY_WORDS && W_BOXES > 0 && turn == 0 && dact_warp == 0) {
      mbar_expect(base + W_FULL_AT, W_BOXES * p.boxes * BOX);
      for (int w = 0; w < W_BOXES; ++w)
        for (int b = 0; b < p.boxes; ++b)
          load_box<1>(base + W_AT + (2 * w + b) * BOX, weight, base + W_FULL_AT,
                      HALF * p.half + 64 * b, 64 * (HELD + w), p.group);
    }
  }
};

// A dact warp's signs of a tile: of the tokens of each of its bands, or with CHANNELS of all
// tokens.
struct Signs {
  const u32* from;  // this lane's of its box of the first tile
  int sharer, rank, groups, each;

  __device__ __forceinline__ void load(u32 (&words)[4], int tile, int group) const {
    const Where at(tile, group, groups, each);
    const u32* box = from + static_cast<long long>(at.plane * each + at.token / TOKENS) * (N_BOXES * 128);
#pragma unroll
    for (int i = 0; i < (CHANNELS ? 4 : OWN_HALVES * BANDS); ++i) {
      const int half = SPLIT ? rank : i / BANDS;
      words[i] = box[32 * (CHANNELS ? i : 2 * half + (SHARERS > 1 ? sharer : i % BANDS))];
    }
  }

  // Those that `grade` asks for.
  __device__ __forceinline__ void of_half(u32 (&out)[4], const u32 (&words)[4], int half) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 first = words[i], second = words[(BANDS + i) % 4];
      out[i] = CHANNELS ? first >> (16 * half + (SHARERS > 1 ? 4 * sharer : 0))
               : OWN_HALVES > 1 && half == 1 ? second
                                             : first;
    }
  }
};
