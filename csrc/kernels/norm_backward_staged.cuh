// LayerNorm and RMSNorm, backward, rows streamed through shared memory (sm_90 and newer).
//
//   dx, partials as in norm_backward.cuh; one row of partials a block, or a cluster.
//
// Layout: as in norm_backward.cuh; all but mean, rstd and partials on 16 bytes.
// Threads: as in tiles.cuh. A thread owns the same columns in every row, so their parameter
// gradients stay in its registers until the end; no atomics, so the same bits every run. Where a
// block or a cluster shares a row, the sums of a row are on their way while the next row's are
// made.
#include "norm_backward_held.cuh"
#include "norm_backward_parameters.cuh"
#include "norm_results.cuh"

constexpr int kLoads = 2 + HAS_ADD;  // x, dy, dh; dx takes the place of x
using Ring = TileRing<X, kLoads, STORE_TILES>;

constexpr int kRowBytes = kChunk * static_cast<int>(sizeof(X));  // of a row's chunk in a tile
constexpr int kControl = (Ring::kBarriers + Exchange::kBytes + 127) / 128 * 128;
static_assert(kControl + kStages * Ring::kStage <= SHARED_BYTES, "the plan's size");

// A thread's part of a short row stays in registers from pass to pass.
constexpr bool kHoldsRow = !kWide && kCount * kLength <= 20 && kThreads * MIN_BLOCKS <= 512;
struct HeldRow {
  Vector<X, kLength> x[kHoldsRow ? kCount : 1], dy[kHoldsRow ? kCount : 1];
};

// First pass over a row: its part of sum(w · xhat) and sum(w); adds to the parameters' gradients.
// Two sums of each, so that one addition need not wait for the last.
__device__ __forceinline__ void first_pass(const Part& part, Shared row, const Scales& scales,
                                           const RowStatistics& of, HeldRow& held, Sums& sums,
                                           float& wx, float& w_sum) {
  float wx_sums[2] = {0.0f, 0.0f};
  float w_sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!part.owns(i)) continue;
    const Shared at = row + part.column(i) * static_cast<int>(sizeof(X));
    auto values = load_shared<kLength, X>(at);
    auto cotangents = load_shared<kLength, X>(at + Ring::kArray);
    if constexpr (kHoldsRow) {
      held.x[i] = values;
      held.dy[i] = cotangents;
    }
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      const float xhat = (values.at(j) - of.mean) * of.rstd;
      const float cotangent = cotangents.at(j);
      const float w = cotangent * scales.at(i, j);
      wx_sums[j % 2] += w * xhat;
      if (LAYER) w_sums[j % 2] += w;
      sums.gamma[i][j] += cotangent * xhat;
#if HAS_BETA
      sums.beta[i][j] += cotangent;
#endif
    }
  }
  if (part.has_edge) {
    const Shared at = row + part.edge_in_chunk * static_cast<int>(sizeof(X));
    const float xhat = (load_shared<1, X>(at).at(0) - of.mean) * of.rstd;
    const float cotangent = load_shared<1, X>(at + Ring::kArray).at(0);
    const float w = cotangent * scales.edge;
    wx_sums[0] += w * xhat;
    if (LAYER) w_sums[0] += w;
    sums.gamma_edge += cotangent * xhat;
#if HAS_BETA
    sums.beta_edge += cotangent;
#endif
  }
  wx = wx_sums[0] + wx_sums[1];
  w_sum = w_sums[0] + w_sums[1];
}

// Second pass: dx, into the place of x in shared memory or to global memory.
__device__ __forceinline__ void second_pass(const Part& part, Shared row, X* __restrict__ dx,
                                            const Scales& scales, const HeldRow& held,
                                            const RowResult& result_of) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!part.owns(i)) continue;
    const Shared at = row + part.column(i) * static_cast<int>(sizeof(X));
    const auto values = kHoldsRow ? held.x[kHoldsRow * i] : load_shared<kLength, X>(at);
    const auto cotangents =
        kHoldsRow ? held.dy[kHoldsRow * i] : load_shared<kLength, X>(at + Ring::kArray);
#if HAS_ADD
    const auto residual = load_shared<kLength, X>(at + 2 * Ring::kArray);
#endif
    float result[kLength];
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
#if HAS_ADD
      const float dh = residual.at(j);
#else
      constexpr float dh = 0.0f;
#endif
      result[j] = result_of(values.at(j), cotangents.at(j), scales.at(i, j), dh);
    }
    if constexpr (STORE_TILES) {
      store_shared(at, rounded<X>(result));
    } else {
      part.store_result(dx, i, rounded<X>(result));
    }
  }
}

