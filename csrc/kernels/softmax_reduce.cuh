// Pairs of floats from each warp of a row to all of its threads, in its block and over its cluster.
//
// Two buffers used in turn make one barrier a row enough, as in reduce.cuh. A cluster's blocks
// write into each other's shared memory, so all must have started: `wait_for_cluster` sees to that.
#pragma once
#include "lanes.cuh"
#include "softmax_ptx.cuh"

template <int kThreads, int kRows, int kParts>
struct Exchange {
  static constexpr int kWarps = kThreads > 32 ? kThreads / 32 : 1;
  static constexpr int kBlockFloats = kWarps > 1 ? 2 * kRows * kWarps : 0;
  static_assert(kParts == 1 || kRows == 1, "a cluster has one row");

  float* shared;
  int turn = 0;

  __device__ explicit Exchange(float* buffers) : shared(buffers) {}

  __device__ __forceinline__ void wait_for_cluster() {
    if constexpr (kParts > 1) {
      if (!started_) cluster_sync();
      started_ = true;
    }
  }

  // Puts the warp's pair, the same in all of its lanes; returns the kWarps pairs of the row.
  __device__ __forceinline__ const float* over_block(float first, float second) {
    float* pairs = shared + turn * kBlockFloats + static_cast<int>(threadIdx.y) * 2 * kWarps;
    if (threadIdx.x % 32 == 0) {
      pairs[2 * (threadIdx.x / 32)] = first;
      pairs[2 * (threadIdx.x / 32) + 1] = second;
    }
    __syncthreads();
    return pairs;
  }

  // Puts the block's pair; returns the kParts pairs of the row.
  __device__ __forceinline__ const float* over_cluster(float first, float second) {
    float* pairs = shared + 2 * kBlockFloats + turn * 2 * kParts;
    if (threadIdx.x < kParts) {
      put_at_rank(pairs + 2 * cluster_rank(), threadIdx.x, first, second);
    }
    cluster_sync();
    return pairs;
  }

  __device__ __forceinline__ void next() { turn ^= 1; }

 private:
  bool started_ = false;
};

// The sum of the first of each pair, in an order that is fixed: the same bits every run.
template <int kCount>
__device__ __forceinline__ float summed_parts(const float* parts) {
  float sum = 0.0f;
  if constexpr (kCount <= 8) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += parts[2 * i];
    return sum;
  } else {
    for (int i = threadIdx.x % 32; i < kCount; i += 32) sum += parts[2 * i];
    return sum_lanes<32>(sum);
  }
}
