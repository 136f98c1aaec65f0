// The instructions that softmax needs beyond those of ptx.cuh and async.cuh. A host compiler, which
// stands in for the device in tests, has what is written in their place.
#pragma once
#include "async.cuh"

#ifdef __CUDA_ARCH__
// 2^x by one instruction, within 2 units in the last place; a result below 2^-126 is 0.
__device__ __forceinline__ float exp2_flushed(float x) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

// Writes a pair to where block `rank` of the cluster has what this one has at `mine`. Seen there
// after the next cluster_sync.
__device__ __forceinline__ void put_at_rank(float* mine, unsigned rank, float first, float second) {
  const unsigned here = static_cast<unsigned>(__cvta_generic_to_shared(mine));
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there), "f"(first), "f"(second)
               : "memory");
}
#else
inline float exp2_flushed(float x) { return exp2f(x); }
inline void put_at_rank(float* mine, unsigned rank, float first, float second) {
  float* there = host::fibers[rank * host::per_block].shared + (mine - host::me().shared);
  there[0] = first;
  there[1] = second;
}
#endif
