// LayerNorm and RMSNorm, forward, for rows that fit in registers.
//
//   h = x + add                                   (HAS_ADD; rounded to x's type, also a result)
//   layer: mean = sum_c h / n, rstd = 1 / sqrt(sum_c (h - mean)^2 / n + epsilon)
//   rms:   mean = 0,           rstd = 1 / sqrt(sum_c h^2 / n + epsilon)
//   y = (h - mean) · rstd · g + beta,  g = gamma or 1 + gamma (ZERO_CENTERED), rounded once
//
// Layout: x, add, y, h [rows, COLS] row-major; gamma, beta [COLS]; mean, rstd [rows] float32.
// Threads: block (THREADS_PER_ROW, ROWS_PER_BLOCK), threadIdx.y picks the row, blocks for all rows.
// A thread reads its vectors of the row once, keeps them, and writes the same places.
//
// All pointers are on 16 bytes.
#include "norm_parameters.cuh"
#include "reduce.cuh"

constexpr int kCols = COLS;
constexpr int kLength = VECTOR;
constexpr int kThreadsPerRow = THREADS_PER_ROW;
constexpr int kRowsPerBlock = ROWS_PER_BLOCK;
constexpr bool kStream = STREAM;
static_assert(kCols % kLength == 0, "a row is whole vectors");
static_assert(kThreadsPerRow * kRowsPerBlock % 32 == 0, "a block is whole warps");

using Slice = RowSlice<kCols / kLength, kThreadsPerRow, kLength>;
#if LAYER
using Statistics = RowMoments<kThreadsPerRow, kRowsPerBlock, kCols / kLength, kLength>;
#else
using Statistics = RowSum<kThreadsPerRow, kRowsPerBlock, 1>;
#endif

// Replaces the row by its result. gamma and beta are read where they are used, since to hold all of
// a float32 pair of them would take more registers than the row itself.
__device__ __forceinline__ void scale_row(Vector<X, kLength> (&values)[Slice::kCount],
                                          const Gamma* __restrict__ gamma,
                                          const Beta* __restrict__ beta, float mean, float rstd) {
#pragma unroll
  for (int i = 0; i < Slice::kCount; ++i) {
    if (!Slice::owns(i)) continue;
    const Vector<Gamma, kLength> scale = load<true, false, kLength>(gamma + Slice::column(i));
#if HAS_BETA
    const Vector<Beta, kLength> shift = load<true, false, kLength>(beta + Slice::column(i));
#endif
    values[i].forget();
    float result[kLength];
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      const float g = scale.at(j) + (ZERO_CENTERED ? 1.0f : 0.0f);
      result[j] = (values[i].at(j) - mean) * rstd * g;
#if HAS_BETA
      result[j] += shift.at(j);
#endif
    }
    values[i] = rounded<X>(result);
  }
}

extern "C" __global__ void __launch_bounds__(kThreadsPerRow* kRowsPerBlock, MIN_BLOCKS)
    norm_forward(const X* __restrict__ x, const Gamma* __restrict__ gamma,
                 BETA_PARAMETER ADD_PARAMETER X* __restrict__ y,
                 H_PARAMETER MEAN_PARAMETER float* __restrict__ rstd_out, long long rows,
                 float epsilon) {
  __shared__ Statistics::Buffers buffers;
  Statistics statistics(buffers);

  const long long row = static_cast<long long>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  const bool active = kRowsPerBlock == 1 || row < rows;
  const long long offset = row * kCols;

  Vector<X, kLength> values[Slice::kCount];
  Slice::load_all<kStream>(values, x + offset, active);
#if HAS_ADD
  Vector<X, kLength> addend[Slice::kCount];
  Slice::load_all<kStream>(addend, add + offset, active);
#pragma unroll
  for (int i = 0; i < Slice::kCount; ++i) {
    float total[kLength];
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      total[j] = values[i].at(j) + addend[i].at(j);
    }
    values[i] = rounded<X>(total);
  }
  Slice::store_all<kStream>(h + offset, values, active);
#endif

  const auto squares_about = [&](float centre) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < Slice::kCount; ++i) {
      values[i].forget();
      if (!Slice::owns(i)) continue;  // (0 - centre)^2 must not count
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        const float centred = values[i].at(j) - centre;
        total += centred * centred;
      }
    }
    return total;
  };
#if LAYER
  float mean;
  float squares;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Slice::kCount; ++i) {
#pragma unroll
    for (int j = 0; j < kLength; ++j) sum += values[i].at(j);
  }
  statistics(sum, squares_about, mean, squares);
#else
  constexpr float mean = 0.0f;
  float sums[1] = {squares_about(mean)};
  statistics(sums);
  const float squares = sums[0];
#endif
  const float rstd = inverse_root(squares * (1.0f / kCols) + epsilon);

  if (active && threadIdx.x == 0) {
#if LAYER
    mean_out[row] = mean;
#endif
    rstd_out[row] = rstd;
  }

  // Where rows are packed and gamma is too, its loads wait for the row's statistics.
  if (sizeof(X) < 4 && sizeof(Gamma) < 4 && is_misplaced<kLength>(gamma)) return;
  scale_row(values, gamma, beta, mean, rstd);
  if (HAS_ADD && is_misplaced<kLength>(y)) return;  // up to 2 % faster
  Slice::store_all<kStream>(y + offset, values, active);
}
