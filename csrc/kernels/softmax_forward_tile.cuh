// Softmax, forward, of short rows: tiles of rows go through shared memory.
//
//   x, mask, first, y as in softmax_forward.cuh.
//
// Threads: a block of THREADS a tile (softmax_tile.cuh), the grid strides over tiles.
#include "softmax_logits.cuh"
#include "softmax_tile.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    softmax_forward_tile(const X* __restrict__ x,
#if MASK
                         const unsigned char* __restrict__ mask,
#endif
#if FIRST
                         const int* __restrict__ first,
#endif
                         X* __restrict__ y, const Params p) {
#if !MASK
  constexpr const unsigned char* mask = nullptr;
#endif
#if !FIRST
  constexpr const int* first = nullptr;
#endif
  extern __shared__ __align__(16) X tile[];
  const bool whole = all_aligned(x, y);

  for (long long tile_row = static_cast<long long>(blockIdx.x) * kTileRows; tile_row < p.rows;
       tile_row += static_cast<long long>(gridDim.x) * kTileRows) {
    const long long left = p.rows - tile_row;
    const int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
    const long long offset = tile_row * kCols;
    if (whole) {
      TileCopy copy;
      copy.load_words(x + offset, rows * kCols, tile_row, first, p);
      copy.put(tile, rows * kCols);
    }
    copy_elements(tile, x + offset, rows * kCols, whole);
    __syncthreads();

#pragma unroll 1
    for (int r = static_cast<int>(threadIdx.x) / kGroup; r < kTileRows; r += kTeams) {
      const bool active = r < rows;
      const Keys keys = active ? keys_of(tile_row + r, mask, first, p) : Keys{0, nullptr};
      X* row = tile + r * kCols;
      const auto column = [](int i) { return i * kGroup + static_cast<int>(threadIdx.x) % kGroup; };
      float values[kEach];
      float top = negative_infinity();
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        values[i] = negative_infinity();
        if (is_seen(keys, column(i))) {
          const float logit = element(row[column(i)]);
          values[i] = SCALE_SIGN == 0 ? logit * 0.0f : signed_logit(logit);
        }
        top = fmaxf(top, values[i]);
      }
      top = max_lanes<kGroup>(top);
      const float base = base_of(top);
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        values[i] = weight(values[i], base, p.scale);
        sum += values[i];
      }
      sum = sum_lanes<kGroup>(sum);
      const float inverse = 1.0f / sum;
      const bool regular = sum > 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (!active || column(i) >= kCols) continue;
        float result = values[i] * inverse;
        if (!regular) result = is_seen(keys, column(i)) ? not_a_number() : 0.0f;
        set_element(row + column(i), result);
      }
    }
    __syncthreads();
    write_tile(y + offset, tile, rows * kCols, whole);
    __syncthreads();
  }
}
