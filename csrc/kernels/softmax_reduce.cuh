// Pairs of floats from each warp of a row to all of its threads, in its block or over its cluster.
#pragma once
#include "lanes.cuh"
#include "softmax_ptx.cuh"

template <int kThreads, int kRows, int kParts, bool kCluster = (kParts > 1)>
struct Exchange;

// In a block: two buffers used in turn make one barrier a row enough, as in reduce.cuh.
template <int kThreads, int kRows>
struct Exchange<kThreads, kRows, 1, false> {
  static constexpr int kPairs = kThreads > 32 ? kThreads / 32 : 1;
  static constexpr int kBytes = kPairs > 1 ? 16 * kRows * kPairs : 0;

  float* shared;
  int turn = 0;

  __device__ explicit Exchange(float* buffers) : shared(buffers) {}

  __device__ __forceinline__ void wait_for_cluster() const {}

  // Puts the warp's pair, the same in all of its lanes; returns the kPairs pairs of the row.
  __device__ __forceinline__ const float* over_row(float first, float second, int = 1) {
    float* pairs = shared + (turn * kRows + static_cast<int>(threadIdx.y)) * 2 * kPairs;
    if (threadIdx.x % 32 == 0) {
      pairs[2 * (threadIdx.x / 32)] = first;
      pairs[2 * (threadIdx.x / 32) + 1] = second;
    }
    __syncthreads();
    turn ^= 1;
    return pairs;
  }
};

// Over a cluster: each warp sends its pair to all blocks, whose barriers wait for the bytes. Two
// slots in turn: who puts step j has seen all of step j - 1, for which every warp had seen all of
// j - 2. All blocks must have started, and their barriers be known: `wait_for_cluster`.
template <int kThreads, int kParts>
struct Exchange<kThreads, 1, kParts, true> {
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kPairs = kParts * kWarps;
  static constexpr int kBytes = 16 * kPairs + 2 * kBarrierBytes;

  float* slots;
  Shared barriers;
  int step = 0;

  __device__ explicit Exchange(float* memory)
      : slots(memory), barriers(shared_address(memory) + 16 * kPairs) {
    if (threadIdx.x != 0) return;
    for (int s = 0; s < 2; ++s) barrier_init(barriers + s * kBarrierBytes, 1);
    barriers_visible();
  }

  __device__ __forceinline__ void wait_for_cluster() {
    if (!started_) cluster_sync();
    started_ = true;
  }

  // As above; the pairs come block by block. `parts`: blocks that take part, the first ones.
  __device__ __forceinline__ const float* over_row(float first, float second, int parts = kParts) {
    const Shared all_there = barriers + step % 2 * kBarrierBytes;
    float* pairs = slots + step % 2 * 2 * kPairs;
    if (threadIdx.x == 0) barrier_arrive_expecting(all_there, 8 * kWarps * parts);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int own = static_cast<int>(cluster_rank() * kWarps + threadIdx.x / 32);
    if (lane < parts) {
      send_to_rank(shared_address(pairs + 2 * own), all_there, lane, first, second);
    }
    barrier_wait(all_there, step / 2 & 1);
    ++step;
    return pairs;
  }

 private:
  bool started_ = false;
};

// The sum of the first of each pair, in an order that is fixed: the same bits every run.
template <int kCount>
__device__ __forceinline__ float summed_parts(const float* parts, int count = kCount) {
  float sum = 0.0f;
  if constexpr (kCount <= 8) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += i < count ? parts[2 * i] : 0.0f;
    return sum;
  } else {
    for (int i = threadIdx.x % 32; i < count; i += 32) sum += parts[2 * i];
    return sum_lanes<32>(sum);
  }
}
