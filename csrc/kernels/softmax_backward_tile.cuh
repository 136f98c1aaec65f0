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
      const bool active = r < rows;
      const Keys keys = active ? keys_of(tile_row + r, nullptr, first, p) : Keys{0, nullptr};
      X* y_row = y_tile + r * kCols;
      const X* dy_row = dy_tile + r * kCols;
      const auto column = [](int i) { return i * kGroup + static_cast<int>(threadIdx.x) % kGroup; };
      float ys[kEach], dys[kEach];
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        ys[i] = dys[i] = 0.0f;
        if (is_seen(keys, column(i))) {
          ys[i] = element(y_row[column(i)]);
          dys[i] = element(dy_row[column(i)]);
        }
        sum += ys[i] * dys[i];
      }
      sum = sum_lanes<kGroup>(sum);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (!active || column(i) >= kCols) continue;
        const bool seen = !CAUSAL || is_seen(keys, column(i));
        set_element(y_row + column(i), seen ? p.scale * ys[i] * (dys[i] - sum) : 0.0f);
      }
    }
    __syncthreads();
    write_tile(dx + offset, y_tile, rows * kCols, whole);
    __syncthreads();
  }
}
