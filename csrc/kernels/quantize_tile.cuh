// A tile of 128 x 128 numbers, quantised: as it lies, turned, or both, from registers.
//
// Layout: an array [entries, groups, rows, cols]. Results as it lies: data like it, scales
// [entries, groups, rows, ceil(cols / block)]. Turned: data [entries, cols, groups, rows], scales
// [entries, cols, groups, ceil(rows / block)]; blocks lie along the last dim of either, which comes
// first with BLOCKS_FIRST. A square has one scale for both, [.., rows / 128, cols / 128] or turned.
// Tiles do not reach over a group.
// Threads: 256, each with 8 rows x 8 columns of the tile: sub-tile (down, across) of 16 x 16. Data
// as they lie leave from registers, 8 bytes a row; turned ones through shared memory, 128 bytes of
// a column at once.
#pragma once
#include "edges.cuh"
#include "quantize_scales.cuh"

constexpr int kTile = 128;
constexpr int kSubTiles = kTile / kEdge;
constexpr int kTileThreads = kSubTiles * kSubTiles;
constexpr bool kRows = ROWS;
constexpr bool kColumns = COLUMNS;
constexpr bool kAmax = AMAX;
// A warp has whole blocks of 32 rows where columns have scales of them.
constexpr int kLanesAcross = kColumns && kScales == kRow32 ? 8 : 16;
constexpr int kWarpsAcross = kSubTiles / kLanesAcross;
constexpr int kLanesDown = 32 / kLanesAcross;

struct Shape {
  long long rows;  // of a group
  long long cols;
  long long groups;     // of an entry
  unsigned tiles_down;  // of a group
  unsigned tiles_across;
};

// Where a tile lies.
struct Tile {
  long long first_row;  // in its group
  long long first_col;
  long long group;  // over all entries
  long long entry;
  int rows, cols;  // that it has

  // Tiles across come first, then those down a group.
  __device__ __forceinline__ Tile(const Shape& shape, unsigned across, unsigned down) {
    first_col = static_cast<long long>(across) * kTile;
    group = down / shape.tiles_down;
    first_row = static_cast<long long>(down % shape.tiles_down) * kTile;
    entry = shape.groups == 1 ? group : group / shape.groups;
    const long long rows_left = shape.rows - first_row, cols_left = shape.cols - first_col;
    rows = rows_left < kTile ? static_cast<int>(rows_left) : kTile;
    cols = cols_left < kTile ? static_cast<int>(cols_left) : kTile;
  }
  // The place of a row of the array, in [entries, groups, rows].
  __device__ __forceinline__ long long row_at(const Shape& shape, int r) const {
    return group * shape.rows + first_row + r;
  }
  // The place of a row of the turned array, in [entries, cols, groups]; of `cols` in all.
  __device__ __forceinline__ long long column_at(const Shape& shape, long long cols,
                                                 long long c) const {
    return (entry * cols + c) * shape.groups + (group - entry * shape.groups);
  }
};

struct Place {
  int down, across;
  __device__ __forceinline__ Place() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    across = warp % kWarpsAcross * kLanesAcross + lane % kLanesAcross;
    down = warp / kWarpsAcross * kLanesDown + lane / kLanesAcross;
  }
};

// The thread's numbers of a tile; 0 past the array's ends.
template <typename T>
struct Held {
  Vector<T, kEdge> rows[kEdge];

  __device__ __forceinline__ float at(int i, int j) const { return rows[i].at(j); }
  // They are unpacked again after it, and what was made of them before is not kept.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int i = 0; i < kEdge; ++i) rows[i].forget();
  }
};

struct Written {
  unsigned char* __restrict__ data;
  Scale* __restrict__ scales;
  unsigned char* __restrict__ turned;
  Scale* __restrict__ turned_scales;
  unsigned* amax;
};

// Turned data of a tile: 16 pieces of 8 rows for each of 128 columns, where a piece lies chosen so
// that the lanes of half a warp meet different banks, coming and going.
struct TileBuffers {
  alignas(16) uint2 turned[kColumns ? kTile * kSubTiles : 1];
  int column_keys[kColumns && kScales == kRow128 ? kTile : 1];
  alignas(4) Scale column_scales[kColumns ? kTile : 1][kTile / kBlock];
  int key;  // of the square, or the largest of the tile
};
__device__ __forceinline__ int swizzle(int across) { return (across << 1 | across >> 3) & 15; }

// `count` bytes of two words.
__device__ __forceinline__ void store_first(unsigned char* to, uint2 words, int count,
                                            bool aligned) {
  if (aligned && count >= kEdge) {
    __stcs(reinterpret_cast<uint2*>(to), words);
    return;
  }
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    const unsigned word = i < 4 ? words.x : words.y;
    if (i < count) to[i] = static_cast<unsigned char>(word >> i % 4 * 8);
  }
}

__device__ __forceinline__ void start_tile(TileBuffers& shared) {
  if constexpr (kColumns && kScales == kRow128) {
    if (threadIdx.x < kTile) shared.column_keys[threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) shared.key = 0;
  if constexpr (kAmax || kScales == kSquare || (kColumns && kScales == kRow128)) __syncthreads();
}
