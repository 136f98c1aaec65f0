// LayerNorm and RMSNorm, forward, their values quantised in columns, or both ways, or in rows too
// long for registers: one launch, x read twice, the second time from the L2 cache for the most
// part.
//
//   h, mean, rstd as in norm_forward.cuh; y in float32 as in norm_values.cuh; results of y as in
//   quantize_tiles.cuh
//
// Layout: quantize_tile.cuh, of y. A slab is a row of tiles: 128 rows of a group.
// Threads: 256. A block either finds the statistics of STAT_ROWS rows of a slab, one or more warps
// a row, and writes h; or it waits for all of a slab's statistics and quantises one of its tiles.
// Blocks of statistics run `ahead` slabs before those of tiles: far enough that these seldom wait,
// near enough that x is still in the cache. Blocks start in the order of their numbers, so what a
// block waits for has started before it.
#include "norm_statistics.cuh"
#include "quantize_write.cuh"

struct Params {
  Shape shape;
  unsigned slabs;
  unsigned ahead;  // <= slabs
  float epsilon;
};

// What a block does: statistics of part `index` of a slab, or its tile `index`.
struct Work {
  bool statistics;
  unsigned slab, index;

  __device__ __forceinline__ explicit Work(const Params& params) {
    const unsigned tiles = params.shape.tiles_across, turn = kStatBlocks + tiles;
    unsigned block = blockIdx.x;
    statistics = block < params.ahead * kStatBlocks;
    if (statistics) {
      slab = block / kStatBlocks;
      index = block % kStatBlocks;
      return;
    }
    block -= params.ahead * kStatBlocks;
    const unsigned turns = params.slabs - params.ahead;
    if (block < turns * turn) {
      slab = block / turn;
      index = block % turn;
      statistics = index < kStatBlocks;
      if (statistics) {
        slab += params.ahead;
      } else {
        index -= kStatBlocks;
      }
      return;
    }
    block -= turns * turn;
    slab = turns + block / tiles;
    index = block % tiles;
  }
};

extern "C" __global__ void __launch_bounds__(kTileThreads, MIN_BLOCKS)
    norm_quantized_tiles(const X* __restrict__ x, const Gamma* __restrict__ gamma,
#if HAS_BETA
                         const Beta* __restrict__ beta,
#endif
#if HAS_ADD
                         const X* __restrict__ add,
#endif
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
#if HAS_ADD
                         X* h,
#endif
#if LAYER
                         float* mean_out,
#endif
                         float* rstd_out, unsigned* ready, Params params) {
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
#if !HAS_ADD
  constexpr const X* add = nullptr;
  constexpr X* h = nullptr;
#endif
#if !LAYER
  constexpr float* mean_out = nullptr;
#endif
  const Shape& shape = params.shape;
  const Work work(params);
  const Tile tile(shape, work.statistics ? 0 : work.index, work.slab);
  bool aligned = EVEN && is_aligned<kEdge>(x);
#if HAS_ADD
  aligned = aligned && is_aligned<kEdge>(add) && is_aligned<kEdge>(h);
#endif

  if (work.statistics) {
    find_statistics(x, add, h, mean_out, rstd_out, shape, params.epsilon, tile, work.index,
                    aligned);
    __syncthreads();
    if (threadIdx.x == 0) arrive(ready + work.slab);
    return;
  }

  start_tile(shared);
  const Place place;
  const int col = place.across * kEdge;
#if HAS_ADD
  if (threadIdx.x == 0) await(ready + work.slab, kStatBlocks);
  __syncthreads();
  const X* from = h;
#else
  const X* from = x;
#endif
  Vector<X, kEdge> rows[kEdge];
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    const int row = place.down * kEdge + i;
    rows[i] =
        load_first<EVEN, true>(from + tile.row_at(shape, row) * shape.cols + tile.first_col + col,
                               row < tile.rows ? tile.cols - col : 0, aligned);
  }
  const auto scale = load_first<EVEN, false>(gamma + tile.first_col + col, tile.cols - col,
                                             is_aligned<kEdge>(gamma));
#if HAS_BETA
  const auto shift = load_first<EVEN, false>(beta + tile.first_col + col, tile.cols - col,
                                             is_aligned<kEdge>(beta));
#endif
#if !HAS_ADD
  if (threadIdx.x == 0) await(ready + work.slab, kStatBlocks);
  __syncthreads();
#endif
  Held<float> y;
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    const int r = place.down * kEdge + i;
    const long long row = tile.row_at(shape, r);
    const bool active = r < tile.rows;
    const float rstd = active ? rstd_out[row] : 0.0f;
#if LAYER
    const float mean = active ? mean_out[row] : 0.0f;
#else
    constexpr float mean = 0.0f;
#endif
#pragma unroll
    for (int j = 0; j < kEdge; ++j) {
#if HAS_BETA
      const float b = shift.at(j);
#else
      constexpr float b = 0.0f;
#endif
      const float value = normalised(rows[i].at(j), mean, rstd, scale.at(j), b);
      y.rows[i].words[j] = active && col + j < tile.cols ? __float_as_uint(value) : 0;
    }
  }
  quantize_tile(y, shape, tile, place, written, given, shared);
}
