// Two sums a warp, brought together over a block or a cluster of blocks that share rows
// (tiles.cuh).
#pragma once
#include "tiles.cuh"

// Without a stop: `publish` tells them to all warps, `collect` waits for those of all. Between the
// two there is time for other work.
//
// Steps take 4 slots in turn. Whoever publishes step j has collected j - 2, for which every warp
// had to publish j - 2, after it collected j - 4: so slot j % 4 is free.
constexpr int kRowWarps = kWide ? kGroup / 32 : 1;
constexpr int kParts = kCluster * kRowWarps;  // of one row
struct Exchange {
  static constexpr int kSlots = 4;
  static constexpr bool kSerial = kParts <= 16;  // all parts read by every thread: no shuffles
  static constexpr int kShare = kSerial ? kParts : (kParts + 31) / 32;  // parts a thread reads
  static constexpr int kSlotBytes = (kParts * 8 + 15) / 16 * 16;
  static constexpr int kGroupBytes = kSlots * (kSlotBytes + kBarrierBytes);
  static constexpr int kBytes = kWide ? kRowsAtOnce * kGroupBytes : 0;

  Shared values, barriers;
  unsigned rank;

  // `at`: kBytes of shared memory. In a cluster the values' bytes are what is waited for, and the
  // leader announces them.
  __device__ Exchange(Shared at, unsigned rank_of_block) : rank(rank_of_block) {
    if constexpr (!kWide) return;
    values = at + threadIdx.x / kGroup * kGroupBytes;
    barriers = values + kSlots * kSlotBytes;
    if (threadIdx.x % kGroup != 0) return;
#pragma unroll 1
    for (int s = 0; s < kSlots; ++s) {
      barrier_init(barriers + s * kBarrierBytes, kCluster == 1 ? kRowWarps * kWarpArrivals : 1);
    }
  }

  __device__ __forceinline__ void publish(int step, float first, float second) {
    const int lane = threadIdx.x % 32;
    const Shared all = barriers + step % kSlots * kBarrierBytes;
    const Shared mine =
        values + step % kSlots * kSlotBytes + (rank * kRowWarps + threadIdx.x % kGroup / 32) * 8;
    if constexpr (kCluster == 1) {
      if (lane == 0) {
        const unsigned words[2] = {__float_as_uint(first), __float_as_uint(second)};
        store_words<2>(mine, words);
      }
      warp_arrives(all);
    } else {
      if (threadIdx.x == 0) barrier_arrive_expecting(all, kParts * 8);
      if (lane < kCluster) send_to_rank(mine, all, lane, first, second);
    }
  }

  // This thread's share of a step's parts: all, or lane, lane + 32, ...; zero past the end.
  __device__ __forceinline__ void collect(int step, float (&first)[kShare],
                                          float (&second)[kShare]) {
    barrier_wait(barriers + step % kSlots * kBarrierBytes, step / kSlots & 1);
    const Shared slot = values + step % kSlots * kSlotBytes;
#pragma unroll
    for (int m = 0; m < kShare; ++m) {
      unsigned words[2] = {0, 0};
      if (part(m) < kParts) load_words<2>(slot + part(m) * 8, words);
      first[m] = __uint_as_float(words[0]);
      second[m] = __uint_as_float(words[1]);
    }
  }

  static __device__ __forceinline__ int part(int m) {
    return kSerial ? m : m * 32 + static_cast<int>(threadIdx.x % 32);
  }

  static __device__ __forceinline__ float total(const float (&share)[kShare]) {
    float sum = share[0];
#pragma unroll
    for (int m = 1; m < kShare; ++m) sum += share[m];
    if constexpr (kSerial) return sum;
    return sum_lanes<32>(sum);
  }
};

// Elements of a row that warp `part` of a wide row owns, counted over the cluster; `shift` as in
// row_part.cuh.
__device__ __forceinline__ float elements_of(int part, int shift) {
  const WholeWords whole(shift);
  const int block = part / kRowWarps, warp = part % kRowWarps;
  const int left = whole.words - block * kVectors;
  const int in_block = left < 0 ? 0 : left < kVectors ? left : kVectors;
  const int in_last_turn = in_block % kGroup - warp * 32;
  int owned = in_block / kGroup * 32;
  owned += in_last_turn < 0 ? 0 : in_last_turn < 32 ? in_last_turn : 32;
  owned *= kLength;
  if (part == kRowWarps - 1) owned += whole.edges();
  return part < kParts ? static_cast<float>(owned) : 0.0f;
}

__device__ __forceinline__ void sync_all() {
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
}
