// LayerNorm and RMSNorm, forward, rows that many blocks share: the results.
//
//   mean, rstd, y as in norm_forward.cuh, of h and the moments of norm_forward_sums.cuh
//
// Layout: h, y [rows, COLS] row-major; gamma, beta [COLS]; moments [rows, parts, 3] float32; mean,
// rstd [rows] float32.
// Threads: as in norm_split.cuh.
#include "moments.cuh"
#include "norm_parameters.cuh"
#include "norm_split.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    norm_forward_split(const X* __restrict__ h, const Gamma* __restrict__ gamma,
                       BETA_PARAMETER const float* __restrict__ moments, X* __restrict__ y,
                       MEAN_PARAMETER float* __restrict__ rstd_out, long long rows, float epsilon) {
  __shared__ float means[kBatch], rstds[kBatch];
  const bool as_words = moves_as_words(h, y);
  const Columns columns(h, rows, as_words);
  const int c = columns.column;
  Vector<Gamma, kLength> scale{};
  if (columns.active()) scale = load_parameter(gamma + c, c, is_aligned<kLength>(gamma));
#if HAS_BETA
  Vector<Beta, kLength> shift{};
  if (columns.active()) shift = load_parameter(beta + c, c, is_aligned<kLength>(beta));
#endif

  const auto bring_together = [&](long long row, int slot) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    Moments all = {0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (int p = lane; row >= 0 && p < kParts; p += kLanes) {
      const float* part = moments + 3 * (row * kParts + p);
      all = merged(all, {part[0], part[1], part[2]});
    }
    all = merged_lanes<kLanes>(all);
    if (lane != 0 || row < 0) return;
    means[slot] = all.mean;
    rstds[slot] = 1.0f / sqrtf(all.squares * (1.0f / kCols) + epsilon);
    if (!columns.is_first_block()) return;
#if LAYER
    mean_out[row] = all.mean;
#endif
    rstd_out[row] = rstds[slot];
  };
  const auto work = [&](long long row, int slot, int n) {
    Vector<X, kLength> values[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (r >= n) break;
      values[r] = load_of_row<true>(h + (row - r * columns.groups) * kCols, c, as_words);
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (r >= n) break;
      float result[kLength];
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        const float g = scale.at(j) + (ZERO_CENTERED ? 1.0f : 0.0f);
        result[j] = (values[r].at(j) - means[slot + r]) * rstds[slot + r] * g;
#if HAS_BETA
        result[j] += shift.at(j);
#endif
      }
      store_of_row<true>(y + (row - r * columns.groups) * kCols, c, rounded<X>(result), as_words);
    }
  };
  columns.for_rows(bring_together, work);
}
