// Softmax, backward, for long rows that fit in the shared memory of a block or of a cluster of
// blocks (sm_90 and newer).
//
//   dy, y, first, dx as in softmax_backward.cuh; threads as in softmax_forward_staged.cuh.
#include "softmax_chunks.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    softmax_backward_staged(const X* __restrict__ dy, const X* __restrict__ y,
#if FIRST
                            const int* __restrict__ first,
#endif
                            X* __restrict__ dx, const Params p) {
#if !FIRST
  constexpr const int* first = nullptr;
#endif
  extern __shared__ __align__(128) unsigned char memory[];
  const bool whole = share_words(dy, y, dx);
  const X* const operands[2] = {y, dy};
  Exchange<kThreads, 1, kParts> exchange(reinterpret_cast<float*>(memory));
  const Chunks<2> chunks(operands, memory);
  const int part = blockIdx.x % kParts;

  // A block a row: a grid has too few blocks only for rows that no memory holds.
  const long long row = blockIdx.x / kParts;
  const X *y_row = y + row * kCols, *dy_row = dy + row * kCols;
  X* dx_row = dx + row * kCols;
  const int count = keys_of(row, nullptr, first, p).count;
  const RowPart words(whole ? y_row : nullptr, count, part);
  if (whole) chunks.fetch(row, words, nullptr);
  __syncthreads();  // all know of the barriers
  const auto read = [&](int c, Word(&ys)[kBatch], Word(&dys)[kBatch]) {
    if (whole) {
      chunks.wait(c);
      chunks.read(c, 0, ys);
      chunks.read(c, 1, dys);
    } else {
      words.read_elements(ys, y_row, c);
      words.read_elements(dys, dy_row, c);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (!words.sees(c, i)) {
        ys[i] = dys[i] = filled(0);
      } else if (!kEven || CAUSAL) {
        const int column = words.column(words.word(c, i));
        hide_outside<0>(ys[i], column, count);
        hide_outside<0>(dys[i], column, count);
      }
    }
  };
  if (CAUSAL) words.store_zeros(dx_row, whole);
  exchange.wait_for_cluster();

  const int seen_chunks = words.seen_chunks();
  float sum = 0.0f;
  for (int c = 0; c < seen_chunks; ++c) {
    Word ys[kBatch], dys[kBatch];
    read(c, ys, dys);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int j = 0; j < kLength; ++j) sum += ys[i].at(j) * dys[i].at(j);
    }
  }
  sum = sum_lanes<32>(sum);
  constexpr int kPairs = decltype(exchange)::kPairs;
  if constexpr (kPairs > 1) sum = summed_parts<kPairs>(exchange.over_row(sum, 0.0f));

  for (int c = 0; c < seen_chunks; ++c) {
    Word ys[kBatch], dys[kBatch];
    read(c, ys, dys);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      float result[kLength];
#pragma unroll
      for (int j = 0; j < kLength; ++j) result[j] = p.scale * ys[i].at(j) * (dys[i].at(j) - sum);
      ys[i] = rounded<X>(result);
      // Where the sum is NaN too.
      if (CAUSAL) hide_from<0>(ys[i], words.column(words.word(c, i)), count);
    }
    words.store_words(dx_row, ys, c, whole);
  }
}
