// The gradients of a norm's parameters, of rows that all blocks of a launch share (resident.cuh).
#pragma once
#include "resident.cuh"

constexpr bool kMoves = kPeriod > 1;  // a worker's columns move on from place to place
constexpr int kSums = 1 + HAS_BETA;
static_assert(!kMoves || kGroups == 1, "all workers move their columns at once");

// A worker's part of the parameters' gradients, in registers to the end.
class Gradients {
  using Edges = float[kSums][kEach][kWarps][kStep];

 public:
  static constexpr int kBytes = 16 + (kMoves ? 2 * static_cast<int>(sizeof(Edges)) : 0);

  static constexpr int kTogetherBytes = kGroups * kSums * kPartCols * 4;

  // `stages`: kTogetherBytes of shared memory, free when all rows are done; `own`: kBytes, on 16.
  __device__ Gradients(unsigned char* stages, unsigned char* own)
      : met_(shared_address(own)),
        edges_(reinterpret_cast<Edges*>(own + 16)),
        together_(reinterpret_cast<float*>(stages)) {
    if (threadIdx.x == 0) barrier_init(met_, kWarps * kWarpArrivals);
  }

  __device__ __forceinline__ void add(int i, int j, float gamma, float beta) {
    terms_[0][i][j] += gamma;
    if (HAS_BETA) terms_[HAS_BETA][i][j] += beta;
  }

  // From one place of a word to the next: all columns move on by kStep elements, the last ones of a
  // word into the next word, which is the next lane's. All workers.
  __device__ void move() {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    Edges& edges = edges_[meetings_ % 2];
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kStep; ++j) {
          if (lane == 31) edges[s][i][warp][j] = terms_[s][i][kWidth - kStep + j];
        }
      }
    }
    meet();
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int i = kEach - 1; i >= 0; --i) {
        float from_before[kStep];
#pragma unroll
        for (int j = 0; j < kStep; ++j) {
          const float last = terms_[s][i][kWidth - kStep + j];
          from_before[j] = __shfl_sync(kAllLanes, last, lane == 0 ? 0 : lane - 1);
          if (lane > 0) continue;
          from_before[j] = warp > 0 ? edges[s][i][warp - 1][j] : 0.0f;
          if (warp == 0 && i > 0) from_before[j] = edges[s][i > 0 ? i - 1 : 0][kWarps - 1][j];
        }
#pragma unroll
        for (int j = kWidth - 1; j >= kStep; --j) terms_[s][i][j] = terms_[s][i][j - kStep];
#pragma unroll
        for (int j = 0; j < kStep; ++j) terms_[s][i][j] = from_before[j];
      }
    }
  }

  // `to` at the part's first column, one for each sum. Those of a column meet in the stages where
  // groups have rows of their own, or where words do not lie as `to` does.
  __device__ void write(float* const (&to)[kSums], const OwnWords& own, int group) {
    if constexpr (!kMoves && kGroups == 1) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if (own.owns(i)) own.store_word(to[s], i, rounded<float>(terms_[s][i]));
        }
      }
      return;
    }
    meet();  // nobody needs the stages any more
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const int column = own.column(i) + j;
          if (own.is_column(column)) *term(group, s, column) = terms_[s][i][j];
        }
      }
    }
    meet();
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      for (int c = static_cast<int>(threadIdx.x); c < own.count; c += kWorkers) {
        float sum = *term(0, s, c);
        for (int g = 1; g < kGroups; ++g) sum += *term(g, s, c);
        to[s][c] = sum;
      }
    }
  }

 private:
  __device__ __forceinline__ float* term(int group, int which, int column) const {
    return together_ + (group * kSums + which) * kPartCols + plane_of(column);
  }
  __device__ __forceinline__ void meet() {
    __syncwarp();
    warp_arrives(met_);
    barrier_wait(met_, meetings_++ & 1);
  }

  const Shared met_;
  Edges* const edges_;
  float* const together_;
  int meetings_ = 0;
  float terms_[kSums][kEach][kWidth] = {};
};
