// Mean and sum of squared distances from the mean of a row that is seen piece by piece, merged as
// in reduce.cuh.
#pragma once
#include "lanes.cuh"

struct Moments {
  float count;
  float mean;
  float squares;
};

__device__ __forceinline__ Moments merged(const Moments& a, const Moments& b) {
  const float count = a.count + b.count;
  if (count == 0.0f) return a;
  const float delta = b.mean - a.mean;
  const float share = b.count / count;
  return {count, a.mean + delta * share, a.squares + b.squares + delta * delta * a.count * share};
}

// Over kWidth neighbouring lanes.
template <int kWidth>
__device__ __forceinline__ Moments merged_lanes(Moments value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int offset = 1; offset < kWidth; offset *= 2) {
    const Moments other = {__shfl_xor_sync(kAllLanes, value.count, offset),
                           __shfl_xor_sync(kAllLanes, value.mean, offset),
                           __shfl_xor_sync(kAllLanes, value.squares, offset)};
    // The lower lane's part comes first on both sides, so that all lanes get the same bits.
    value = (lane & offset) ? merged(other, value) : merged(value, other);
  }
  return value;
}

template <int kThreads>
__device__ __forceinline__ Moments merged_over_block(Moments value, Moments (&shared)[32]) {
  value = merged_lanes<32>(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
  for (int w = 1; w < kThreads / 32; ++w) value = merged(value, shared[w]);
  __syncthreads();
  return value;
}
