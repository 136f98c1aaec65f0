// LayerNorm and RMSNorm, backward, rows that many blocks share: the results.
//
//   dx, partials as in norm_backward.cuh, of the sums of norm_backward_sums.cuh; one row of
//   partials a group of rows.
//
// Layout: as in norm_backward.cuh; sums [rows, parts, 2] float32.
// Threads: as in norm_split.cuh.
#include "norm_backward_parameters.cuh"
#include "norm_split.cuh"

struct RowStatistics {
  float mean, rstd, mean_wx, mean_w;
};

__device__ __forceinline__ void write_partials(const float (&terms)[kLength], int column,
                                               float* __restrict__ partials) {
  if constexpr (kRagged) {
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      if (is_column(column + j)) partials[column + j] = terms[j];
    }
  } else {
    store<true, true, kLength>(partials + column, rounded<float>(terms));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    norm_backward_split(const X* __restrict__ dy, const X* __restrict__ x,
                        const Gamma* __restrict__ gamma,
                        MEAN_PARAMETER const float* __restrict__ rstd,
                        DH_PARAMETER const float* __restrict__ sums, X* __restrict__ dx,
                        float* __restrict__ partials, long long rows) {
  __shared__ RowStatistics statistics[kBatch];
  bool as_words = moves_as_words(x, dy, dx);
#if HAS_ADD
  as_words = as_words && moves_as_words(x, dh);
#endif
  const Columns columns(x, rows, as_words);
  const int c = columns.column;
  Vector<Gamma, kLength> scale{};
  if (columns.active()) scale = load_parameter(gamma + c, c, is_aligned<kLength>(gamma));
  float gamma_terms[kLength] = {};
#if HAS_BETA
  float beta_terms[kLength] = {};
#endif

  const auto bring_together = [&](long long row, int slot) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    float wx = 0.0f, w = 0.0f;
#pragma unroll 4
    for (int p = lane; row >= 0 && p < kParts; p += kLanes) {
      wx += sums[2 * (row * kParts + p)];
      w += sums[2 * (row * kParts + p) + 1];
    }
    wx = sum_lanes<kLanes>(wx) * (1.0f / kCols);
    w = LAYER ? sum_lanes<kLanes>(w) * (1.0f / kCols) : 0.0f;
    if (lane != 0 || row < 0) return;
    statistics[slot] = {LAYER ? mean[row] : 0.0f, rstd[row], wx, w};
  };
  const auto work = [&](long long row, int slot, int n) {
    Vector<X, kLength> values[kRowsAtOnce], cotangents[kRowsAtOnce];
#if HAS_ADD
    Vector<X, kLength> residual[kRowsAtOnce];
#endif
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (r >= n) break;
      const long long offset = (row - r * columns.groups) * kCols;
      values[r] = load_of_row<true>(x + offset, c, as_words);
      cotangents[r] = load_of_row<true>(dy + offset, c, as_words);
#if HAS_ADD
      residual[r] = load_of_row<true>(dh + offset, c, as_words);
#endif
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (r >= n) break;
      const RowStatistics of = statistics[slot + r];
      float result[kLength];
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        const float xhat = (values[r].at(j) - of.mean) * of.rstd;
        const float cotangent = cotangents[r].at(j);
        const float w = cotangent * (scale.at(j) + (ZERO_CENTERED ? 1.0f : 0.0f));
        result[j] = of.rstd * (w - of.mean_w - xhat * of.mean_wx);
#if HAS_ADD
        result[j] += residual[r].at(j);
#endif
        gamma_terms[j] += cotangent * xhat;
#if HAS_BETA
        beta_terms[j] += cotangent;
#endif
      }
      store_of_row<true>(dx + (row - r * columns.groups) * kCols, c, rounded<X>(result), as_words);
    }
  };
  columns.for_rows(bring_together, work);

  if (!columns.active()) return;
  write_partials(gamma_terms, c, partials + columns.group * kCols);
#if HAS_BETA
  write_partials(beta_terms, c, partials + (columns.groups + columns.group) * kCols);
#endif
}
