// LayerNorm and RMSNorm, forward, rows streamed through shared memory (sm_90 and newer).
//
//   h, mean, rstd, y as in norm_forward.cuh.
//
// Layout: as in norm_forward.cuh; all but mean and rstd on 16 bytes.
// Threads: as in tiles.cuh. Where a block or a cluster shares a row, each warp centres its part on
// its own mean and the parts are merged as in reduce.cuh, while the next row's are made.
#include "exchange.cuh"
#include "mean.cuh"
#include "norm_parameters.cuh"
#include "norm_results.cuh"

constexpr int kLoads = 1 + HAS_ADD;  // x, add; y and h take their places
using Ring = TileRing<X, kLoads, STORE_TILES * kLoads>;

constexpr int kRowBytes = kChunk * static_cast<int>(sizeof(X));  // of a row's chunk in a tile
constexpr int kHidden = HAS_ADD * Ring::kArray;                  // where h is, from x
constexpr int kControl = (Ring::kBarriers + Exchange::kBytes + 127) / 128 * 128;
static_assert(kControl + kStages * Ring::kStage <= SHARED_BYTES, "the plan's size");

// Sum of the row's part. With HAS_ADD h takes the place of add first.
__device__ __forceinline__ float sum_pass(const Part& part, Shared row, X* __restrict__ h) {
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!part.owns(i)) continue;
    const Shared at = row + part.column(i) * static_cast<int>(sizeof(X));
    auto values = load_shared<kLength, X>(at);
#if HAS_ADD
    const auto addend = load_shared<kLength, X>(at + kHidden);
    values = sum_of<kLength>(values, addend);
    store_shared(at + kHidden, values);
    if (!STORE_TILES) part.store_result(h, i, values);
#endif
#pragma unroll
    for (int j = 0; j < kLength; ++j) sums[j % 2] += values.at(j);
  }
  if (part.has_edge) {
    const Shared at = row + part.edge_in_chunk * static_cast<int>(sizeof(X));
    auto value = load_shared<1, X>(at);
#if HAS_ADD
    value = sum_of<1>(value, load_shared<1, X>(at + kHidden));
    store_shared(at + kHidden, value);
    if (!STORE_TILES) store<true, true, 1>(h + part.edge, value);
#endif
    sums[0] += value.at(0);
  }
  return sums[0] + sums[1];
}

__device__ __forceinline__ float squares_pass(const Part& part, Shared row, float centre) {
  // Past this the compiler reads the row again: it would keep it, for want of registers elsewhere.
  if (LAYER && kWide) __syncwarp();
  float totals[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!part.owns(i)) continue;
    const auto values =
        load_shared<kLength, X>(row + kHidden + part.column(i) * static_cast<int>(sizeof(X)));
    float squares[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      const float centred = LAYER ? values.at(j) - centre : values.at(j);
      squares[j % 2] += centred * centred;
    }
    totals[0] += squares[0];
    totals[1] += squares[1];
  }
  if (part.has_edge) {
    const Shared at = row + kHidden + part.edge_in_chunk * static_cast<int>(sizeof(X));
    const float value = load_shared<1, X>(at).at(0);
    const float centred = LAYER ? value - centre : value;
    totals[0] += centred * centred;
  }
  return totals[0] + totals[1];
}

// A parameter's columns of this thread: in registers from row to row, or, where they would take
// more than there are, read where they are used.
template <typename T>
struct Parameter {
  const T* __restrict__ from;  // at the block's first column
  Vector<T, kLength> held[HOLD_GAMMA ? kCount : 1];

  __device__ __forceinline__ Parameter(const Part& part, const T* __restrict__ start)
      : from(start) {
    if (!HOLD_GAMMA) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (part.owns(i)) held[i] = part.load_parameter(from, i);
    }
  }
  __device__ __forceinline__ Vector<T, kLength> at(const Part& part, int i) const {
    if constexpr (HOLD_GAMMA) return held[i];
    return part.load_parameter(from, i);
  }
};

struct Parameters {
  Parameter<Gamma> gamma;
#if HAS_BETA
  Parameter<Beta> beta;
#endif
};

__device__ __forceinline__ void scale_pass(const Part& part, Shared row, X* __restrict__ y,
                                           const Parameters& parameters, float mean, float rstd) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!part.owns(i)) continue;
    const Shared at = row + part.column(i) * static_cast<int>(sizeof(X));
    const auto values = load_shared<kLength, X>(at + kHidden);
    const Vector<Gamma, kLength> scale = parameters.gamma.at(part, i);
#if HAS_BETA
    const Vector<Beta, kLength> shift = parameters.beta.at(part, i);
#endif
    float result[kLength];
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
#if HAS_BETA
      const float bias = shift.at(j);
#else
      constexpr float bias = 0.0f;
#endif
      result[j] = result_of(values.at(j), mean, rstd, scale.at(j), bias);
    }
    if constexpr (STORE_TILES) {
      store_shared(at, rounded<X>(result));
    } else {
      part.store_result(y, i, rounded<X>(result));
    }
  }
}

