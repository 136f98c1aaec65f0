// Some values a lane, brought together over lanes: a lane sends the half that it does not keep, so
// that of 8 values 8 lanes take 7 shuffles where each value by itself would take 24.
#pragma once
#include "lanes.cuh"

// The lanes' numbers differ in bits kStep, 2 kStep, ... (kLanes of them); kValues / kLanes values
// are left to each, from `kept` on, in values[0], ...; one where there are more lanes than values.
template <int kLanes, int kStep, int kValues = 8>
struct Halving {
  static constexpr int kLeft = kLanes < kValues ? kValues / kLanes : 1;

  static __device__ __forceinline__ int kept() {
    return static_cast<int>(threadIdx.x) / kStep % kLanes * kValues / kLanes;
  }

  template <typename Operation>
  static __device__ __forceinline__ void reduce(float (&values)[kValues],
                                                const Operation& operation) {
    int left = kValues;
#pragma unroll
    for (int offset = kLanes / 2 * kStep; offset >= kStep; offset /= 2) {
      if (left == 1) {
        values[0] = operation(values[0], __shfl_xor_sync(kAllLanes, values[0], offset));
        continue;
      }
      left /= 2;
      const bool upper = threadIdx.x & static_cast<unsigned>(offset);
#pragma unroll
      for (int k = 0; k < kValues / 2; ++k) {
        if (k >= left) continue;
        const float sent = upper ? values[k] : values[k + left];
        const float own = upper ? values[k + left] : values[k];
        values[k] = operation(own, __shfl_xor_sync(kAllLanes, sent, offset));
      }
    }
  }
};

struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Larger {  // neither is NaN
  __device__ __forceinline__ float operator()(float a, float b) const { return a > b ? a : b; }
};
