// Softmax, backward, for rows that fit in the registers of a block or of a cluster of blocks.
//
//   dx[r, k] = scale · y[r, k] · (dy[r, k] - sum_k(y[r, k] · dy[r, k])), rounded once;
//   with CAUSAL over the keys that query r sees, and 0 at the others, which are not read.
//
// Layout: dy, y, dx [rows, COLS] row-major; first as in softmax_forward.cuh.
// Threads: as in softmax_forward.cuh. A thread reads its pieces of dy and y once and keeps them.
#include "softmax_pieces.cuh"

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
  const int part = kParts > 1 ? static_cast<int>(cluster_rank()) : 0;

  long long block_row = static_cast<long long>(blockIdx.x / kParts) * kRows;
  do {
    const long long own_row = block_row + threadIdx.y;
    const bool active = kRows == 1 || own_row < p.rows;
    const long long row = active ? own_row : p.rows - 1;
    const Keys keys = keys_of(row, nullptr, first, p);
    const X *dy_row = dy + row * kCols, *y_row = y + row * kCols;
    X* dx_row = dx + row * kCols;
    const Pieces pieces(y_row, part, keys.count);

    Word ys[kCount], dys[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!pieces.sees(i)) continue;
      // Odd rows share sectors: their neighbours' blocks want those from the cache.
      ys[i] = pieces.load_ith<kEven>(y_row, i);
      dys[i] = pieces.load_ith<kEven>(dy_row, i);
    }
    const bool sees_edge = !kEven && pieces.edge < keys.count;
    float edge_y = 0.0f, edge_dy = 0.0f;
    if (sees_edge) {
      edge_y = element(y_row[pieces.edge]);
      edge_dy = element(dy_row[pieces.edge]);
    }
    if (CAUSAL && active) pieces.store_zeros(dx_row, keys.count);
    if (kLeavesOut && part >= pieces.parts) continue;
    exchange.wait_for_cluster();

    float sum = edge_y * edge_dy;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!pieces.sees(i)) continue;
      if (CAUSAL) {
        hide_from<0>(ys[i], pieces.column(i), keys.count);
        hide_from<0>(dys[i], pieces.column(i), keys.count);
      }
#pragma unroll
      for (int j = 0; j < kLength; ++j) sum += ys[i].at(j) * dys[i].at(j);
    }
    sum = sum_lanes<(kThreads < 32 ? kThreads : 32)>(sum);
    constexpr int kPairs = decltype(exchange)::kPairs;
    if constexpr (kPairs > 1) {
      sum = summed_parts<kPairs>(exchange.over_row(sum, 0.0f, pieces.parts),
                                 kPairs / kParts * pieces.parts);
    }
    if (!active) continue;

    const auto result_of = [&](float y, float dy) { return p.scale * y * (dy - sum); };
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!pieces.sees(i)) continue;
      forget(ys[i], p);
      forget(dys[i], p);
      float result[kLength];
#pragma unroll
      for (int j = 0; j < kLength; ++j) result[j] = result_of(ys[i].at(j), dys[i].at(j));
      ys[i] = rounded<X>(result);
      if (CAUSAL) hide_from<0>(ys[i], pieces.column(i), keys.count);  // where the sum is NaN too
    }
    pieces.store_words(dx_row, ys);
    if (sees_edge) set_element<true>(dx_row + pieces.edge, result_of(edge_y, edge_dy));
  } while (!kOneTurn && (block_row += rows_of_a_turn()) < p.rows);
}
