// What a thread of norm_backward_staged.cuh holds from row to row: its columns of gamma, and its
// sums for the parameters' gradients, which it writes in the end.
#pragma once
#include "exchange.cuh"
#include "norm_values.cuh"

struct Sums {
  float gamma[kCount][kLength];
  float gamma_edge;
#if HAS_BETA
  float beta[kCount][kLength];
  float beta_edge;
#endif
};

// What a thread has of gamma: as numbers (OPEN), where registers allow, or as memory holds it. From
// single elements, or the compiler packs 16-bit ones again and unpacks them for each row.
struct Scales {
#if OPEN
  float words[kCount][kLength];
#else
  Vector<Gamma, kLength> words[kCount];
#endif
  float edge;

  // `gamma`: at the chunk's first column.
  __device__ __forceinline__ Scales(const Part& part, const Gamma* __restrict__ gamma) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!part.owns(i)) continue;
#if OPEN
#pragma unroll
      for (int j = 0; j < kLength; ++j) words[i][j] = scaled_by(element(gamma[part.column(i) + j]));
#else
      words[i] = part.load_parameter(gamma, i);
#endif
    }
    edge = part.has_edge ? scaled_by(element(gamma[part.edge])) : 0.0f;
  }

  __device__ __forceinline__ float at(int i, int j) const {
#if OPEN
    return words[i][j];
#else
    return scaled_by(words[i].at(j));
#endif
  }
};

// Each thread's sums to the block's row of partials; those of rows that lie side by side in a block
// are added up first, in order.
__device__ __forceinline__ void write_sums(const Part& part, float (&sums)[kCount][kLength],
                                           float edge, float* together,
                                           float* __restrict__ partials) {
#pragma unroll
  for (int offset = 16; offset >= kGroup; offset /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        sums[i][j] += __shfl_xor_sync(kAllLanes, sums[i][j], offset);
      }
    }
  }
  constexpr int kSetThreads = kWide ? kGroup : 32;  // threads that hold sums of different columns
  const int first = kRagged ? part.first_column : 0;
  constexpr int kSets = kThreads / kSetThreads;
  for (int set = 0; set < kSets; ++set) {
    const bool mine = threadIdx.x / kSetThreads == set && threadIdx.x % kSetThreads < kGroup;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!mine || !part.owns(i)) continue;
      const int c = first + part.column(i);
      float* const to = set < kSets - 1 ? together : partials;
      if constexpr (kRagged) {  // other sets' words start elsewhere
#pragma unroll
        for (int j = 0; j < kLength; ++j) {
          to[c + j] = sums[i][j] + (set > 0 ? together[c + j] : 0.0f);
        }
      } else {
        if (set > 0) {
#pragma unroll
          for (int j = 0; j < kLength; ++j) sums[i][j] += together[c + j];
        }
        store<true, false, kLength>(to + c, rounded<float>(sums[i]));
      }
    }
    if (mine && part.has_edge) {
      const int c = first + part.edge;
      (set < kSets - 1 ? together : partials)[c] = edge + (set > 0 ? together[c] : 0.0f);
    }
    __syncthreads();
  }
}
