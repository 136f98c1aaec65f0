// LayerNorm and RMSNorm, forward, rows that all blocks of a launch share (sm_90 and newer).
//
//   h, mean, rstd, y as in norm_forward.cuh.
//
// Layout: as in norm_forward.cuh; pairs [rows, blocks] 8 bytes each, zeros.
// Threads: as in resident.cuh. Lanes that have a pair together centre their columns on their own
// mean; the moments of workers and of blocks are merged as in reduce.cuh.
#include "mean.cuh"
#include "norm_parameters.cuh"
#include "norm_results.cuh"
#include "resident.cuh"

constexpr int kOperands = 1 + HAS_ADD;
using Rows = Stages<kOperands>;
constexpr int kGammaBytes = Parameter<Gamma>::kBytes;
constexpr int kBetaBytes = HAS_BETA ? Parameter<Beta>::kBytes : 0;
static_assert(Rows::kBytes + kGammaBytes + kBetaBytes <= SHARED_BYTES, "the plan's size");

// (sum, squares of the distances from the mean) of parts; rms: squares alone.
struct MergedMoments {
  static __device__ __forceinline__ Pair nothing() { return {0.0f, 0.0f}; }

  template <int kCount>
  __device__ __forceinline__ Pair operator()(const Pair (&of)[kCount],
                                             const Counts<kCount>& counts) const {
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sum += of[i].first;
      squares += of[i].second;
    }
#if LAYER
    sum = sum_lanes<32>(sum);
    const float mean = sum * counts.share_of_all;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float distance = of[i].first * counts.shares[i] - mean;
      squares += counts.columns[i] * distance * distance;
    }
#endif
    return {sum, sum_lanes<32>(squares)};
  }
};

__device__ __forceinline__ Vector<X, kWidth> h_of(const Rows& rows, const RowCursor& at,
                                                  const OwnWords& own, int i) {
  auto word = rows.word(at, 0, own.word(i));
  own.hide(word, i);
#if HAS_ADD
  auto addend = rows.word(at, 1, own.word(i));
  own.hide(addend, i);
  word = sum_of<kWidth>(word, addend);
#endif
  return word;
}

// What kTogether lanes have of the row that has come; with HAS_ADD h leaves.
__device__ __forceinline__ Pair moments_of(const Rows& rows, const RowCursor& at, float share,
                                           X* h) {
  const OwnWords own = rows.own_words(at);
  Vector<X, kWidth> values[kEach];
  float sum = 0.0f, squares = 0.0f, centre = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    values[i] = own.owns(i) ? h_of(rows, at, own, i) : Vector<X, kWidth>{};
  }
#if HAS_ADD
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!own.owns(i)) continue;
    own.store_word(h + rows.offset(at), i, values[i]);
  }
#endif
#if LAYER
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += values[i].at(j);
  }
  sum = sum_lanes<kTogether>(sum);
  centre = sum * share;
#endif
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!own.owns(i)) continue;
    const auto square = [&](int j) {
      const float centred = values[i].at(j) - centre;
      return centred * centred;
    };
    if (!LAYER || own.is_whole(i)) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) squares += square(j);
    } else {  // centre^2 must not count
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (own.is_column(own.column(i) + j)) squares += square(j);
      }
    }
  }
  return {sum, sum_lanes<kTogether>(squares)};
}

// gamma and beta of a worker's columns, which are others at each place of a word.
struct OwnParameters {
  int place = -1;
  Vector<Gamma, kWidth> scale[kEach];
#if HAS_BETA
  Vector<Beta, kWidth> bias[kEach];
#endif
};

__device__ __forceinline__ void write_row(const Rows& rows, const RowCursor& at,
                                          const OwnParameters& parameters, const Pair& statistics,
                                          X* y) {
  const OwnWords own = rows.own_words(at);
  Vector<X, kWidth> values[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (own.owns(i)) values[i] = h_of(rows, at, own, i);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!own.owns(i)) continue;
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
#if HAS_BETA
      const float bias = parameters.bias[i].at(j);
#else
      constexpr float bias = 0.0f;
#endif
      result[j] = result_of(values[i].at(j), statistics.first, statistics.second,
                            parameters.scale[i].at(j), bias);
    }
    own.store_word(y + rows.offset(at), i, rounded<X>(result));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    norm_forward_resident(const X* __restrict__ x, const Gamma* __restrict__ gamma,
                          BETA_PARAMETER ADD_PARAMETER X* __restrict__ y,
                          H_PARAMETER MEAN_PARAMETER float* __restrict__ rstd_out,
                          unsigned long long* pairs, long long count, float epsilon) {
  extern __shared__ __align__(128) unsigned char memory[];
#if HAS_ADD
  const X* const from[kOperands] = {x, add};
#else
  const X* const from[kOperands] = {x};
#endif
  const Rows rows(memory, from, pairs, count);
  const Parameter<Gamma> scale(gamma + rows.first_column, memory + Rows::kBytes, rows.columns);
#if HAS_BETA
  unsigned char* const after_gamma = memory + Rows::kBytes + kGammaBytes;
  const Parameter<Beta> bias(beta + rows.first_column, after_gamma, rows.columns);
#endif
  __syncthreads();

  const int task = static_cast<int>(threadIdx.x) / 32 - kWarps;
  if (task == 0) {
    rows.fetch(nullptr, nullptr);
  } else if (task == 1) {
    rows.tell_blocks(MergedMoments{});
  } else if (task > 1) {
    rows.collect(task - 2, MergedMoments{}, [&](int row, const Pair& all) {
      const float mean = LAYER ? mean_of<COLS>(all.first) : 0.0f;
      const float rstd = inverse_root(all.second * (1.0f / COLS) + epsilon);
      if (rows.block == 0 && threadIdx.x % 32 == 0) {
#if LAYER
        mean_out[row] = mean;
#endif
        rstd_out[row] = rstd;
      }
      return Pair{mean, rstd};
    });
  } else {
    const int group = static_cast<int>(threadIdx.x) / kRowThreads;
    OwnParameters parameters;
    float share = 0.0f;  // 1 / the columns of the lanes that have a pair together
    int place_of_share = -1;
    RowCursor in, out;
    in.advance(rows.rows, group);
    out.advance(rows.rows, group);
    for (int k = group; k < rows.rows + kGroups * kLag; k += kGroups) {
      if (k < rows.rows) {
        rows.wait_for_row(in);
        if (LAYER && in.place != place_of_share) {
          place_of_share = in.place;
          const int pair = static_cast<int>(threadIdx.x) % kRowThreads / kTogether;
          const int columns = rows.own_words(in).columns_of_pair(pair);
          share = columns > 0 ? 1.0f / static_cast<float>(columns) : 0.0f;
        }
        rows.tell(in, moments_of(rows, in, share, h));
        in.advance(rows.rows, kGroups);
      }
      if (k < kGroups * kLag) continue;
      if (parameters.place != out.place) {
        parameters.place = out.place;
        const OwnWords own = rows.own_words(out);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if (!own.owns(i)) continue;
          parameters.scale[i] = scale.word(own, i);
#if HAS_BETA
          parameters.bias[i] = bias.word(own, i);
#endif
        }
      }
      write_row(rows, out, parameters, rows.wait_for_statistics(out), y);
      rows.release(out);
      out.advance(rows.rows, kGroups);
    }
  }
}
