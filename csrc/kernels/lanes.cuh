// Sums over neighbouring lanes of a warp, in a fixed order.
#pragma once

constexpr unsigned kAllLanes = 0xffffffffu;

template <int kWidth>
__device__ __forceinline__ float sum_lanes(float value) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}
