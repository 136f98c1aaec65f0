// Means and sums of squares of rows whose numbers are in registers, by the threads that have them,
// one barrier a row.
//
// Threads: THREADS_PER_ROW of them, a group, have a row, or CHUNK columns of it where CLUSTER
// blocks share it: a power of two up to 32, ROWS_PER_BLOCK of them side by side; or whole warps,
// and then a block has one row at a time. Thread t of a group has vectors t, t + group, ...
//
// For LayerNorm each warp centres its part on its own mean, and parts are merged as in reduce.cuh.
#pragma once
#include "async.cuh"
#include "lanes.cuh"
#include "mean.cuh"
#include "norm_values.cuh"

constexpr int kCols = COLS;
constexpr int kLength = VECTOR;
constexpr int kGroup = THREADS_PER_ROW;
constexpr int kRowsAtOnce = ROWS_PER_BLOCK;
constexpr int kCluster = CLUSTER;
constexpr int kChunk = CHUNK;
constexpr int kVectors = kChunk / kLength;
constexpr int kCount = (kVectors + kGroup - 1) / kGroup;  // vectors of a thread
constexpr bool kWide = kGroup > 32;
constexpr bool kExact = kCount * kGroup == kVectors && kChunk * kCluster == kCols;
constexpr int kWarps = kWide ? kGroup / 32 : 1;
constexpr int kParts = kCluster * kWarps;
static_assert(kCols % kLength == 0 && kChunk % kLength == 0, "rows are whole vectors");
static_assert(kWide ? kRowsAtOnce == 1 : kCluster == 1, "a group in a warp, or all of a block");
static_assert(kGroup * kRowsAtOnce % 32 == 0, "whole warps");

// What the thread has of each row.
struct Part {
  int thread;  // in the block
  int first;   // column
  __device__ __forceinline__ explicit Part(unsigned rank)
      : thread(
            static_cast<int>(kRowsAtOnce == 1 ? threadIdx.x : threadIdx.y * kGroup + threadIdx.x)),
        first(static_cast<int>(rank * kChunk + threadIdx.x * kLength)) {}

  __device__ __forceinline__ int column(int i) const { return first + i * kGroup * kLength; }
  __device__ __forceinline__ bool owns(int i) const {
    constexpr int kLeast = kCols / kLength - (kCluster - 1) * kVectors;  // of the last block
    if (kExact || (i + 1) * kGroup <= kLeast) return true;
    return i * kGroup + static_cast<int>(threadIdx.x) < kVectors && column(i) < kCols;
  }
};

// Elements of a row that a warp owns, counted over the cluster.
__device__ __forceinline__ float elements_of(int part) {
  if (kExact) return kCount * 32 * kLength;
  const int left = kCols / kLength - part / kWarps * kVectors;
  const int vectors = left < kVectors ? left : kVectors;
  const int last = vectors % kGroup - part % kWarps * 32;
  const int owned = vectors / kGroup * 32 + (last < 0 ? 0 : last < 32 ? last : 32);
  return static_cast<float>(owned * kLength);
}

class RowSums {
  struct alignas(8) Sums {
    float sum;
    float squares;
  };
  // Steps take two slots in turn: whoever writes one again has passed the step between, which all
  // reach only after they have read it.
  static constexpr int kSlots = 2;
  static constexpr bool kSerial = kParts <= 4;  // all parts are read by every thread
  static constexpr int kLanes = kParts > 16 ? 32 : kParts > 8 ? 16 : 8;
  static constexpr int kShare = kSerial ? kParts : (kParts + kLanes - 1) / kLanes;

 public:
  struct Buffers {
    Sums parts[kSlots][kWide ? kParts : 1];
    alignas(8) unsigned char barriers[kSlots][kBarrierBytes];
  };

  // All threads of the cluster.
  __device__ __forceinline__ RowSums(Buffers& shared, const Part& part, unsigned rank)
      : shared_(shared), step_(0) {
    if constexpr (!kWide) return;
    own_part_ = static_cast<int>(rank) * kWarps + part.thread / 32;
    own_share_ = share_of(elements_of(own_part_));
#pragma unroll
    for (int m = 0; m < kShare; ++m) {
      counts_[m] = part_at(m) < kParts ? elements_of(part_at(m)) : 0.0f;
      shares_[m] = share_of(counts_[m]);
    }
    if constexpr (kCluster > 1) {
      if (part.thread == 0) {
        for (int s = 0; s < kSlots; ++s) barrier_init(shared_address(shared_.barriers[s]), 1);
        barriers_visible();
      }
      cluster_sync();
    }
  }

  // `sum` is the thread's own; `squares_about(m)` its sum of (value - m)^2; RMSNorm's are about 0.
  template <typename Squares>
  __device__ __forceinline__ void operator()(float sum, const Squares& squares_about, float& mean,
                                             float& squares) {
    constexpr int kOfWarp = kWide ? 32 : kGroup;
    if (LAYER) sum = sum_lanes<kOfWarp>(sum);
    if constexpr (!kWide) {
      mean = LAYER ? mean_of<kCols>(sum) : 0.0f;
      squares = sum_lanes<kOfWarp>(squares_about(mean));
      return;
    }
    squares = sum_lanes<kOfWarp>(squares_about(LAYER ? sum * own_share_ : 0.0f));
    exchange(sum, squares);
    const Sums* parts = shared_.parts[step_ % kSlots];
    Sums read[kShare];
#pragma unroll
    for (int m = 0; m < kShare; ++m) {
      read[m] = part_at(m) < kParts ? parts[part_at(m)] : Sums{0.0f, 0.0f};
    }
    mean = 0.0f;
    if (LAYER) {
#pragma unroll
      for (int m = 0; m < kShare; ++m) mean += read[m].sum;
      mean = mean_of<kCols>(total(mean));
    }
    squares = 0.0f;
#pragma unroll
    for (int m = 0; m < kShare; ++m) {
      const float distance = read[m].sum * shares_[m] - mean;
      squares += LAYER ? read[m].squares + counts_[m] * distance * distance : read[m].squares;
    }
    squares = total(squares);
    ++step_;
  }

 private:
  static __device__ __forceinline__ float share_of(float count) {
    return count > 0.0f ? 1.0f / count : 0.0f;
  }
  static __device__ __forceinline__ int part_at(int m) {
    return kSerial ? m : m * kLanes + static_cast<int>(threadIdx.x) % kLanes;
  }
  static __device__ __forceinline__ float total(float share) {
    return kSerial ? share : sum_lanes<kLanes>(share);
  }

  // Brings the warp's sums to all warps of the row.
  __device__ __forceinline__ void exchange(float sum, float squares) {
    const int slot = static_cast<int>(step_ % kSlots);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Sums& mine = shared_.parts[slot][own_part_];
    if constexpr (kCluster == 1) {
      if (lane == 0) mine = {sum, squares};
      __syncthreads();
    } else {
      const Shared barrier = shared_address(shared_.barriers[slot]);
      if (threadIdx.x == 0) barrier_arrive_expecting(barrier, kParts * sizeof(Sums));
      if (lane < kCluster) send_to_rank(shared_address(&mine), barrier, lane, sum, squares);
      barrier_wait(barrier, step_ / kSlots % 2);
    }
  }

  Buffers& shared_;
  unsigned step_;
  int own_part_;
  float own_share_, counts_[kShare], shares_[kShare];
};
