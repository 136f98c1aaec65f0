// The largest magnitude of each entry of an array, and the largest of its finite elements.
//
// Layout: x [entries, count], found [entries, 2] float32, zero before the launch.
// Threads: `parts` blocks an entry; a block takes pieces of THREADS · BATCH vectors of 8 elements,
// `parts` pieces apart.
#include "elements.cuh"
#include "magnitudes.cuh"

using X = ElementOf<X_TYPE>::Type;
constexpr int kVector = 8;

struct Keys {
  int all = 0;
  int finite = 0;

  __device__ __forceinline__ void add(float value) {
    all = larger(all, magnitude_key(value));
    finite = larger(finite, finite_key(value));
  }
};

template <bool kAligned>
__device__ __forceinline__ void look_through(const X* __restrict__ x, long long vectors,
                                             long long first, long long stride, Keys& keys) {
  for (long long at = first + threadIdx.x; at < vectors; at += stride) {
    Vector<X, kVector> values[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const long long v = at + b * THREADS;
      values[b] =
          v < vectors ? load<kAligned, false, kVector>(x + v * kVector) : Vector<X, kVector>{};
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) keys.add(values[b].at(j));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    quantize_magnitudes(const X* __restrict__ x, unsigned* __restrict__ found, long long count,
                        int parts) {
  const long long entry = blockIdx.x / parts;
  const int part = blockIdx.x % parts;
  const X* from = x + entry * count;
  const long long piece = THREADS * BATCH;
  Keys keys;
  if (is_aligned<kVector>(from)) {
    look_through<true>(from, count / kVector, part * piece, parts * piece, keys);
  } else {
    look_through<false>(from, count / kVector, part * piece, parts * piece, keys);
  }
  const long long last = count / kVector * kVector + threadIdx.x;
  if (part == 0 && last < count) keys.add(load<false, false, 1>(from + last).at(0));
  keys.all = largest_of_lanes<1, 32>(keys.all);
  keys.finite = largest_of_lanes<1, 32>(keys.finite);
  if (threadIdx.x % 32 == 0) {
    unsigned* to = found + 2 * entry;
    report(to, seen_so_far(to), keys.all);
    const unsigned finite = bits_of_finite(keys.finite);
    if (finite > seen_so_far(to + 1)) raise_to(to + 1, finite);
  }
}
