// Softmax, backward, for rows that fit in the registers of a block or of a cluster of blocks.
//
//   dx[r, k] = scale · y[r, k] · (dy[r, k] - sum_k(y[r, k] · dy[r, k])), rounded once;
//   with CAUSAL over the keys that query r sees, and 0 at the others, which are not read.
//
// Layout: dy, y, dx [rows, COLS] row-major; first as in softmax_forward.cuh.
// Threads: as in softmax_forward.cuh. A thread reads its words of dy and y once and keeps them.
#include "softmax_reduce.cuh"
#include "softmax_row.cuh"

constexpr int kThreads = THREADS_PER_ROW;
constexpr int kRows = ROWS_PER_BLOCK;
constexpr int kParts = PARTS;
constexpr int kPartWords = (kWords + kParts - 1) / kParts;
constexpr int kCount = (kPartWords + kThreads - 1) / kThreads;
static_assert(kThreads * kRows % 32 == 0, "a block is whole warps");

extern "C" __global__ void __launch_bounds__(kThreads* kRows, MIN_BLOCKS)
    softmax_backward(const X* __restrict__ dy, const X* __restrict__ y,
#if FIRST
                     const int* __restrict__ first,
#endif
                     X* __restrict__ dx, const Params p) {
#if !FIRST
  constexpr const int* first = nullptr;
#endif
  extern __shared__ __align__(16) float shared[];
  Exchange<kThreads, kRows, kParts> exchange(shared);
  const bool whole = share_words(dy, y, dx);
  const int begin = kParts > 1 ? static_cast<int>(cluster_rank()) * kPartWords : 0;

  const long long stride = static_cast<long long>(gridDim.x / kParts) * kRows;
  for (long long block_row = static_cast<long long>(blockIdx.x / kParts) * kRows;
       block_row < p.rows; block_row += stride) {
    const long long row = block_row + threadIdx.y;
    const bool active = kRows == 1 || row < p.rows;
    const Keys keys = active ? keys_of(row, nullptr, first, p) : Keys{0, nullptr};
    const X *dy_row = dy + row * kCols, *y_row = y + row * kCols;
    const int shift = shift_of(y_row, whole);
    const int part_end = (begin + kPartWords) * kLength - shift;
    const int end = part_end < kCols ? part_end : kCols;
    const int seen_end = end < keys.count ? end : keys.count;
    const auto column = [&](int i) {
      return (begin + i * kThreads + static_cast<int>(threadIdx.x)) * kLength - shift;
    };

    Word ys[kCount], dys[kCount];
    if (whole) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (column(i) >= seen_end) continue;
        ys[i] = load_columns<true>(y_row, column(i), true);
        dys[i] = load_columns<true>(dy_row, column(i), true);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (column(i) >= seen_end) continue;
        ys[i] = load_columns<true>(y_row, column(i), false);
        dys[i] = load_columns<true>(dy_row, column(i), false);
      }
    }
    exchange.wait_for_cluster();

    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (column(i) >= seen_end) {
        ys[i] = dys[i] = filled(0);
      } else if (!kEven || CAUSAL) {
        hide_outside<0>(ys[i], column(i), keys.count);
        hide_outside<0>(dys[i], column(i), keys.count);
      }
#pragma unroll
      for (int j = 0; j < kLength; ++j) sum += ys[i].at(j) * dys[i].at(j);
    }
    sum = sum_lanes<(kThreads < 32 ? kThreads : 32)>(sum);
    if constexpr (kThreads > 32) {
      sum = summed_parts<kThreads / 32>(exchange.over_block(sum, 0.0f));
    }
    if constexpr (kParts > 1) sum = summed_parts<kParts>(exchange.over_cluster(sum, 0.0f));
    exchange.next();
    if (!active) continue;

#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      forget(ys[i], p);
      forget(dys[i], p);
      float result[kLength];
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        result[j] = p.scale * ys[i].at(j) * (dys[i].at(j) - sum);
      }
      ys[i] = rounded<X>(result);
#if CAUSAL  // 0 also where the row's sum is NaN
      hide_outside<0>(ys[i], column(i), keys.count);
#endif
    }
    X* dx_row = dx + row * kCols;
    if (whole) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (column(i) < end) store_columns(dx_row, column(i), ys[i], true);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (column(i) < end) store_columns(dx_row, column(i), ys[i], false);
      }
    }
  }
}
