// LayerNorm and RMSNorm, forward, their values quantised along rows, for rows that fit in
// registers.
//
//   h, mean, rstd as in norm_forward.cuh; y in float32 as in norm_values.cuh
//   WRITES 0: no more than these. 1: data, scales, amax of y as in quantize_tiles.cuh (ROWS). 2: y.
//
// Layout: as in norm_forward.cuh; data [rows, COLS], scales [rows, ceil(COLS / block)]; one given
// scale and one amax for `rows_of_entry` rows.
// Threads: block (THREADS_PER_ROW, ROWS_PER_BLOCK), threadIdx.y picks the row. Neighbouring lanes
// own neighbouring vectors, so that a block of elements lies in a warp.
#include "mean.cuh"
#include "norm_parameters.cuh"
#include "quantize_parameters.cuh"
#include "quantize_vector.cuh"

constexpr int kCols = COLS;
constexpr int kLength = VECTOR;
constexpr int kThreadsPerRow = THREADS_PER_ROW;
constexpr int kRowsPerBlock = ROWS_PER_BLOCK;
constexpr bool kQuantizes = ROWS;
static_assert(kQuantizes == (WRITES == 1) && !COLUMNS, "what is quantised is rows");
static_assert(kCols % kLength == 0, "a row is whole vectors");
static_assert(kThreadsPerRow * kRowsPerBlock % 32 == 0, "a block is whole warps");

using Slice = RowSlice<kCols / kLength, kThreadsPerRow, kLength>;
using Statistics = RowSum<kThreadsPerRow, kRowsPerBlock, 1>;

constexpr int kBlockLanes = kBlock / kLength;
static_assert(!kQuantizes || kScales == kTensor ||
                  (kBlockLanes <= 32 && kThreadsPerRow % kBlockLanes == 0),
              "a block of elements lies in a warp");

// Order: SCALING, ADD, GIVEN, Y, RESULTS, H, MEAN.
#if WRITES
#define SCALING_PARAMETERS const Gamma* __restrict__ gamma, BETA_PARAMETER
#else
#define SCALING_PARAMETERS
#endif
#if WRITES == 2
#define Y_PARAMETER float* __restrict__ y_out,
#else
#define Y_PARAMETER
[[maybe_unused]] constexpr float* y_out = nullptr;
#endif

extern "C" __global__ void __launch_bounds__(kThreadsPerRow* kRowsPerBlock, MIN_BLOCKS)
    norm_quantized(const X* __restrict__ x,
                   SCALING_PARAMETERS ADD_PARAMETER GIVEN_PARAMETER Y_PARAMETER RESULT_PARAMETERS
                       H_PARAMETER MEAN_PARAMETER float* __restrict__ rstd_out,
                   long long rows, long long rows_of_entry, float epsilon) {
#if !WRITES
  let_launches_after_start();
#endif
  __shared__ Statistics::Buffers buffers;
  Statistics statistics(buffers);
  const long long row = static_cast<long long>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  const bool active = row < rows;
  const long long offset = row * kCols;
#if WRITES
  const bool alone = rows_of_entry == rows;  // all rows are one entry
  [[maybe_unused]] const long long entry = alone || !active ? 0 : row / rows_of_entry;
#endif

  Vector<X, kLength> values[Slice::kCount];
  Slice::load_all<true>(values, x + offset, active);
#if HAS_ADD
  Vector<X, kLength> addend[Slice::kCount];
  Slice::load_all<true>(addend, add + offset, active);
#pragma unroll
  for (int i = 0; i < Slice::kCount; ++i) values[i] = sum_of<kLength>(values[i], addend[i]);
  Slice::store_all<true>(h + offset, values, active);
#endif
#if AMAX
  const unsigned seen = seen_so_far(amax + entry);
#endif
#if SCALES == 0 && ROWS
  const float factor_of_entry = reciprocal(given[entry]);
#elif WRITES
  constexpr float factor_of_entry = 1.0f;
#endif

  float sums[1] = {0.0f};
#if LAYER
#pragma unroll
  for (int i = 0; i < Slice::kCount; ++i) {
#pragma unroll
    for (int j = 0; j < kLength; ++j) sums[0] += values[i].at(j);
  }
  statistics(sums);
  const float mean = mean_of<kCols>(sums[0]);
  sums[0] = 0.0f;
#else
  constexpr float mean = 0.0f;
#endif
#pragma unroll
  for (int i = 0; i < Slice::kCount; ++i) {
    values[i].forget();
    if (!Slice::owns(i)) continue;  // (0 - mean)^2 must not count
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      const float centred = LAYER ? values[i].at(j) - mean : values[i].at(j);
      sums[0] += centred * centred;
    }
  }
  statistics(sums);
  const float rstd = inverse_root(sums[0] * (1.0f / kCols) + epsilon);
  if (active && threadIdx.x == 0) {
#if LAYER
    mean_out[row] = mean;
#endif
    rstd_out[row] = rstd;
  }

#if WRITES
  int largest = 0;
#pragma unroll
  for (int i = 0; i < Slice::kCount; ++i) {
    const int column = Slice::column(i);
    const bool owned = active && Slice::owns(i);
    float y[kLength] = {};
    if (owned) {
      const Vector<Gamma, kLength> scale = load<true, false, kLength>(gamma + column);
#if HAS_BETA
      const Vector<Beta, kLength> shift = load<true, false, kLength>(beta + column);
#endif
      values[i].forget();
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
#if HAS_BETA
        const float b = shift.at(j);
#else
        constexpr float b = 0.0f;
#endif
        y[j] = normalised(values[i].at(j), mean, rstd, scaled_by(scale.at(j)), b);
        if (AMAX) largest = larger(largest, magnitude_key(y[j]));
      }
    }
    float factor = factor_of_entry;
#if SCALES
    int key = 0;
#pragma unroll
    for (int j = 0; j < kLength; ++j) key = larger(key, finite_key(y[j]));
    const Scaling<Scale> scaling(bits_of_finite(largest_of_lanes<1, kBlockLanes>(key)));
    factor = scaling.factor;
    if (owned && column % kBlock == 0) {
      constexpr long long kScalesOfRow = (kCols + kBlock - 1) / kBlock;
      scales[row * kScalesOfRow + column / kBlock] = scaling.written;
    }
#endif
    if (owned) {
      if constexpr (kQuantizes) {
        write_fp8(data + offset + column, y, factor, true);
      } else {
        store<true, true, kLength>(y_out + offset + column, rounded<float>(y));
      }
    }
  }
#if AMAX
  constexpr int kLanes = kThreadsPerRow < 32 ? kThreadsPerRow : 32;
  largest = largest_of_lanes<1, kLanes>(largest);
  if (alone) largest = largest_of_lanes<kLanes, 32>(largest);
  const int lane = (threadIdx.y * kThreadsPerRow + threadIdx.x) % 32;
  if (active && lane % (alone ? 32 : kLanes) == 0) report(amax + entry, seen, largest);
#endif
#endif
}
