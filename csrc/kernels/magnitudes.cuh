// Largest magnitudes, by keys: the bits of a float32 without its sign, one place up, whose order is
// theirs, with infinity and NaN on top. Keys that leave these two out are 2^24 higher: the sum
// wraps around for them, to below the key of 0.
#pragma once
#include "quantize_ptx.cuh"
#include "reduce.cuh"

constexpr int kFiniteZero = 0x00800000;
constexpr int kInfinite = 0x7f800000;

__device__ __forceinline__ int magnitude_key(float value) {
  return static_cast<int>(__float_as_uint(value) & 0x7fffffffu);
}
__device__ __forceinline__ int finite_key(float value) {
  return static_cast<int>((__float_as_uint(value) & 0x7fffffffu) + kFiniteZero);
}
__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }

// Float32 bits of the magnitude with such a key; one NaN stands for all.
__device__ __forceinline__ unsigned bits_of_magnitude(int key) {
  return key > kInfinite ? 0x7fc00000u : static_cast<unsigned>(key);
}
__device__ __forceinline__ unsigned bits_of_finite(int key) {
  return key < kFiniteZero ? 0u : static_cast<unsigned>(key - kFiniteZero);
}

// Over lanes that differ in bits kFrom, 2 kFrom, ..., kTo / 2 of their number.
template <int kFrom, int kTo>
__device__ __forceinline__ int largest_of_lanes(int key) {
#pragma unroll
  for (int offset = kFrom; offset < kTo; offset *= 2) {
    const float other = __shfl_xor_sync(kAllLanes, __int_as_float(key), offset);
    key = larger(key, __float_as_int(other));
  }
  return key;
}

// Tells of a magnitude: seldom, since most are not above what was seen when the block began.
__device__ __forceinline__ void report(unsigned* amax, unsigned seen, int key) {
  const unsigned bits = bits_of_magnitude(key);
  if (bits > seen) raise_to(amax, bits);
}
