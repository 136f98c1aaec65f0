// Softmax, backward, of short rows: tiles of rows go through shared memory.
//
//   dy, y, first, dx as in softmax_backward.cuh.
//
// Threads: a block of THREADS a tile (softmax_tile.cuh), the grid strides over tiles. Shared memory
// holds a tile of y, which dx replaces, and one of dy.
#include "softmax_tile.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    softmax_backward_tile(const X* __restrict__ dy, const X* __restrict__ y,
#if FIRST
                          const int* __restrict__ first,
#endif
                          X* __restrict__ dx, const Params p) {
#if !FIRST
  constexpr const int* first = nullptr;
#endif
  extern __shared__ __align__(16) X tiles[];
  X *y_tile = tiles, *dy_tile = tiles + kTile;
  const bool whole = all_aligned(dy, y, dx);

  for (long long tile_row = static_cast<long long>(blockIdx.x) * kTileRows; tile_row < p.rows;
       tile_row += static_cast<long long>(gridDim.x) * kTileRows) {
    const long long left = p.rows - tile_row;
    const int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
    const long long offset = tile_row * kCols;
    if (whole) {
      TileCopy ys, dys;
      ys.load_words(y + offset, rows * kCols, tile_row, first, p);
      dys.load_words(dy + offset, rows * kCols, tile_row, first, p);
      ys.put(y_tile, rows * kCols);
      dys.put(dy_tile, rows * kCols);
    }
    copy_elements(y_tile, y + offset, rows * kCols, whole);
    copy_elements(dy_tile, dy + offset, rows * kCols, whole);
    __syncthreads();

#pragma unroll 1
    for (int r = static_cast<int>(threadIdx.x) / kGroup; r < kTileRows; r += kTeams) {
      const int count = r < rows ? keys_of(tile_row + r, nullptr, first, p).count : 0;
      X* y_row = y_tile + r * kCols;
      const X* dy_row = dy_tile + r * kCols;
      Unit ys[kEach], dys[kEach];
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        ys[i] = has_unit(i) ? load<true, false, kUnit>(y_row + unit_column(i)) : Unit{};
        dys[i] = has_unit(i) ? load<true, false, kUnit>(dy_row + unit_column(i)) : Unit{};
#pragma unroll
        for (int j = 0; j < kUnit; ++j) {
          const bool seen = !CAUSAL || unit_column(i) + j < count;
          if (seen) sum += ys[i].at(j) * dys[i].at(j);
        }
      }
      sum = sum_lanes<kGroup>(sum);
      if (r >= rows) continue;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (!has_unit(i)) continue;
        float result[kUnit];
#pragma unroll
        for (int j = 0; j < kUnit; ++j) {
          result[j] = p.scale * ys[i].at(j) * (dys[i].at(j) - sum);
          if (CAUSAL && unit_column(i) + j >= count) result[j] = 0.0f;  // the sum may be NaN
        }
        store<true, false, kUnit>(y_row + unit_column(i), rounded<X>(result));
      }
    }
    __syncthreads();
    write_tile(dx + offset, y_tile, rows * kCols, whole);
    __syncthreads();
  }
}
