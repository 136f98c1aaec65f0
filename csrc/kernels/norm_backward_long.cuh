// LayerNorm and RMSNorm, backward, for rows of any length: the row is read twice.
//
//   dx, partials as in norm_backward.cuh.
//
// Layout: as in norm_backward.cuh.
// Threads: one block of THREADS_PER_ROW a row, as many blocks as stay resident, each striding over
// rows. Thread t owns vectors t, t + THREADS_PER_ROW, ... of every row. The parameter gradients of
// its columns live in shared memory where all of them fit (SHARED_SUMS), else at once in the
// block's row of partials; no other thread touches them, so there is neither barrier nor atomic.
// They move as vectors: partials is a buffer of its own, so its rows are as aligned as a vector of
// them needs.
#include "elements.cuh"
#include "reduce.cuh"

using X = ElementOf<X_TYPE>::Type;
using Gamma = ElementOf<GAMMA_TYPE>::Type;

constexpr int kCols = COLS;
constexpr int kLength = VECTOR;
constexpr int kThreads = THREADS_PER_ROW;
constexpr int kVectors = kCols / kLength;
static_assert(kCols % kLength == 0, "a row is whole vectors");
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is whole warps");

using Sum = RowSum<kThreads, 1, 2>;

// One block's pointers, at its row.
struct Row {
  const X* __restrict__ dy;
  const X* __restrict__ x;
  const X* __restrict__ dh;
  X* __restrict__ dx;
  float mean;
  float rstd;
};

// First pass: sum of w · xhat and sum of w.
template <bool kAligned>
__device__ __forceinline__ void row_sums(const Row& row, const Gamma* __restrict__ gamma,
                                         float (&sums)[2]) {
#pragma unroll 2
  for (int v = threadIdx.x; v < kVectors; v += kThreads) {
    const int c = v * kLength;
    const Vector<X, kLength> x = load<kAligned, false, kLength>(row.x + c);
    const Vector<X, kLength> dy = load<kAligned, false, kLength>(row.dy + c);
    const Vector<Gamma, kLength> scale = load<kAligned, false, kLength>(gamma + c);
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      const float xhat = (x.at(j) - row.mean) * row.rstd;
      const float w = dy.at(j) * (scale.at(j) + (ZERO_CENTERED ? 1.0f : 0.0f));
      sums[0] += w * xhat;
      sums[1] += w;
    }
  }
}

// The sums start as garbage: the first row writes, the others add.
__device__ __forceinline__ void accumulate(float* sums, float (&terms)[kLength], bool is_first) {
  if (!is_first) {
    const Vector<float, kLength> so_far = load<true, false, kLength>(sums);
#pragma unroll
    for (int j = 0; j < kLength; ++j) terms[j] += so_far.at(j);
  }
  store<true, false, kLength>(sums, rounded<float>(terms));
}

// Second pass: dx, and the columns' sums over rows.
template <bool kAligned>
__device__ __forceinline__ void write_row(const Row& row, const Gamma* __restrict__ gamma,
                                          float mean_wx, float mean_w, bool is_first,
                                          float* gamma_sums, float* beta_sums) {
#pragma unroll(HAS_ADD ? 1 : 2)
  for (int v = threadIdx.x; v < kVectors; v += kThreads) {
    const int c = v * kLength;
    const Vector<X, kLength> x = load<kAligned, true, kLength>(row.x + c);
    const Vector<X, kLength> dy = load<kAligned, true, kLength>(row.dy + c);
    const Vector<Gamma, kLength> scale = load<kAligned, false, kLength>(gamma + c);
#if HAS_ADD
    const Vector<X, kLength> residual = load<kAligned, true, kLength>(row.dh + c);
#endif
    float values[kLength];
    float gamma_terms[kLength];
    float beta_terms[kLength];
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      const float xhat = (x.at(j) - row.mean) * row.rstd;
      const float cotangent = dy.at(j);
      const float w = cotangent * (scale.at(j) + (ZERO_CENTERED ? 1.0f : 0.0f));
      values[j] = row.rstd * (w - mean_w - xhat * mean_wx);
#if HAS_ADD
      values[j] += residual.at(j);
#endif
      gamma_terms[j] = cotangent * xhat;
      beta_terms[j] = cotangent;
    }
    accumulate(gamma_sums + c, gamma_terms, is_first);
#if HAS_BETA
    accumulate(beta_sums + c, beta_terms, is_first);
#endif
    store<kAligned, true, kLength>(row.dx + c, rounded<X>(values));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    norm_backward_long(const X* __restrict__ dy, const X* __restrict__ x,
                       const Gamma* __restrict__ gamma,
#if LAYER
                       const float* __restrict__ mean,
#endif
                       const float* __restrict__ rstd,
#if HAS_ADD
                       const X* __restrict__ dh,
#endif
                       X* __restrict__ dx, float* __restrict__ partials, long long rows) {
  __shared__ Sum::Buffers buffers;
  Sum sum_over_row(buffers);
  bool aligned = is_aligned<kLength>(x) && is_aligned<kLength>(dy) && is_aligned<kLength>(dx) &&
                 is_aligned<kLength>(gamma);
#if HAS_ADD
  aligned = aligned && is_aligned<kLength>(dh);
#endif

  float* const gamma_partials = partials + static_cast<long long>(blockIdx.x) * kCols;
  float* const beta_partials = gamma_partials + static_cast<long long>(gridDim.x) * kCols;
#if SHARED_SUMS
  extern __shared__ __align__(16) float shared_sums[];
  float* const gamma_sums = shared_sums;
  float* const beta_sums = shared_sums + kCols;
#else
  float* const gamma_sums = gamma_partials;
  float* const beta_sums = beta_partials;
#endif

  // The grid has no more blocks than rows, so each block has a first row.
  for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
    const long long offset = r * kCols;
    Row row = {dy + offset, x + offset, nullptr, dx + offset, 0.0f, rstd[r]};
#if LAYER
    row.mean = mean[r];
#endif
#if HAS_ADD
    row.dh = dh + offset;
#endif
    float sums[2] = {0.0f, 0.0f};
    if (aligned) {
      row_sums<true>(row, gamma, sums);
    } else {
      row_sums<false>(row, gamma, sums);
    }
    sum_over_row(sums);
    const float mean_wx = sums[0] / kCols;
    const float mean_w = LAYER ? sums[1] / kCols : 0.0f;
    const bool is_first = r == blockIdx.x;
    if (aligned) {
      write_row<true>(row, gamma, mean_wx, mean_w, is_first, gamma_sums, beta_sums);
    } else {
      write_row<false>(row, gamma, mean_wx, mean_w, is_first, gamma_sums, beta_sums);
    }
  }

#if SHARED_SUMS
  for (int v = threadIdx.x; v < kVectors; v += kThreads) {
    const int c = v * kLength;
    store<true, true, kLength>(gamma_partials + c, load<true, false, kLength>(gamma_sums + c));
#if HAS_BETA
    store<true, true, kLength>(beta_partials + c, load<true, false, kLength>(beta_sums + c));
#endif
  }
#endif
}
