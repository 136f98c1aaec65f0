// Softmax, forward, for rows that fit in the registers of a block or of a cluster of blocks.
//
//   y[r, k] = exp(scale · x[r, k]) / sum over the seen k of exp(scale · x[r, k]);  0 where not seen
//
// Layout: x, y [rows, COLS] row-major; mask: bytes, [mask rows, COLS] (MASK 1) or [mask rows]
// (MASK 2); first: where query 0 is among all queries (FIRST).
// Threads: block (THREADS_PER_ROW, ROWS_PER_BLOCK), threadIdx.y picks the row; with PARTS > 1 a row
// is cut over a cluster of that many blocks. A thread reads its pieces of the row
// (softmax_pieces.cuh) once, as far as a causal mask lets the row see, and writes the same places.
// HOLD: weights stay in registers from their sum to the result; else they are computed twice, from
// the packed logits, which takes half the registers for 16-bit types.
#include "softmax_logits.cuh"
#include "softmax_pieces.cuh"

// So many words leave registers to unpack one at a time. The compiler, which would unpack more,
// does not do so past a branch; that this one is never taken it does not know.
constexpr bool kCrowded = !HOLD && kCount >= 8 && sizeof(X) < 4;

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
  const int part = kParts > 1 ? static_cast<int>(cluster_rank()) : 0;
  constexpr int kLanes = kThreads < 32 ? kThreads : 32;

  // The bound is the block's first row: all its threads make the same number of turns. Those past
  // the last row read that one again.
  long long block_row = static_cast<long long>(blockIdx.x / kParts) * kRows;
  do {
    const long long own_row = block_row + threadIdx.y;
    const bool active = kRows == 1 || own_row < p.rows;
    const long long row = active ? own_row : p.rows - 1;
    const Keys keys = keys_of(row, mask, first, p);
    const X* x_row = x + row * kCols;
    X* y_row = y + row * kCols;
    const Pieces pieces(x_row, part, keys.count);

    Word words[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (pieces.sees(i)) words[i] = pieces.load_ith<kStreamedLoads>(x_row, i);
    }
    float edge = negative_infinity();
    if (!kEven && pieces.edge < keys.count) {
      edge = signed_logit(element(x_row[pieces.edge]));
      if (SCALE_SIGN == 0) edge *= 0.0f;
    }
    const auto mask_of = [&](int i) {
      return mask_bytes_of_whole(keys.hidden, keys.hidden + pieces.first, i * Pieces::kStride);
    };
    MaskBytes masks[kCount];
    if (MASK == 1) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (!kCrowded && pieces.sees(i)) masks[i] = mask_of(i);
      }
      if (!kEven && pieces.edge < keys.count && keys.hidden[pieces.edge]) {
        edge = negative_infinity();
      }
    }
    if (CAUSAL && active) pieces.store_zeros(y_row, keys.count);
    if (kLeavesOut && part >= pieces.parts) continue;
    exchange.wait_for_cluster();

#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!pieces.sees(i)) {
        words[i] = filled(kHidden);
        continue;
      }
      if (SCALE_SIGN == 0) forget_finite(words[i]);
      if (CAUSAL) hide_from<kHidden>(words[i], pieces.column(i), keys.count);
      if (MASK == 1) hide_masked<kHidden>(words[i], kCrowded ? mask_of(i) : masks[i]);
      if (MASK == 1 && kCrowded) keep_order();
    }
    const float top = max_lanes<kLanes>(fmaxf(top_of(words), edge));
    const float base = base_of(top);
    edge = weight(edge, base, p.scale);
    float sum = kEven ? 0.0f : edge;
#if HOLD
    float weights[kCount][kLength];
#endif
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#if HOLD
#pragma unroll
      for (int j = 0; j < kLength; ++j) weights[i][j] = 0.0f;
#endif
      if ((CAUSAL && !pieces.sees(i)) || (kCrowded && p.zero)) continue;
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        const float w = weight(signed_logit(words[i].at(j)), base, p.scale);
        sum += w;
#if HOLD
        weights[i][j] = w;
#endif
      }
    }
    Part total = {top, sum_lanes<kLanes>(sum)};
    constexpr int kPairs = decltype(exchange)::kPairs;
    if constexpr (kPairs > 1) {
      total = merged_parts<kPairs>(exchange.over_row(total.top, total.sum, pieces.parts), p.scale,
                                   kPairs / kParts * pieces.parts);
    }
    if (!active) continue;

    const bool has_edge = !kEven && pieces.edge < kCols;
    // Of a row that sees all keys, 0 or NaN times the reciprocal of 0 or NaN is NaN by itself.
    if ((MASK || CAUSAL) && !(total.sum > 0.0f)) {
#pragma unroll 1
      for (int i = 0; i < kCount; ++i) {
        const int column = pieces.column(i);
        if (column >= pieces.end) break;
        store<true, true, kLength>(y_row + column, without_softmax(column, keys));
      }
      if (has_edge)
        set_element<true>(y_row + pieces.edge, without_softmax(pieces.edge, keys).at(0));
      continue;
    }
    const float inverse = fast_reciprocal(total.sum);
    const float total_base = base_of(total.top);
    const float factor =
        kThreads > 32 || kParts > 1 ? weight(top, total_base, p.scale) * inverse : inverse;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((CAUSAL && !pieces.sees(i)) || (kCrowded && p.zero)) continue;
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
    pieces.store_words(y_row, words);
    if (has_edge && pieces.edge < keys.count) {
      set_element<kStreamedStores>(y_row + pieces.edge, edge * factor);
    }
  } while (!kOneTurn && (block_row += rows_of_a_turn()) < p.rows);
}
