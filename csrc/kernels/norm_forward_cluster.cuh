// LayerNorm and RMSNorm, forward, for rows that fit in the registers of a cluster (sm_90 and
// newer).
//
//   h, mean, rstd, y as in norm_forward.cuh.
//
// Layout: as in norm_forward.cuh; all arrays on 16 bytes.
// Threads: CLUSTER blocks of THREADS_PER_ROW threads have one row (row_sums.cuh) and end with it.
// Small blocks, several to a multiprocessor, so that some load while others write.
#include "norm_parameters.cuh"
#include "norm_results.cuh"
#include "row_sums.cuh"

constexpr bool kStream = true;
static_assert(sizeof(RowSums::Buffers) <= SHARED_BYTES, "the plan's size");

extern "C" __global__ void __launch_bounds__(kGroup, MIN_BLOCKS)
    norm_forward_cluster(const X* __restrict__ x, const Gamma* __restrict__ gamma,
                         BETA_PARAMETER ADD_PARAMETER X* __restrict__ y,
                         H_PARAMETER MEAN_PARAMETER float* __restrict__ rstd_out, long long,
                         float epsilon) {
  const unsigned rank = cluster_rank();
  const Part part(rank);
  const long long row = blockIdx.x / kCluster;
  const long long offset = row * kCols;

  // All loads are on their way while the cluster makes its barriers.
  Vector<X, kLength> values[kCount] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (part.owns(i)) values[i] = load<true, kStream, kLength>(x + offset + part.column(i));
  }
#if HAS_ADD
  Vector<X, kLength> addend[kCount] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (part.owns(i)) addend[i] = load<true, kStream, kLength>(add + offset + part.column(i));
  }
#endif
  extern __shared__ __align__(128) unsigned char memory[];
  RowSums statistics(*reinterpret_cast<RowSums::Buffers*>(memory), part, rank);
#if HAS_ADD
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!part.owns(i)) continue;
    values[i] = sum_of<kLength>(values[i], addend[i]);
    store<true, kStream, kLength>(h + offset + part.column(i), values[i]);
  }
#endif
  Vector<Gamma, kLength> scale[kCount];
#if HAS_BETA
  Vector<Beta, kLength> shift[kCount];
#endif
  const auto load_parameters = [&](int i) {
    if (!part.owns(i)) return;
    scale[i] = load<true, false, kLength>(gamma + part.column(i));
#if HAS_BETA
    shift[i] = load<true, false, kLength>(beta + part.column(i));
#endif
  };
  if constexpr (HOLD_GAMMA) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) load_parameters(i);
  }

  float sums[2] = {0.0f, 0.0f};
  if constexpr (LAYER) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kLength; ++j) sums[j % 2] += values[i].at(j);
    }
  }
  const auto squares_about = [&](float centre) {
    float squares[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i].forget();
      if (!part.owns(i)) continue;  // (0 - centre)^2 must not count
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        const float centred = LAYER ? values[i].at(j) - centre : values[i].at(j);
        squares[j % 2] += centred * centred;
      }
    }
    return squares[0] + squares[1];
  };
  float mean, squares;
  statistics(sums[0] + sums[1], squares_about, mean, squares);
  const float rstd = inverse_root(squares * (1.0f / kCols) + epsilon);
  if (threadIdx.x == 0 && rank == 0) {
#if LAYER
    mean_out[row] = mean;
#endif
    rstd_out[row] = rstd;
  }

#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (!HOLD_GAMMA) load_parameters(i);
    values[i].forget();
    float result[kLength];
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
#if HAS_BETA
      const float bias = shift[i].at(j);
#else
      constexpr float bias = 0.0f;
#endif
      result[j] = result_of(values[i].at(j), mean, rstd, scale[i].at(j), bias);
    }
    if (part.owns(i)) {
      store<true, kStream, kLength>(y + offset + part.column(i), rounded<X>(result));
    }
  }
}
