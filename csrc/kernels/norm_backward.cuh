// LayerNorm and RMSNorm, backward, for rows that fit in registers.
//
//   xhat = (x - mean) · rstd,  w = dy · g,  g = gamma or 1 + gamma (ZERO_CENTERED)
//   layer: dx = rstd · (w - sum_c w / n - xhat · sum_c(w · xhat) / n) + dh
//   rms:   dx = rstd · (w              - xhat · sum_c(w · xhat) / n) + dh
//   partials[0, block] = sum_rows dy · xhat,  partials[1, block] = sum_rows dy (HAS_BETA)
//
// Layout: dy, x, dh, dx [rows, COLS] row-major; gamma [COLS]; mean, rstd [rows] float32;
// partials [1 + HAS_BETA, grid, COLS] float32, summed over the grid by norm_finish.cuh.
// Threads: block (THREADS_PER_ROW, ROWS_PER_BLOCK), as many blocks as stay resident, each striding
// over rows. A thread owns the same columns in every row, so their parameter gradients stay in its
// registers until the end; no atomics, so the same bits every run.
#include "norm_backward_parameters.cuh"
#include "reduce.cuh"

constexpr int kCols = COLS;
constexpr int kLength = VECTOR;
constexpr int kThreadsPerRow = THREADS_PER_ROW;
constexpr int kRowsPerBlock = ROWS_PER_BLOCK;
static_assert(kCols % kLength == 0, "a row is whole vectors");
static_assert(kThreadsPerRow * kRowsPerBlock % 32 == 0, "a block is whole warps");

using Slice = RowSlice<kCols / kLength, kThreadsPerRow, kLength>;
using Sum = RowSum<kThreadsPerRow, kRowsPerBlock, 2>;
constexpr int kCount = Slice::kCount;

// Rows' threads that share a warp sum by shuffles; what is left, one set of sums each, meets in
// shared memory.
constexpr int kRowsPerWarp = kThreadsPerRow < 32 ? 32 / kThreadsPerRow : 1;
constexpr int kSets = kRowsPerBlock / kRowsPerWarp;

// One row as a thread holds it between memory and use. Read without a policy of the caches: to have
// them drop first what was read made launches 2 to 5 % slower.
struct RowInput {
  Vector<X, kLength> x[kCount];
  Vector<X, kLength> dy[kCount];
  float mean;
  float rstd;
};

__device__ __forceinline__ void load_row(RowInput& to, const X* __restrict__ dy,
                                         const X* __restrict__ x, const float* __restrict__ mean,
                                         const float* __restrict__ rstd, long long row,
                                         bool active) {
  const long long offset = row * kCols;
  Slice::load_all<false>(to.x, x + offset, active);
  Slice::load_all<false>(to.dy, dy + offset, active);
  to.mean = LAYER && active ? mean[row] : 0.0f;
  to.rstd = active ? rstd[row] : 0.0f;
}

// Adds up the block's sets in order and writes them out.
__device__ __forceinline__ void write_partials(float (&sums)[kCount][kLength],
                                               float* __restrict__ partials) {
#pragma unroll
  for (int offset = 16; offset >= kThreadsPerRow; offset /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        sums[i][j] += __shfl_xor_sync(kAllLanes, sums[i][j], offset);
      }
    }
  }
  if constexpr (kSets == 1) {
    if (threadIdx.y != 0) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!Slice::owns(i)) continue;
