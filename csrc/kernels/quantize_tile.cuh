// A tile of numbers in registers, to be quantised as it lies, turned, or both.
//
// Layout: an array [entries, groups, rows, cols]. Results as it lies: data like it, scales
// [entries, groups, rows, ceil(cols / block)]. Turned: data [entries, cols, groups, rows], scales
// [entries, cols, groups, ceil(rows / block)]; blocks lie along the last dim of either, which comes
// first with BLOCKS_FIRST. A square has one scale for both, [.., rows / 128, cols / 128] or turned.
// Tiles do not reach over a group.
// Threads: a tile is PARTS_DOWN x PARTS_ACROSS parts of 32 rows x 64 columns, or of 16 x 128 where
// nothing is turned. WARPS warps take them in turn; a thread has 8 x 8 of a part. So a block of 32
// lies in a warp, a sector of 32 bytes too, of rows and of columns; data leave from registers.
#pragma once
#include "edges.cuh"
#include "quantize_scales.cuh"

constexpr bool kRows = ROWS;
constexpr bool kColumns = COLUMNS;
constexpr bool kAmax = AMAX;
constexpr int kLanesAcross = kColumns ? 8 : 16;
constexpr int kLanesDown = 32 / kLanesAcross;
constexpr int kPartRows = kLanesDown * kEdge, kPartCols = kLanesAcross * kEdge;
constexpr int kPartsDown = PARTS_DOWN, kPartsAcross = PARTS_ACROSS;
constexpr int kTileRows = kPartsDown * kPartRows, kTileCols = kPartsAcross * kPartCols;
constexpr int kTileThreads = 32 * WARPS;
constexpr int kTurns = kPartsDown * kPartsAcross / WARPS;
static_assert(kTurns * WARPS == kPartsDown * kPartsAcross, "each warp has as many parts");
constexpr bool kHasBlocks = kScales == kRow128 || kScales == kRow32;
// Blocks of a tile, along a row and along a column.
constexpr int kRowBlocks = kRows && kHasBlocks ? kTileCols / kBlock : 1;
constexpr int kColumnBlocks = kColumns && kHasBlocks ? kTileRows / kBlock : 1;
constexpr int kSquares = kScales == kSquare ? kTileCols / kBlock : 1;
constexpr bool kLines = LINES != 0;  // columns leave by way of shared memory
// For fewer registers: four bytes of a thread's column at a time, magnitudes two at a time.
constexpr bool kByHalves = LINES == 2;
static_assert(!kRows || !kHasBlocks || kTileCols % kBlock == 0, "whole blocks of rows");
static_assert(!kColumns || !kHasBlocks || kTileRows % kBlock == 0, "whole blocks of columns");
static_assert(!kLines || (kColumns && kTileRows == 128), "a column is a line of the L2 cache");
static_assert(kScales != kSquare || (kTileRows == kBlock && kTileCols % kBlock == 0), "squares");

struct Shape {
  long long rows;  // of a group
  long long cols;
  long long groups;     // of an entry
  unsigned tiles_down;  // of a group
  unsigned tiles_across;
};

// Known to a kernel that is made for a length.
__device__ __forceinline__ long long length_of_row(const Shape& shape) {
#ifdef COLS
  return COLS;
#else
  return shape.cols;
#endif
}

// Where a tile lies.
struct Tile {
  long long first_row;  // in its group
  long long first_col;
  long long group;  // over all entries
  long long entry;
  int rows, cols;  // that it has

  // Tiles across come first, then those down a group.
  __device__ __forceinline__ Tile(const Shape& shape, unsigned across, unsigned down) {
    first_col = static_cast<long long>(across) * kTileCols;
    const unsigned of_groups = down < shape.tiles_down ? 0 : down / shape.tiles_down;
    group = of_groups;
    first_row = static_cast<long long>(down - of_groups * shape.tiles_down) * kTileRows;
    entry = shape.groups == 1 ? group : group / shape.groups;
    const long long rows_left = shape.rows - first_row,
                    cols_left = length_of_row(shape) - first_col;
    rows = rows_left < kTileRows ? static_cast<int>(rows_left) : kTileRows;
    cols = cols_left < kTileCols ? static_cast<int>(cols_left) : kTileCols;
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

// The thread's 8 x 8 of the part that its warp has in a turn.
struct Place {
  int part_down, part_across;
  int row, col;  // where they begin, in the tile
  __device__ __forceinline__ explicit Place(int turn) {
    const int lane = threadIdx.x % 32, part = threadIdx.x / 32 + turn * WARPS;
    part_across = part % kPartsAcross;
    part_down = part / kPartsAcross;
    row = part_down * kPartRows + lane / kLanesAcross * kEdge;
    col = part_across * kPartCols + lane % kLanesAcross * kEdge;
  }
  // A row of the thread, or the tile's last one in its place: largest magnitudes stay as they are.
  __device__ __forceinline__ int row_of(const Tile& tile, int i) const {
    return row + i < tile.rows ? row + i : tile.rows - 1;
  }
};

// The thread's numbers of a tile of one turn; 0 past a row's end.
template <typename T>
struct Held {
  static constexpr bool kMakeOnce = false;
  Vector<T, kEdge> rows[kEdge];

  __device__ __forceinline__ float at(int i, int j) const { return rows[i].at(j); }
  __device__ __forceinline__ void row(int i, float (&values)[kEdge]) const {
#pragma unroll
    for (int j = 0; j < kEdge; ++j) values[j] = at(i, j);
  }
  __device__ __forceinline__ void take(int) {}
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

// Of blocks and squares: bits of the largest magnitude, then of what numbers are multiplied by.
struct TileBuffers {
  alignas(16) int rows[kRowBlocks][kRows && kHasBlocks ? kTileRows : 4];
  alignas(16) int columns[kColumnBlocks][kColumns && kHasBlocks ? kTileCols : 4];
  int squares[kSquares];
  alignas(16) unsigned char lines[kLines ? kTileCols : 1][kLines ? kTileRows : 16];
};

// Whether results of a tile are words of whole rows and columns.
__device__ __forceinline__ bool is_whole(const Shape& shape, const Tile& tile,
                                         const Written& written) {
  const auto place = [](const void* data) { return reinterpret_cast<long long>(data); };
  return tile.rows == kTileRows &&
         (!kRows || (length_of_row(shape) | place(written.data)) % kEdge == 0) &&
         (!kColumns || (shape.rows | place(written.turned)) % kEdge == 0);
}

// Before the tile's blocks or squares; the block's barrier follows.
__device__ __forceinline__ void clear(TileBuffers& shared) {
  const int t = static_cast<int>(threadIdx.x);
  if constexpr (kScales == kRow128) {
    for (int at = t; kRows && at < kRowBlocks * kTileRows; at += kTileThreads) {
      shared.rows[at / kTileRows][at % kTileRows] = 0;
    }
    for (int at = t; kColumns && at < kColumnBlocks * kTileCols; at += kTileThreads) {
      shared.columns[at / kTileCols][at % kTileCols] = 0;
    }
  }
  if constexpr (kScales == kSquare) {
    if (t < kSquares) shared.squares[t] = 0;
  }
}
