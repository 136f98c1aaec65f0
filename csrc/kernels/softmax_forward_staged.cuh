// Softmax, forward, for long rows that fit in the shared memory of a block or of a cluster of
// blocks (sm_90 and newer).
//
//   x, mask, first, y as in softmax_forward.cuh.
//
// Threads: PARTS blocks of THREADS_PER_ROW a row, a cluster where there are several; the grid
// strides over rows, which stream through shared memory (softmax_ring.cuh).
// Where x and y differ in alignment nothing streams: elements are read one by one, twice.
#include "softmax_logits.cuh"
#include "softmax_ring.cuh"

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
  Exchange<kThreads, 1, kParts> exchange(reinterpret_cast<float*>(memory + kRingBytes));
  const bool whole = share_words(x, y);
  const X* const operands[1] = {x};
  const Ring<1> ring(operands, mask, first, p, memory,
                     memory + SHARED_BYTES - kDepth * kChunkWords * 16);
  if (kParts == 1) __syncthreads();
  exchange.wait_for_cluster();
  if (whole) ring.start();

  int chunk = 0;  // the row's first
  for (long long row = blockIdx.x / kParts; row < p.rows; row += gridDim.x / kParts) {
    const X* x_row = x + row * kCols;
    X* y_row = y + row * kCols;
    const Keys keys = keys_of(row, mask, first, p);
    const RowPart words(whole ? x_row : nullptr, keys.count, ring.part);
    const auto read = [&](int c, Word(&to)[kBatch]) {
      MaskBytes masks[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (MASK == 1 && words.sees(c, i)) {
          masks[i] = mask_bytes(keys.hidden, keys.hidden + words.column(words.word(c, i)));
        }
      }
      if (whole) {
        ring.wait(chunk + c);
        ring.read(chunk + c, 0, to);
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
    if (CAUSAL) words.store_zeros(y_row, whole);

    const int seen_words = words.seen_end - words.begin;
    const int seen_chunks = seen_words > 0 ? (seen_words + kChunkWords - 1) / kChunkWords : 0;
    Part total = {negative_infinity(), 0.0f};
    for (int c = 0; c < seen_chunks; ++c) {
      Word batch[kBatch];
      read(c, batch);
      add_words(total, batch, p.scale);
    }
    total = merged_lanes<32>(total, p.scale);
    if constexpr (kThreads > 32) {
      total = merged_parts<kThreads / 32>(exchange.over_block(total.top, total.sum), p.scale);
    }
    if constexpr (kParts > 1) {
      total = merged_parts<kParts>(exchange.over_cluster(total.top, total.sum), p.scale);
    }
    exchange.next();

    const bool regular = total.sum > 0.0f;
    const float base = base_of(total.top);
    const float inverse = fast_reciprocal(total.sum);
    for (int c = 0; c < kChunks; ++c) {
      Word batch[kBatch];
      if (c < seen_chunks) read(c, batch);
      if (whole) ring.leave(chunk + c);
      if (!regular) {
        for (int i = 0; i < kBatch; ++i) {
          const int word = words.word(c, i);
          if (word >= words.end) break;
          const int column = words.column(word);
          store_columns(y_row, column, without_softmax(column, keys), whole);
        }
      } else if (c < seen_chunks) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) batch[i] = softmax_of(batch[i], base, inverse, p.scale);
        words.store_words(y_row, batch, c, whole);
      }
    }
    chunk += kChunks;
  }
}
