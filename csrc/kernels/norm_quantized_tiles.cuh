// LayerNorm's and RMSNorm's values, quantised in columns, or both ways, or in rows too long for
// registers: from the statistics that norm_statistics.cuh has found.
//
//   y in float32 as in norm_values.cuh; results of y as in quantize_tiles.cuh
//
// Layout: h, what is normalised (x, or x + add), and y as in quantize_tile.cuh; mean, rstd one a
// row. Threads: quantize_tile.cuh, a tile a block. The last tiles come first: of h the end is what
// the L2 cache still has.
#include "norm_values.cuh"
#include "quantize_write.cuh"

// y of a thread's sub-tile, made anew each time: as float32 it takes twice the registers. Past the
// array's ends the last row or vector stands in, so that a largest magnitude is not changed.
struct Normalised {
  Vector<X, kEdge> rows[kEdge];
  Vector<Gamma, kEdge> gamma;
  float rstd[kEdge];
#if LAYER
  float mean[kEdge];
#endif
#if HAS_BETA
  Vector<Beta, kEdge> beta;
#endif

  __device__ __forceinline__ float at(int i, int j) const {
#if LAYER
    const float centre = mean[i];
#else
    constexpr float centre = 0.0f;
#endif
#if HAS_BETA
    const float shift = beta.at(j);
#else
    constexpr float shift = 0.0f;
#endif
    return normalised(rows[i].at(j), centre, rstd[i], gamma.at(j), shift);
  }
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int i = 0; i < kEdge; ++i) rows[i].forget();
    gamma.forget();
#if HAS_BETA
    beta.forget();
#endif
  }
};

__device__ __forceinline__ int clamped(int value, int most) { return value < most ? value : most; }

extern "C" __global__ void __launch_bounds__(kTileThreads, MIN_BLOCKS)
    norm_quantized_tiles(const X* __restrict__ h, const Gamma* __restrict__ gamma,
#if HAS_BETA
                         const Beta* __restrict__ beta,
#endif
#if LAYER
                         const float* __restrict__ mean,
#endif
                         const float* __restrict__ rstd,
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
  const unsigned index = gridDim.x - 1 - blockIdx.x;
  const Tile tile(shape, index % shape.tiles_across, index / shape.tiles_across);
  const Place place;
  const int col = clamped(place.across * kEdge, (tile.cols - 1) / kEdge * kEdge);
  const long long first_col = tile.first_col + col;
  const int cols = tile.cols - col;
  const bool aligned = EVEN && is_aligned<kEdge>(h);
  Normalised y;
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    const long long row = tile.row_at(shape, clamped(place.down * kEdge + i, tile.rows - 1));
    y.rows[i] = load_first<EVEN, true>(h + row * shape.cols + first_col, cols, aligned);
    y.rstd[i] = rstd[row];
#if LAYER
    y.mean[i] = mean[row];
#endif
  }
  y.gamma = load_first<EVEN, false>(gamma + first_col, cols, EVEN && is_aligned<kEdge>(gamma));
#if HAS_BETA
  y.beta = load_first<EVEN, false>(beta + first_col, cols, EVEN && is_aligned<kEdge>(beta));
#endif
  quantize_tile(y, shape, tile, place, written, given, shared);
}
