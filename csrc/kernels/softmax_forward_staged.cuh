// Softmax, forward, for long rows that fit in the shared memory of a block or of a cluster of
// blocks (sm_90 and newer).
//
//   x, mask, first, y as in softmax_forward.cuh.
//
// Threads: PARTS blocks of THREADS_PER_ROW a row, a cluster where there are several; the row comes
// into shared memory in chunks (softmax_chunks.cuh).
// Where x and y differ in alignment, or a mask is on no word, elements are read one by one, twice.
#include "softmax_chunks.cuh"
#include "softmax_logits.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    softmax_forward_staged(const X* __restrict__ x,
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
  extern __shared__ __align__(128) unsigned char memory[];
  const bool whole = share_words(x, y) && (!kMaskInChunks || is_on_word(mask));
  const X* const operands[1] = {x};
  Exchange<kThreads, 1, kParts> exchange(reinterpret_cast<float*>(memory));
  const Chunks<1> chunks(operands, memory);
  const int part = blockIdx.x % kParts;

  // A block a row: a grid has too few blocks only for rows that no memory holds.
  const long long row = blockIdx.x / kParts;
  const X* x_row = x + row * kCols;
  X* y_row = y + row * kCols;
  const Keys keys = keys_of(row, mask, first, p);
  const RowPart words(whole ? x_row : nullptr, keys.count, part);
  if (whole) chunks.fetch(row, words, keys.hidden);
  __syncthreads();  // all know of the barriers
  const auto read = [&](int c, Word(&to)[kBatch]) {
    MaskBytes masks[kBatch];
    if (MASK == 1 && !(kMaskInChunks && whole)) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (!words.sees(c, i)) continue;
        masks[i] = mask_bytes(keys.hidden, keys.hidden + words.column(words.word(c, i)));
      }
    }
    if (whole) {
      chunks.wait(c);
      chunks.read(c, 0, to);
      if (kMaskInChunks) chunks.read_mask(c, masks);
    } else {
      words.read_elements(to, x_row, c);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (words.sees(c, i)) {
        hide(to[i], words.column(words.word(c, i)), keys, masks[i]);
      } else {
        to[i] = filled(kHidden);
      }
    }
  };
  if (CAUSAL || MASK == 2) words.store_zeros(y_row, whole);
  exchange.wait_for_cluster();

  const int seen_chunks = words.seen_chunks();
  Part total = {negative_infinity(), 0.0f};
  for (int c = 0; c < seen_chunks; ++c) {
    Word batch[kBatch];
    read(c, batch);
    add_words(total, batch, p.scale);
  }
  total = merged_lanes<32>(total, p.scale);
  constexpr int kPairs = decltype(exchange)::kPairs;
  if constexpr (kPairs > 1) {
    total = merged_parts<kPairs>(exchange.over_row(total.top, total.sum), p.scale);
  }

  const bool regular = total.sum > 0.0f;
  const Weights weights(base_of(total.top), p.scale);
  const float inverse = fast_reciprocal(total.sum) * weights.rest;
  for (int c = 0; c < seen_chunks; ++c) {
    Word batch[kBatch];
    read(c, batch);
    if (!regular) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        batch[i] = without_softmax(words.column(words.word(c, i)), keys);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) batch[i] = softmax_of(batch[i], weights, inverse);
    }
    words.store_words(y_row, batch, c, whole);
  }
}
