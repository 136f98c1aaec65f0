// Scales of the blocks of a row whose numbers are in registers (row_sums.cuh).
#pragma once
#include "halving.cuh"
#include "quantize_scales.cuh"
#include "row_sums.cuh"

constexpr int kBlockLanes = kBlock / kLength;
static_assert(kScales == kTensor || (kBlockLanes <= 32 && kGroup % kBlockLanes == 0 &&
                                     kChunk % (kCluster == 1 ? 1 : kBlock) == 0),
              "a block of elements lies in a warp");

// Of the blocks that the thread's vectors lie in: writes each scale once, and returns what each
// vector is multiplied by. Lanes of a block share the work (halving.cuh).
__device__ __forceinline__ void scale_blocks(const float (&y)[kCount][kLength], const Part& part,
                                             Scale* __restrict__ scales_of_row, bool active,
                                             float (&factors)[kCount]) {
  constexpr int kValues = kCount > 4 ? 8 : kCount > 2 ? 4 : kCount;
  static_assert(kCount <= 8, "values that lanes share");
  using Blocks = Halving<kBlockLanes, 1, kValues>;
  static_assert(Blocks::kLeft <= 2, "a lane has one or two of the scales");
  float largest[kValues] = {}, of_all = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < kLength; ++j) largest[i] = larger_magnitude(largest[i], y[i][j]);
    of_all = larger_magnitude(of_all, largest[i]);
  }
  if (magnitude_key(of_all) >= kInfinite) {  // seldom: those do not count
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      largest[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        const float finite = magnitude_key(y[i][j]) < kInfinite ? y[i][j] : 0.0f;
        largest[i] = larger_magnitude(largest[i], finite);
      }
    }
  }
  Blocks::reduce(largest, Larger{});
  // Lanes of a block that have the same scale: the first of them writes it.
  constexpr int kSame = kBlockLanes > kValues ? kBlockLanes / kValues : 1;
  float own[Blocks::kLeft];
#pragma unroll
  for (int k = 0; k < Blocks::kLeft; ++k) {
    const Scaling<Scale> scaling(__float_as_uint(largest[k]));
    own[k] = scaling.factor;
    const int i = Blocks::kept() + k;
    const int vector = i * kGroup + static_cast<int>(threadIdx.x) / kBlockLanes * kBlockLanes;
    const int block = part.column(i) / kBlock;
    if (active && threadIdx.x % kSame == 0 && vector < kVectors && block * kBlock < kCols) {
      scales_of_row[block] = scaling.written;
    }
  }
  const int first_lane = part.thread % 32 / kBlockLanes * kBlockLanes;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    factors[i] =
        __shfl_sync(kAllLanes, own[i % Blocks::kLeft], first_lane + i / Blocks::kLeft * kSame);
  }
}
