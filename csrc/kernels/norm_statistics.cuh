// Statistics of LayerNorm and RMSNorm, and h: found before tiles of the norm's values are quantised
// (norm_quantized_tiles.cuh).
//
//   h, mean, rstd as in norm_forward.cuh
//
// Layout: x, add, h [rows, cols]; mean, rstd [rows] float32.
// Threads: 256. STAT_ROWS rows a block: a warp a row, two rows one after the other, or, of long
// rows, several warps a row. Each part is centred on its own mean, and the parts are merged as in
// reduce.cuh.
#include "edges.cuh"
#include "norm_values.cuh"
#include "reduce.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kStatRows = STAT_ROWS;
constexpr int kWarpsARow = kStatRows < kWarps ? kWarps / kStatRows : 1;
constexpr int kRowsAtOnce = kWarps / kWarpsARow;
constexpr int kBatch = sizeof(X) == 4 ? 4 : 8;  // vectors that a lane loads at once
static_assert(kStatRows % kRowsAtOnce == 0, "whole turns");

// Of what one lane has of a row; with HAS_ADD, also writes h.
__device__ __forceinline__ Moments moments_of_lane(const X* __restrict__ x,
                                                   const X* __restrict__ add, X* __restrict__ h,
                                                   long long cols, bool aligned) {
  constexpr int kStep = kWarpsARow * 32 * kEdge;  // columns from one vector of a lane to its next
  Moments moments = {0.0f, 0.0f, 0.0f};
  const int lane = threadIdx.x % (kWarpsARow * 32);
  for (long long first = lane * kEdge; first < cols; first += kStep * kBatch) {
    Vector<X, kEdge> values[kBatch];
    int counts[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const long long at = first + b * kStep;
      const long long left = cols - at;
      counts[b] = left >= kEdge ? kEdge : left > 0 ? static_cast<int>(left) : 0;
      values[b] = load_first<EVEN, false>(x + at, counts[b], aligned);
    }
#if HAS_ADD
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const long long at = first + b * kStep;
      values[b] = sum_of<kEdge>(values[b], load_first<EVEN, true>(add + at, counts[b], aligned));
      if (aligned && counts[b] == kEdge) {
        store<true, false, kEdge>(h + at, values[b]);
      } else {
#pragma unroll
        for (int j = 0; j < kEdge; ++j) {
          const float one[1] = {values[b].at(j)};
          if (j < counts[b]) store<false, false, 1>(h + at + j, rounded<X>(one));
        }
      }
    }
#endif
    Moments piece = {0.0f, 0.0f, 0.0f};
#if LAYER
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      piece.count += static_cast<float>(counts[b]);
#pragma unroll
      for (int j = 0; j < kEdge; ++j) piece.mean += values[b].at(j);
    }
    piece.mean /= piece.count;
#endif
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int j = 0; j < kEdge; ++j) {
        if (LAYER && j >= counts[b]) continue;  // (0 - mean)^2 must not count
        const float centred = values[b].at(j) - piece.mean;
        piece.squares += centred * centred;
      }
    }
    if (LAYER) {
      moments = merged(moments, piece);
    } else {
      moments.squares += piece.squares;
    }
  }
  return moments;
}

// Parts of a row brought together: a part is a count, a sum, and squares about its own mean.
__device__ __forceinline__ float squares_about(float mean, float count, float sum, float squares) {
  const float distance = count > 0.0f ? sum / count - mean : 0.0f;
  return squares + count * distance * distance;
}

struct StatBuffers {
  float sums[kWarps], squares[kWarps], counts[kWarps];
};

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    norm_statistics(const X* __restrict__ x,
#if HAS_ADD
                    const X* __restrict__ add, X* __restrict__ h,
#endif
#if LAYER
                    float* __restrict__ mean_out,
#endif
                    float* __restrict__ rstd_out, long long rows, long long cols, float epsilon) {
  __shared__ StatBuffers shared;
#if HAS_ADD
  const bool aligned =
      EVEN && is_aligned<kEdge>(x) && is_aligned<kEdge>(add) && is_aligned<kEdge>(h);
#else
  constexpr const X* add = nullptr;
  constexpr X* h = nullptr;
  const bool aligned = EVEN && is_aligned<kEdge>(x);
#endif
  const int warp = threadIdx.x / 32;
#pragma unroll 1
  for (int turn = 0; turn < kStatRows; turn += kRowsAtOnce) {
    const long long row = static_cast<long long>(blockIdx.x) * kStatRows + turn + warp / kWarpsARow;
    const bool active = row < rows;
    const long long offset = row * cols;
    Moments own = {0.0f, 0.0f, 0.0f};
    if (active) {
      own = moments_of_lane(x + offset, HAS_ADD ? add + offset : add, HAS_ADD ? h + offset : h,
                            cols, aligned);
    }
    float sum = 0.0f, squares = own.squares, count = static_cast<float>(cols);
#if LAYER
    count = sum_lanes<32>(own.count);
    sum = sum_lanes<32>(own.count * own.mean);
    const float mean_of_warp = count > 0.0f ? sum / count : 0.0f;
    const float distance = own.mean - mean_of_warp;
    squares += own.count * distance * distance;
#endif
    squares = sum_lanes<32>(squares);
    if constexpr (kWarpsARow > 1) {
      if (threadIdx.x % 32 == 0) {
        shared.sums[warp] = sum;
        shared.squares[warp] = squares;
        shared.counts[warp] = count;
      }
      __syncthreads();
    }
    if (active && threadIdx.x % (kWarpsARow * 32) == 0) {
      if constexpr (kWarpsARow > 1) {
        sum = squares = 0.0f;
        for (int w = warp; w < warp + kWarpsARow; ++w) sum += shared.sums[w];
      }
      const float mean = sum / cols;
      if constexpr (kWarpsARow > 1) {
        for (int w = warp; w < warp + kWarpsARow; ++w) {
          squares += LAYER
                         ? squares_about(mean, shared.counts[w], shared.sums[w], shared.squares[w])
                         : shared.squares[w];
        }
      }
#if LAYER
      mean_out[row] = mean;
#endif
      rstd_out[row] = inverse_root(squares / cols + epsilon);
    }
    if constexpr (kWarpsARow > 1 && kStatRows > kRowsAtOnce) __syncthreads();
  }
}