// Of the thread's edge, to global memory.
__device__ __forceinline__ void second_pass_of_edge(const Part& part, Shared row,
                                                    X* __restrict__ dx, const Scales& scales,
                                                    const RowResult& result_of) {
  const Shared at = row + part.edge_in_chunk * static_cast<int>(sizeof(X));
  const float x = load_shared<1, X>(at).at(0);
  const float dy = load_shared<1, X>(at + Ring::kArray).at(0);
  const float dh = HAS_ADD ? load_shared<1, X>(at + HAS_ADD * 2 * Ring::kArray).at(0) : 0.0f;
  set_element<true>(dx + part.edge, result_of(x, dy, scales.edge, dh));
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    norm_backward_staged(const X* __restrict__ dy, const X* __restrict__ x,
                         const Gamma* __restrict__ gamma,
                         MEAN_PARAMETER const float* __restrict__ rstd,
                         DH_PARAMETER X* __restrict__ dx, float* __restrict__ partials,
                         long long rows) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared base = shared_address(memory);
  forget_origin(base);
  const unsigned rank = kCluster == 1 ? 0 : cluster_rank();
#if HAS_ADD
  const X* const from[kLoads] = {x, dy, dh};
  X* const to[kLoads] = {dx, nullptr, nullptr};
#else
  const X* const from[kLoads] = {x, dy};
  X* const to[kLoads] = {dx, nullptr};
#endif
  Ring ring(base + kControl, base, from, to, rows, rank);
  Exchange exchange(base + (Ring::kBarriers + 15) / 16 * 16, rank);
  if (threadIdx.x == 0) barriers_visible();
  sync_all();
  ring.start();

  const int group = static_cast<int>(threadIdx.x) / kGroup;
  const int place = ring.place_of(group);
  const Part part(rank, shift_of_row(ring.first_row() + group));
  const Scales scales(part, gamma + part.first_column);

  Sums sums = {};
  const auto statistics_of = [&](long long row) {
    RowStatistics of = {0.0f, 0.0f};
    if (row < rows) {
      if (LAYER) of.mean = mean[row];
      of.rstd = rstd[row];
    }
    return of;
  };
  HeldRow held;
  const auto finish_row = [&](Shared row, long long number, const RowStatistics& of, float wx,
                              float w_sum) {
    constexpr float kShare = 1.0f / kCols;
    const RowResult result_of = {of, of.rstd * (wx * kShare), w_sum * kShare};
    X* to_row = dx + number * kCols + part.first_column;
    second_pass(part, row, to_row, scales, held, result_of);
    if (part.has_edge) second_pass_of_edge(part, row, to_row, scales, result_of);
  };

  if constexpr (kWide) {
    const int last_turns = (ring.last_rows() + kRowsAtOnce - 1) / kRowsAtOnce;
    const int steps = (ring.count() - 1) * kTurns + last_turns;
    // The row of the first pass, and the row before it, of the second pass.
    long long row = ring.first_row() + group, row_before = 0;
    int k = 0, turn = 0, tile_before = 0;
    Shared tile = 0, at_before = 0;
    RowStatistics next = statistics_of(row), before = next;
    bool ends_tile = false;
    for (int step = 0; step <= steps; ++step) {
      const RowStatistics of = next;
      const bool ended = ends_tile;
      Shared at = 0;
      if (step < steps) {
        if (turn == 0) tile = ring.acquire(k);
        at = tile + place + turn * kRowsAtOnce * kRowBytes;
        ends_tile = turn == kTurns - 1 || step == steps - 1;
        next = statistics_of(turn + 1 < kTurns
                                 ? row + kRowsAtOnce
                                 : row + kRowsAtOnce - kTileRows + ring.rows_to_next_tile());
        if (row < rows) {
          float wx, w_sum;
          first_pass(part, at, scales, of, held, sums, wx, w_sum);
          exchange.publish(step, sum_lanes<32>(wx), LAYER ? sum_lanes<32>(w_sum) : 0.0f);
        }
      }
      if (step > 0) {
        if (row_before < rows) {
          float wx[Exchange::kShare], w_sum[Exchange::kShare];
          exchange.collect(step - 1, wx, w_sum);
          finish_row(at_before, row_before, before, Exchange::total(wx),
                     LAYER ? Exchange::total(w_sum) : 0.0f);
        }
        if (ended) ring.release(tile_before);
      }
      at_before = at;
      row_before = row;
      before = of;
      tile_before = k;
      row += kRowsAtOnce;
      if (++turn == kTurns) {
        turn = 0;
        ++k;
        row += ring.rows_to_next_tile() - kTileRows;
      }
    }
  } else {
    constexpr int kLanes = kGroup < 32 ? kGroup : 32;
    long long row = ring.first_row() + group;
    RowStatistics next = statistics_of(row);
    for (int k = 0; k < ring.count(); ++k) {
      const RowStatistics of = next;
      const bool active = row < rows;
      const Shared at = ring.acquire(k) + place;
      next = statistics_of(row + ring.rows_to_next_tile());
      float wx = 0.0f, w_sum = 0.0f;
      if (active) first_pass(part, at, scales, of, held, sums, wx, w_sum);
      wx = sum_lanes<kLanes>(wx);
      if (LAYER) w_sum = sum_lanes<kLanes>(w_sum);
      if (active) finish_row(at, row, of, wx, w_sum);
      ring.release(k);
      row += ring.rows_to_next_tile();
    }
  }
  ring.finish();

  float* const together = reinterpret_cast<float*>(memory + kControl);
  partials += blockIdx.x / kCluster * static_cast<long long>(kCols);
  if constexpr (!kRagged) partials += part.first_column;
  write_sums(part, sums.gamma, sums.gamma_edge, together, partials);
#if HAS_BETA
  partials += gridDim.x / kCluster * static_cast<long long>(kCols);
  write_sums(part, sums.beta, sums.beta_edge, together, partials);
#endif
}
