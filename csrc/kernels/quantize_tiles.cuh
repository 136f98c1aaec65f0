// Quantises an array: rows, columns or both, from one read of x.
//
//   data = round(clip(x · (1 / scale), -fmax, fmax)),  scale given (SCALES 0) or of its block
//   amax = the largest magnitude of an entry, NaN or infinity where an element is so (AMAX)
//
// Layout, threads: quantize_tile.cuh, a tile a block. With REVERSED the last tiles come first: what
// the pass before read last is in the L2 cache. With AHEAD a block fetches the tile of
// the block so many places later into the L2 cache: memory has work while blocks wait for scales.
#include "quantize_parameters.cuh"
#include "quantize_write.cuh"

using X = ElementOf<X_TYPE>::Type;
static_assert(AHEAD == 0 || !REVERSED, "later tiles have higher numbers");

// The thread's numbers, read again row by row.
struct Again {
  const X* from;
  long long stride;
  int rows, cols;  // that there are, from `from` on

  __device__ __forceinline__ void take(int) {}
  __device__ __forceinline__ void row(int i, float (&values)[kEdge]) const {
    const X* at = from + (i < rows ? i : rows - 1) * stride;
    const Vector<X, kEdge> row = load_first<EVEN, true>(at, cols, false);
#pragma unroll
    for (int j = 0; j < kEdge; ++j) values[j] = row.at(j);
  }
};

__device__ __forceinline__ void fetch_ahead(const X* x, const Shape& shape, unsigned index) {
  const Tile tile(shape, index % shape.tiles_across, index / shape.tiles_across);
  constexpr int kOfLine = 128 / sizeof(X), kLinesOfRow = kTileCols / kOfLine;
  static_assert(kTileRows * kLinesOfRow % kTileThreads == 0, "each thread has as many lines");
#pragma unroll
  for (int turn = 0; turn < kTileRows * kLinesOfRow / kTileThreads; ++turn) {
    const int at = threadIdx.x + turn * kTileThreads;
    const int row = at / kLinesOfRow, col = at % kLinesOfRow * kOfLine;
    if (row < tile.rows && col < tile.cols) {
      fetch_line(x + tile.row_at(shape, row) * shape.cols + tile.first_col + col);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kTileThreads, MIN_BLOCKS)
    quantize_tiles(const X* __restrict__ x, GIVEN_PARAMETER RESULT_PARAMETERS Shape shape) {
  __shared__ TileBuffers shared;
  const Written written = {data, scales, turned, turned_scales, amax};
  clear(shared);
  if constexpr (kScales == kRow128 || kScales == kSquare) __syncthreads();
  const unsigned index = REVERSED ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const Tile tile(shape, index % shape.tiles_across, index / shape.tiles_across);
  const Place place(0);
  const Entry entry(written, given, tile);
  const long long first = tile.row_at(shape, place.row) * shape.cols + tile.first_col + place.col;
  Again again = {x + first, shape.cols, tile.rows - place.row, tile.cols - place.col};
  const bool whole = EVEN && is_aligned<kEdge>(x) && is_whole(shape, tile, written);
  Held<X> held;
  if (whole) {
    const X* from = x + first;
#pragma unroll
    for (int i = 0; i < kEdge; ++i) {
      held.rows[i] = place.col < tile.cols ? load<true, true, kEdge>(from) : Vector<X, kEdge>{};
      from += shape.cols;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEdge; ++i) {
      const X* from =
          x + tile.row_at(shape, place.row_of(tile, i)) * shape.cols + tile.first_col + place.col;
      held.rows[i] = load_first<EVEN, true>(from, tile.cols - place.col, false);
    }
  }
  if (AHEAD > 0 && whole && blockIdx.x + AHEAD < gridDim.x) fetch_ahead(x, shape, index + AHEAD);
  quantize_tile(held, again, whole, shape, tile, written, entry, shared);
}
