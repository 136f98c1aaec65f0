// LayerNorm and RMSNorm, forward, their values quantised tile by tile: rows, columns or both, x
// read once.
//
//   h, mean, rstd as in norm_forward.cuh; y in float32 as in norm_values.cuh
//   data, scales, amax of y as in quantize_tiles.cuh
//
// Layout: x, add, h an array as in quantize_tile.cuh; gamma, beta [COLS]; mean, rstd one of each
// row. With GIVEN statistics, x is h, and mean and rstd are operands.
// Threads: quantize_tile.cuh, a tile a block. With ONCE a warp that has whole blocks keeps y in
// registers from their scales to the data; else y is made twice. A cluster has all columns of so
// many rows, and keeps them in shared memory while the sums of their parts go round.
#include "norm_parameters.cuh"
#include "quantize_parameters.cuh"
#include "quantize_write.cuh"
#include "tile_statistics.cuh"

// Statistics are operands or results.
#if !GIVEN
#define FOUND_PARAMETERS
#define FINDS_PARAMETERS MEAN_PARAMETER float* __restrict__ rstd_out,
#elif LAYER
#define FOUND_PARAMETERS const float* __restrict__ mean_in, const float* __restrict__ rstd_in,
#define FINDS_PARAMETERS
#else
#define FOUND_PARAMETERS const float* __restrict__ rstd_in,
#define FINDS_PARAMETERS
#endif

struct Buffers {
  alignas(16) KeptRows::Words rows;
  Parameter<Gamma>::Words gamma;
#if HAS_BETA
  Parameter<Beta>::Words beta;
#endif
  StatisticsBuffers statistics;
  TileBuffers tile;
};
static_assert(sizeof(Buffers) <= SHARED_BYTES, "the plan's size");

// The thread's part of y.
class Normalised {
 public:
  static constexpr bool kMakeOnce = ONCE;

  __device__ __forceinline__ Normalised(Buffers& shared, const Tile& tile)
      : shared_(shared), cols_(tile.cols) {}

  __device__ __forceinline__ void take(int turn) {
    const Place place(turn);
    turn_ = turn;
    of_rows_ = &shared_.statistics.of_rows[place.row];
    count_ = cols_ - place.col;
    scale_ = Parameter<Gamma>{shared_.gamma}.at(place);
#if HAS_BETA
    shift_ = Parameter<Beta>{shared_.beta}.at(place);
#endif
  }
  __device__ __forceinline__ void row(int i, float (&y)[kEdge]) const {
    const Vector<X, kEdge> values = KeptRows{shared_.rows}.at(turn_, i).get();
    const float mean = LAYER ? of_rows_[i][0] : 0.0f, rstd = of_rows_[i][1];
#pragma unroll
    for (int j = 0; j < kEdge; ++j) {
      const float shift = HAS_BETA ? shift_.at(j) : 0.0f;
      y[j] = normalised(values.at(j), mean, rstd, scaled_by(scale_.at(j)), shift);
      if (!kEven && j >= count_) y[j] = 0.0f;
    }
  }
  __device__ __forceinline__ void forget() {}  // rows are read again after a barrier

 private:
  Buffers& shared_;
  int cols_, turn_, count_;
  const float (*of_rows_)[2];  // of the thread's rows: mean, rstd
  Vector<Gamma, kEdge> scale_;
  Vector<Beta, kEdge> shift_;
};

extern "C" __global__ void __launch_bounds__(kTileThreads, MIN_BLOCKS)
    norm_quantized_tiles(const X* __restrict__ x, const Gamma* __restrict__ gamma,
                         BETA_PARAMETER ADD_PARAMETER GIVEN_PARAMETER FOUND_PARAMETERS
                             RESULT_PARAMETERS H_PARAMETER FINDS_PARAMETERS Shape shape,
                         float epsilon) {
  extern __shared__ __align__(128) unsigned char memory[];
  Buffers& shared = *reinterpret_cast<Buffers*>(memory);
  const Written written = {data, scales, turned, turned_scales, amax};
#if GIVEN
  wait_for_launches_before();
#endif
  start_statistics(shared.statistics);
  constexpr unsigned kAcross = GIVEN ? (kCols + kTileCols - 1) / kTileCols : kCluster;
  const Tile tile(shape, blockIdx.x % kAcross, blockIdx.x / kAcross);
  const Entry entry(written, given, tile);
  bool whole = kEven && is_aligned<kEdge>(x) && is_whole(shape, tile, written);
#if HAS_ADD
  whole = whole && is_aligned<kEdge>(add) && is_aligned<kEdge>(h);
#endif
  const long long first = tile.row_at(shape, 0) * kCols + tile.first_col;
  if (whole) {
    keep_words(x + first, tile, {shared.rows});
  } else {
    keep_elements(x + first, tile, {shared.rows});
  }
  Parameter<Gamma>{shared.gamma}.fetch(gamma + tile.first_col, tile.cols);
#if HAS_BETA
  Parameter<Beta>{shared.beta}.fetch(beta + tile.first_col, tile.cols);
#endif
#if HAS_ADD
  if (whole) {
    add_words(add + first, h + first, tile, {shared.rows});
  } else {
    add_elements(add + first, h + first, tile, {shared.rows});
  }
#endif
  clear(shared.tile);
  const int row = static_cast<int>(threadIdx.x);
#if GIVEN
  if (row < kTileRows) {
    const long long at = tile.row_at(shape, row < tile.rows ? row : tile.rows - 1);
#if LAYER
    shared.statistics.of_rows[row][0] = mean_in[at];
#endif
    shared.statistics.of_rows[row][1] = rstd_in[at];
  }
  wait_for_words();
#else
  wait_for_words();
  find_statistics({shared.rows}, tile, epsilon, shared.statistics);
  if (tile.first_col == 0 && row < tile.rows) {
#if LAYER
    mean_out[tile.row_at(shape, row)] = shared.statistics.of_rows[row][0];
#endif
    rstd_out[tile.row_at(shape, row)] = shared.statistics.of_rows[row][1];
  }
#endif
  __syncthreads();
  Normalised y(shared, tile);
  quantize_tile(y, y, whole, shape, tile, written, entry, shared.tile);
}
