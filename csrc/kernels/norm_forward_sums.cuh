// LayerNorm and RMSNorm, forward, rows that many blocks share: the moments of parts of rows.
//
//   h = x + add                                   (HAS_ADD; rounded to x's type, also a result)
//   moments[row, part] = count, mean (0 for rms), sum of squared distances from the mean
//
// Layout: x, add, h [rows, COLS] row-major; moments [rows, parts, 3] float32.
// Threads: as in norm_split.cuh.
#include "moments.cuh"
#include "norm_parameters.cuh"
#include "norm_split.cuh"

extern "C" __global__ void __launch_bounds__(kThreads)
    norm_forward_sums(const X* __restrict__ x,
                      ADD_PARAMETER H_PARAMETER float* __restrict__ moments, long long rows) {
  __shared__ Moments shared[32];
#if HAS_ADD
  const bool as_words = moves_as_words(x, add, h);
#else
  const bool as_words = moves_as_words(x);
#endif
  for (long long id = blockIdx.x; id < rows * kParts; id += gridDim.x) {
    const PartOfRow of(id, x, as_words);
    const long long offset = of.row * kCols;
    Vector<X, kLength> values[kEach];
#if HAS_ADD
    Vector<X, kLength> addend[kEach];
#endif
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (!of.owns(i)) continue;
      values[i] = load_of_row<false>(x + offset, of.column(i), as_words);
#if HAS_ADD
      addend[i] = load_of_row<true>(add + offset, of.column(i), as_words);
#endif
    }
    Moments all = {0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (!of.owns(i)) continue;
#if HAS_ADD
      float total[kLength];
#pragma unroll
      for (int j = 0; j < kLength; ++j) total[j] = values[i].at(j) + addend[i].at(j);
      values[i] = rounded<X>(total);
      store_of_row<false>(h + offset, of.column(i), values[i], as_words);
#endif
      all.count += static_cast<float>(count_inside(of.column(i)));
#pragma unroll
      for (int j = 0; j < kLength; ++j) all.mean += LAYER ? values[i].at(j) : 0.0f;
    }
    if (LAYER && all.count > 0.0f) all.mean /= all.count;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (!of.owns(i)) continue;
      const bool whole = is_inside(of.column(i));
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        if (LAYER && !whole && !is_column(of.column(i) + j))
          continue;  // (0 - mean)^2 must not count
        const float centred = values[i].at(j) - all.mean;
        all.squares += centred * centred;
      }
    }
    all = merged_over_block<kThreads>(all, shared);
    if (threadIdx.x == 0) {
      moments[3 * id] = all.count;
      moments[3 * id + 1] = all.mean;
      moments[3 * id + 2] = all.squares;
    }
  }
}
