// LayerNorm and RMSNorm, backward, rows that many blocks share: the sums of parts of rows.
//
//   sums[row, part] = sum_c(w · xhat), sum_c(w)   over the part's columns; w, xhat as in
//                                                 norm_backward.cuh
//
// Layout: dy, x [rows, COLS] row-major; gamma [COLS]; mean, rstd [rows] float32; sums
// [rows, parts, 2] float32.
// Threads: as in norm_split.cuh.
#include "norm_backward_parameters.cuh"
#include "norm_split.cuh"

extern "C" __global__ void __launch_bounds__(kThreads)
    norm_backward_sums(const X* __restrict__ dy, const X* __restrict__ x,
                       const Gamma* __restrict__ gamma,
                       MEAN_PARAMETER const float* __restrict__ rstd, float* __restrict__ sums,
                       long long rows) {
  using Sum = RowSum<kThreads, 1, 2>;
  __shared__ Sum::Buffers buffers;
  Sum sum_over_block(buffers);
  const bool as_words = moves_as_words(x, dy);
  const bool gamma_aligned = is_aligned<kLength>(gamma);
  for (long long id = blockIdx.x; id < rows * kParts; id += gridDim.x) {
    const PartOfRow of(id, x, as_words);
    const long long offset = of.row * kCols;
    Vector<X, kLength> values[kEach], cotangents[kEach];
    Vector<Gamma, kLength> scale[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (!of.owns(i)) continue;
      values[i] = load_of_row<false>(x + offset, of.column(i), as_words);
      cotangents[i] = load_of_row<false>(dy + offset, of.column(i), as_words);
      scale[i] = load_parameter(gamma + of.column(i), of.column(i), gamma_aligned);
    }
    const float row_mean = LAYER ? mean[of.row] : 0.0f;
    const float row_rstd = rstd[of.row];
    float both[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (!of.owns(i)) continue;
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        const float xhat = (values[i].at(j) - row_mean) * row_rstd;
        const float w = cotangents[i].at(j) * (scale[i].at(j) + (ZERO_CENTERED ? 1.0f : 0.0f));
        both[0] += w * xhat;
        both[1] += w;
      }
    }
    sum_over_block(both);
    if (threadIdx.x == 0) {
      sums[2 * id] = both[0];
      sums[2 * id + 1] = both[1];
    }
  }
}