#pragma unroll
      for (int j = 0; j < kLength; ++j) partials[Slice::column(i) + j] = sums[i][j];
    }
  } else {
    __shared__ float together[kCols];
    for (int set = 0; set < kSets; ++set) {
      if (threadIdx.y == set * kRowsPerWarp) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          if (!Slice::owns(i)) continue;
#pragma unroll
          for (int j = 0; j < kLength; ++j) {
            const int c = Slice::column(i) + j;
            const float total = set == 0 ? sums[i][j] : together[c] + sums[i][j];
            together[c] = total;
            if (set == kSets - 1) partials[c] = total;
          }
        }
      }
      __syncthreads();
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreadsPerRow* kRowsPerBlock, MIN_BLOCKS)
    norm_backward(const X* __restrict__ dy, const X* __restrict__ x,
                  const Gamma* __restrict__ gamma, MEAN_PARAMETER const float* __restrict__ rstd,
                  DH_PARAMETER X* __restrict__ dx, float* __restrict__ partials, long long rows) {
  __shared__ Sum::Buffers buffers;
  Sum sum_over_row(buffers);

  Vector<Gamma, kLength> scale[kCount];
  if constexpr (HOLD_GAMMA) Slice::load_all<false>(scale, gamma, true);

  float gamma_sums[kCount][kLength] = {};
#if HAS_BETA
  float beta_sums[kCount][kLength] = {};
#endif

  const long long stride = static_cast<long long>(gridDim.x) * kRowsPerBlock;
  long long first = static_cast<long long>(blockIdx.x) * kRowsPerBlock;
  RowInput next;
  if constexpr (PREFETCH) {
    load_row(next, dy, x, mean, rstd, first + threadIdx.y, first + threadIdx.y < rows);
  }
  // The bound is the block's first row: all its threads make the same number of turns, as the
  // reduction wants. Rows past the end read as zero and add nothing.
  for (; first < rows; first += stride) {
    const long long row = first + threadIdx.y;
    const bool active = row < rows;
    RowInput in;
    if constexpr (PREFETCH) {
      in = next;
      load_row(next, dy, x, mean, rstd, row + stride, row + stride < rows);
    } else {
      load_row(in, dy, x, mean, rstd, row, active);
    }
#if HAS_ADD
    Vector<X, kLength> residual[kCount];
    Slice::load_all<false>(residual, dh + row * kCols, active);
#endif
    if constexpr (!HOLD_GAMMA) Slice::load_all<false>(scale, gamma, true);

    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!Slice::owns(i)) continue;
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        const float xhat = (in.x[i].at(j) - in.mean) * in.rstd;
        const float cotangent = in.dy[i].at(j);
        const float w = cotangent * (scale[i].at(j) + (ZERO_CENTERED ? 1.0f : 0.0f));
        sums[0] += w * xhat;
        sums[1] += w;
        gamma_sums[i][j] += cotangent * xhat;
#if HAS_BETA
        beta_sums[i][j] += cotangent;
#endif
      }
    }
#if LAYER
    sum_over_row(sums);
    const float mean_w = sums[1] / kCols;
#else
    float only[1] = {sums[0]};
    sum_over_row(only);
    sums[0] = only[0];
    const float mean_w = 0.0f;
#endif
    const float mean_wx = sums[0] / kCols;

    Vector<X, kLength> result[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      in.x[i].forget();
      in.dy[i].forget();
      scale[i].forget();
#if HAS_ADD
      residual[i].forget();
#endif
      float values[kLength];
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        const float xhat = (in.x[i].at(j) - in.mean) * in.rstd;
        const float w = in.dy[i].at(j) * (scale[i].at(j) + (ZERO_CENTERED ? 1.0f : 0.0f));
        values[j] = in.rstd * (w - mean_w - xhat * mean_wx);
#if HAS_ADD
        values[j] += residual[i].at(j);
#endif
      }
      result[i] = rounded<X>(values);
    }
    // Of rows in a warp: longer ones spilled with it on sm_80.
    if (kThreadsPerRow <= 32 && is_misplaced<kLength>(dx)) return;
    Slice::store_all<true>(dx + row * kCols, result, active);
  }

  const long long block_offset = static_cast<long long>(blockIdx.x) * kCols;
  write_partials(gamma_sums, partials + block_offset);
#if HAS_BETA
  __syncthreads();
  write_partials(beta_sums, partials + static_cast<long long>(gridDim.x) * kCols + block_offset);
#endif
}