// Of the thread's edge.
__device__ __forceinline__ void scale_edge(const Part& part, Shared row, X* __restrict__ y,
                                           const Parameters& parameters, float mean, float rstd) {
  const Shared at = row + kHidden + part.edge_in_chunk * static_cast<int>(sizeof(X));
#if HAS_BETA
  const float bias = element(parameters.beta.from[part.edge]);
#else
  constexpr float bias = 0.0f;
#endif
  const float gamma = element(parameters.gamma.from[part.edge]);
  set_element<true>(y + part.edge, result_of(load_shared<1, X>(at).at(0), mean, rstd, gamma, bias));
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    norm_forward_staged(const X* __restrict__ x, const Gamma* __restrict__ gamma,
                        BETA_PARAMETER ADD_PARAMETER X* __restrict__ y,
                        H_PARAMETER MEAN_PARAMETER float* __restrict__ rstd_out, long long rows,
                        float epsilon) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared base = shared_address(memory);
  forget_origin(base);
  const unsigned rank = kCluster == 1 ? 0 : cluster_rank();
#if HAS_ADD
  const X* const from[kLoads] = {x, add};
  X* const to[kLoads] = {y, h};
#else
  const X* const from[kLoads] = {x};
  X* const to[kLoads] = {y};
#endif
  Ring ring(base + kControl, base, from, to, rows, rank);
  Exchange exchange(base + (Ring::kBarriers + 15) / 16 * 16, rank);
  if (threadIdx.x == 0) barriers_visible();
  sync_all();
  ring.start();

  const int group = static_cast<int>(threadIdx.x) / kGroup;
  const int place = ring.place_of(group);
  const int shift = shift_of_row(ring.first_row() + group);
  const Part part(rank, shift);
#if HAS_BETA
  const Parameters parameters = {{part, gamma + part.first_column},
                                 {part, beta + part.first_column}};
#else
  const Parameters parameters = {{part, gamma + part.first_column}};
#endif

  const auto sum_of = [&](Shared at, long long row) {
    if (!LAYER && !HAS_ADD) return 0.0f;
    X* to_row = HAS_ADD ? h + row * kCols + part.first_column : nullptr;
    return sum_pass(part, at, to_row);
  };
  // Writes the row's results, given its mean and sum of squares.
  const auto finish_row = [&](Shared at, long long row, float mean, float squares) {
    const float rstd = inverse_root(squares * (1.0f / kCols) + epsilon);
    if (part.lane == 0 && rank == 0) {
#if LAYER
      mean_out[row] = mean;
#endif
      rstd_out[row] = rstd;
    }
    X* to_row = y + row * kCols + part.first_column;
    scale_pass(part, at, to_row, parameters, mean, rstd);
    if (part.has_edge) scale_edge(part, at, to_row, parameters, mean, rstd);
  };

  if constexpr (kWide) {
    const float own_count = elements_of(
        static_cast<int>(rank) * kRowWarps + static_cast<int>(threadIdx.x) % kGroup / 32, shift);
    const float own_share = own_count > 0.0f ? 1.0f / own_count : 0.0f;
    [[maybe_unused]] float counts[Exchange::kShare], shares[Exchange::kShare];
#pragma unroll
    for (int m = 0; m < Exchange::kShare; ++m) {
      counts[m] = elements_of(Exchange::part(m), shift);
      shares[m] = counts[m] > 0.0f ? 1.0f / counts[m] : 0.0f;
    }
    const int last_turns = (ring.last_rows() + kRowsAtOnce - 1) / kRowsAtOnce;
    const int steps = (ring.count() - 1) * kTurns + last_turns;
    // The row of the statistics, and the row before it, which is written.
    long long row = ring.first_row() + group, row_before = 0;
    int k = 0, turn = 0, tile_before = 0;
    Shared tile = 0, at_before = 0;
    bool ends_tile = false;
    for (int step = 0; step <= steps; ++step) {
      const bool ended = ends_tile;
      Shared at = 0;
      if (step < steps) {
        if (turn == 0) tile = ring.acquire(k);
        at = tile + place + turn * kRowsAtOnce * kRowBytes;
        ends_tile = turn == kTurns - 1 || step == steps - 1;
        if (row < rows) {
          float sum = sum_of(at, row);
          if (LAYER) sum = sum_lanes<32>(sum);
          const float squares = squares_pass(part, at, sum * own_share);
          exchange.publish(step, sum, sum_lanes<32>(squares));
        }
      }
      if (step > 0 && row_before < rows) {
        float sums[Exchange::kShare], squares[Exchange::kShare], mean = 0.0f;
        exchange.collect(step - 1, sums, squares);
#if LAYER
        mean = mean_of<kCols>(Exchange::total(sums));
#pragma unroll
        for (int m = 0; m < Exchange::kShare; ++m) {
          const float distance = sums[m] * shares[m] - mean;
          squares[m] += counts[m] * distance * distance;
        }
#endif
        finish_row(at_before, row_before, mean, Exchange::total(squares));
      }
      if (step > 0 && ended) ring.release(tile_before);
      at_before = at;
      row_before = row;
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
    for (int k = 0; k < ring.count(); ++k) {
      const bool active = row < rows;
      const Shared at = ring.acquire(k) + place;
      const float sum = active ? sum_of(at, row) : 0.0f;
      const float mean = LAYER ? mean_of<kCols>(sum_lanes<kLanes>(sum)) : 0.0f;
      const float squares = sum_lanes<kLanes>(active ? squares_pass(part, at, mean) : 0.0f);
      if (active) finish_row(at, row, mean, squares);
      ring.release(k);
      row += ring.rows_to_next_tile();
    }
  }
  ring.finish();
}
