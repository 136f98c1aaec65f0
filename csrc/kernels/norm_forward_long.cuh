// LayerNorm and RMSNorm, forward, for rows of any length: the row is read twice.
//
//   h, mean, rstd, y as in norm_forward.cuh.
//
// Layout: as in norm_forward.cuh.
// Threads: one block of THREADS_PER_ROW a row, the grid strides over rows. Thread t owns vectors
// t, t + THREADS_PER_ROW, ... in both passes, so that with HAS_ADD it reads back only what it wrote
// itself. The second pass finds the row in L2, mostly.
#include "elements.cuh"
#include "reduce.cuh"

using X = ElementOf<X_TYPE>::Type;
using Gamma = ElementOf<GAMMA_TYPE>::Type;
using Beta = ElementOf<BETA_TYPE>::Type;

constexpr int kCols = COLS;
constexpr int kLength = VECTOR;
constexpr int kThreads = THREADS_PER_ROW;
constexpr int kVectors = kCols / kLength;
static_assert(kCols % kLength == 0, "a row is whole vectors");
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is whole warps");

// First pass: the row's statistics; with HAS_ADD, also writes h.
template <bool kAligned>
__device__ __forceinline__ Moments row_moments(const X* __restrict__ x, const X* __restrict__ add,
                                               X* __restrict__ h) {
  Moments moments = {0.0f, 0.0f, 0.0f};
#pragma unroll 4
  for (int v = threadIdx.x; v < kVectors; v += kThreads) {
    Vector<X, kLength> values = load<kAligned, false, kLength>(x + v * kLength);
#if HAS_ADD
    const Vector<X, kLength> addend = load<kAligned, true, kLength>(add + v * kLength);
    float total[kLength];
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      total[j] = values.at(j) + addend.at(j);
    }
    values = rounded<X>(total);
    store<kAligned, false, kLength>(h + v * kLength, values);
#endif
    Moments piece = {static_cast<float>(kLength), 0.0f, 0.0f};
#if LAYER
#pragma unroll
    for (int j = 0; j < kLength; ++j) piece.mean += values.at(j);
    piece.mean /= kLength;
#endif
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      const float centred = values.at(j) - piece.mean;
      piece.squares += centred * centred;
    }
#if LAYER
    moments = merged(moments, piece);
#else
    moments.squares += piece.squares;
#endif
  }
  return moments;
}

template <bool kAligned>
__device__ __forceinline__ void normalise(const X* row, const Gamma* __restrict__ gamma,
                                          const Beta* __restrict__ beta, X* __restrict__ y,
                                          float mean, float rstd) {
#pragma unroll 4
  for (int v = threadIdx.x; v < kVectors; v += kThreads) {
    const Vector<X, kLength> values = load<kAligned, true, kLength>(row + v * kLength);
    const Vector<Gamma, kLength> scale = load<kAligned, false, kLength>(gamma + v * kLength);
#if HAS_BETA
    const Vector<Beta, kLength> shift = load<kAligned, false, kLength>(beta + v * kLength);
#endif
    float result[kLength];
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      const float g = scale.at(j) + (ZERO_CENTERED ? 1.0f : 0.0f);
      result[j] = (values.at(j) - mean) * rstd * g;
#if HAS_BETA
      result[j] += shift.at(j);
#endif
    }
    store<kAligned, true, kLength>(y + v * kLength, rounded<X>(result));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    norm_forward_long(const X* __restrict__ x, const Gamma* __restrict__ gamma,
#if HAS_BETA
                      const Beta* __restrict__ beta,
#endif
#if HAS_ADD
                      const X* __restrict__ add,
#endif
                      X* __restrict__ y,
#if HAS_ADD
                      X* h,
#endif
#if LAYER
                      float* __restrict__ mean_out,
#endif
                      float* __restrict__ rstd_out, long long rows, float epsilon) {
#if LAYER
  __shared__ Moments shared[32];
#else
  __shared__ RowSum<kThreads, 1, 1>::Buffers buffers;
  RowSum<kThreads, 1, 1> sum_over_row(buffers);
#endif
#if !HAS_BETA
  constexpr const Beta* beta = nullptr;
#endif
#if !HAS_ADD
  constexpr const X* add = nullptr;
  constexpr X* h = nullptr;
#endif
  // Absent operands are null, which is aligned.
  const bool aligned = is_aligned<kLength>(x) && is_aligned<kLength>(y) &&
                       is_aligned<kLength>(gamma) && is_aligned<kLength>(beta) &&
                       is_aligned<kLength>(add) && is_aligned<kLength>(h);

  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long offset = row * kCols;
    Moments moments = aligned ? row_moments<true>(x + offset, HAS_ADD ? add + offset : add,
                                                  HAS_ADD ? h + offset : h)
                              : row_moments<false>(x + offset, HAS_ADD ? add + offset : add,
                                                   HAS_ADD ? h + offset : h);
#if LAYER
    moments = merged_over_block<kThreads>(moments, shared);
#else
    float squares[1] = {moments.squares};
    sum_over_row(squares);
    moments.squares = squares[0];
#endif
    const float mean = moments.mean;
    const float rstd = 1.0f / sqrtf(moments.squares / kCols + epsilon);
    if (threadIdx.x == 0) {
#if LAYER
      mean_out[row] = mean;
#endif
      rstd_out[row] = rstd;
    }
    const X* source = HAS_ADD ? h + offset : x + offset;
    if (aligned) {
      normalise<true>(source, gamma, beta, y + offset, mean, rstd);
    } else {
      normalise<false>(source, gamma, beta, y + offset, mean, rstd);
    }
  }
}
