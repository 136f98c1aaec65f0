// Softmax, forward, of short rows: tiles of rows go through shared memory.
//
//   x, mask, first, y as in softmax_forward.cuh.
//
// Threads: a block of THREADS a tile (softmax_tile.cuh), the grid strides over tiles.
#include "softmax_logits.cuh"
#include "softmax_tile.cuh"

// The mask's bytes of a unit.
struct MaskUnit {
  unsigned words[(kUnit + 3) / 4];
  __device__ __forceinline__ bool hides(int j) const { return words[j / 4] >> 8 * (j % 4) & 0xff; }
};

__device__ __forceinline__ MaskUnit mask_unit(const unsigned char* from) {
  MaskUnit to{};
  const bool aligned = reinterpret_cast<unsigned long long>(from) % kUnit == 0;
  if (kUnit == 8 && aligned) {
    const uint2 both = *reinterpret_cast<const uint2*>(from);
    to.words[0] = both.x;
    to.words[kUnit / 8] = both.y;
  } else if (kUnit == 4 && aligned) {
    to.words[0] = *reinterpret_cast<const unsigned*>(from);
  } else {
#pragma unroll
    for (int j = 0; j < kUnit; ++j) to.words[j / 4] |= from[j] << 8 * (j % 4);
  }
  return to;
}

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
      MaskUnit masks[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (MASK == 1 && active && has_unit(i)) {
          masks[i] = mask_unit(keys.hidden + unit_column(i));
        }
      }
      float values[kEach][kUnit];
      float top = negative_infinity();
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const Unit unit = has_unit(i) ? load<true, false, kUnit>(row + unit_column(i)) : Unit{};
#pragma unroll
        for (int j = 0; j < kUnit; ++j) {
          float v = SCALE_SIGN == 0 ? unit.at(j) * 0.0f : signed_logit(unit.at(j));
          if (!has_unit(i)) v = negative_infinity();
          if ((CAUSAL || MASK == 2) && unit_column(i) + j >= keys.count) v = negative_infinity();
          if (MASK == 1 && masks[i].hides(j)) v = negative_infinity();
          values[i][j] = v;
          top = fmaxf(top, v);
        }
      }
      const float base = base_of(max_lanes<kGroup>(top));
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kUnit; ++j) {
          values[i][j] = weight(values[i][j], base, p.scale);
          sum += values[i][j];
        }
      }
      sum = sum_lanes<kGroup>(sum);
      if (!active) continue;
      if (!(sum > 0.0f)) {
#pragma unroll 1
        for (int e = 0; e < kEach * kUnit; ++e) {
          const int column = unit_column(e / kUnit) + e % kUnit;
          if (column >= kCols) continue;
          set_element<false>(row + column, is_seen(keys, column) ? not_a_number() : 0.0f);
        }
        continue;
      }
      const float inverse = fast_reciprocal(sum);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (!has_unit(i)) continue;
        float result[kUnit];
#pragma unroll
        for (int j = 0; j < kUnit; ++j) result[j] = values[i][j] * inverse;
        store<true, false, kUnit>(row + unit_column(i), rounded<X>(result));
      }
    }
    __syncthreads();
    write_tile(y + offset, tile, rows * kCols, whole);
    __syncthreads();
  }
}
