// Quantises an array: rows, columns or both, from one read of x.
//
//   data = round(clip(x · (1 / scale), -fmax, fmax)),  scale given (SCALES 0) or of its block
//   amax = the largest magnitude of an entry, NaN or infinity where an element is so (AMAX)
//
// Layout, threads: quantize_tile.cuh, a tile a block. With REVERSED the last tiles come first: what
// the pass before read last is in the L2 cache.
#include "quantize_write.cuh"

using X = ElementOf<X_TYPE>::Type;

extern "C" __global__ void __launch_bounds__(kTileThreads, MIN_BLOCKS)
    quantize_tiles(const X* __restrict__ x,
#if SCALES == 0
                   const float* __restrict__ given,
#endif
#if ROWS
                   unsigned char* __restrict__ data,
#if SCALES
                   Scale* __restrict__ scales,
#endif
#endif
#if COLUMNS
                   unsigned char* __restrict__ turned,
#if SCALES
                   Scale* __restrict__ turned_scales,
#endif
#endif
#if AMAX
                   unsigned* __restrict__ amax,
#endif
                   Shape shape) {
  __shared__ TileBuffers shared;
  Written written = {};
#if ROWS
  written.data = data;
#if SCALES
  written.scales = scales;
#endif
#endif
#if COLUMNS
  written.turned = turned;
#if SCALES
  written.turned_scales = turned_scales;
#endif
#endif
#if AMAX
  written.amax = amax;
#endif
#if SCALES
  constexpr const float* given = nullptr;
#endif
  start_tile(shared);
  const unsigned index = REVERSED ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const Tile tile(shape, index % shape.tiles_across, index / shape.tiles_across);
  const Place place;
  const bool aligned = EVEN && is_aligned<kEdge>(x);
  Held<X> held;
  const int col = place.across * kEdge;
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    const int row = place.down * kEdge + i;
    const X* from = x + tile.row_at(shape, row) * shape.cols + tile.first_col + col;
    held.rows[i] = load_first<EVEN, true>(from, row < tile.rows ? tile.cols - col : 0, aligned);
  }
  quantize_tile(held, shape, tile, place, written, given, shared);
}
