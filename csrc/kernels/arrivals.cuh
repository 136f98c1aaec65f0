// Whole warps that arrive at a barrier.
//
// One lane does it for the warp, after what orders the others' work before it. Racecheck follows a
// barrier only from threads that arrive themselves: for it, kernels are built so that every lane
// does.
#pragma once
#include "async.cuh"

#ifdef FOR_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

__device__ __forceinline__ void warp_arrives(Shared barrier) {
  if (threadIdx.x % (32 / kWarpArrivals) == 0) barrier_arrive(barrier);
}
