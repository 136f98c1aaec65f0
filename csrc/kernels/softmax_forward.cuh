// Softmax, forward, for rows that fit in the registers of a block or of a cluster of blocks.
//
//   y[r, k] = exp(scale · x[r, k]) / sum over the seen k of exp(scale · x[r, k]);  0 where not seen
//
// Layout: x, y [rows, COLS] row-major; mask: bytes, [mask rows, COLS] (MASK 1) or [mask rows]
// (MASK 2); first: where query 0 is among all queries (FIRST).
// Threads: block (THREADS_PER_ROW, ROWS_PER_BLOCK), threadIdx.y picks the row; with PARTS > 1 a row
// is cut over a cluster of that many blocks. A thread reads its words of the row once, as far as a
// causal mask lets the row see, and writes the same places.
// HOLD: weights stay in registers from their sum to the result; else they are computed twice, from
// the packed logits, which takes half the registers for 16-bit types.
#include "softmax_logits.cuh"
#include "softmax_reduce.cuh"

constexpr int kThreads = THREADS_PER_ROW;
constexpr int kRows = ROWS_PER_BLOCK;
constexpr int kParts = PARTS;
constexpr int kPartWords = (kWords + kParts - 1) / kParts;
constexpr int kCount = (kPartWords + kThreads - 1) / kThreads;
static_assert(kThreads * kRows % 32 == 0, "a block is whole warps");

extern "C" __global__ void __launch_bounds__(kThreads* kRows, MIN_BLOCKS)
    softmax_forward(const X* __restrict__ x,
#if MASK
                    const unsigned char* __restrict__ mask,
#endif
#if FIRST
                    const int* __restrict__ first,
#endif
                    X* __restrict__ y, const Params p) {
#if !MASK
  constexpr const unsigned char* mask = nullptr;
#endif
#if !FIRST
  constexpr const int* first = nullptr;
#endif
  extern __shared__ __align__(16) float shared[];
  Exchange<kThreads, kRows, kParts> exchange(shared);
  const bool whole = share_words(x, y);
  const int begin = kParts > 1 ? static_cast<int>(cluster_rank()) * kPartWords : 0;

  // The bound is the block's first row: all its threads make the same number of turns.
  const long long stride = static_cast<long long>(gridDim.x / kParts) * kRows;
  for (long long block_row = static_cast<long long>(blockIdx.x / kParts) * kRows;
       block_row < p.rows; block_row += stride) {
    const long long row = block_row + threadIdx.y;
    const bool active = kRows == 1 || row < p.rows;
    const Keys keys = active ? keys_of(row, mask, first, p) : Keys{0, nullptr};
    const X* x_row = x + row * kCols;
    const int shift = shift_of(x_row, whole);
    const int part_end = (begin + kPartWords) * kLength - shift;
    const int end = part_end < kCols ? part_end : kCols;
    const int seen_end = end < keys.count ? end : keys.count;
    const auto column = [&](int i) {
      return (begin + i * kThreads + static_cast<int>(threadIdx.x)) * kLength - shift;
    };

    Word words[kCount];
    if (whole) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (column(i) < seen_end) words[i] = load_columns<true>(x_row, column(i), true);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (column(i) < seen_end) words[i] = load_columns<true>(x_row, column(i), false);
      }
    }
    exchange.wait_for_cluster();

    float top = negative_infinity();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (column(i) < seen_end) {
        hide(words[i], column(i), keys);
        top = top_of(words[i], top);
      } else {
        words[i] = filled(kHidden);
      }
    }
    top = max_lanes<(kThreads < 32 ? kThreads : 32)>(top);
    const float base = base_of(top);
    float sum = 0.0f;
#if HOLD
    float weights[kCount][kLength];
#endif
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      forget(words[i], p);
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        const float w = weight(signed_logit(words[i].at(j)), base, p.scale);
        sum += w;
#if HOLD
        weights[i][j] = w;
#endif
      }
    }
    Part total = {top, sum_lanes<(kThreads < 32 ? kThreads : 32)>(sum)};
    if constexpr (kThreads > 32) {
      total = merged_parts<kThreads / 32>(exchange.over_block(total.top, total.sum), p.scale);
    }
    if constexpr (kParts > 1) {
      total = merged_parts<kParts>(exchange.over_cluster(total.top, total.sum), p.scale);
    }
    exchange.next();
    if (!active) continue;

    X* y_row = y + row * kCols;
    const bool regular = total.sum > 0.0f;
    if (!regular) {
#pragma unroll 1
      for (int i = 0; i < kCount; ++i) {
        if (column(i) < end)
          store_columns(y_row, column(i), without_softmax(column(i), keys), whole);
      }
      continue;
    }
    const float inverse = 1.0f / total.sum;
    const float total_base = base_of(total.top);
#if HOLD
    const float factor =
        kThreads > 32 || kParts > 1 ? weight(top, total_base, p.scale) * inverse : inverse;
#endif
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float result[kLength];
#if !HOLD
      forget(words[i], p);
#endif
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
#if HOLD
        result[j] = weights[i][j] * factor;
#else
        result[j] = weight(signed_logit(words[i].at(j)), total_base, p.scale) * inverse;
#endif
      }
      words[i] = rounded<X>(result);
    }
    if (whole) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (column(i) < end) store_columns(y_row, column(i), words[i], true);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (column(i) < end) store_columns(y_row, column(i), words[i], false);
      }
    }
  }
}
