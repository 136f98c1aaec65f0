// The instructions that softmax needs beyond those of ptx.cuh and async.cuh. A host compiler, which
// stands in for the device in tests, has what is written in their place.
#pragma once
#include "async.cuh"
#include "elements.cuh"

#ifdef __CUDA_ARCH__
// The compiler moves no access to memory from one side of this to the other.
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }

// 2^x by one instruction, within 2 units in the last place; a result below 2^-126 is 0.
__device__ __forceinline__ float exp2_flushed(float x) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

// 1 / x within 1 unit in the last place, by one instruction instead of the dozens of a division.
__device__ __forceinline__ float fast_reciprocal(float x) {
  float value;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

// The bytes of a register that the digits of `which` number, the lowest first.
__device__ __forceinline__ unsigned picked_bytes(unsigned from, unsigned which) {
  return __byte_perm(from, 0, which);
}

// Of each of two elements the larger, or the smaller; that of a NaN and a number is the number.
template <bool kLargest>
__device__ __forceinline__ unsigned extreme_pair(unsigned a, unsigned b, BFloat16) {
  if constexpr (kLargest) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
  } else {
    asm("min.bf16x2 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
  }
  return a;
}
template <bool kLargest>
__device__ __forceinline__ unsigned extreme_pair(unsigned a, unsigned b, Float16) {
  if constexpr (kLargest) {
    asm("max.f16x2 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
  } else {
    asm("min.f16x2 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
  }
  return a;
}
#else
inline void keep_order() {}
inline float exp2_flushed(float x) { return exp2f(x); }
inline float fast_reciprocal(float x) { return 1.0f / x; }
inline unsigned picked_bytes(unsigned from, unsigned which) {
  unsigned to = 0;
  for (int i = 0; i < 4; ++i) to |= (from >> 8 * (which >> 4 * i & 3) & 0xff) << 8 * i;
  return to;
}
template <bool kLargest, typename T>
inline unsigned extreme_pair(unsigned a, unsigned b, T) {
  const Vector<T, 2> one{a}, other{b};
  unsigned to = 0;
  for (int i = 0; i < 2; ++i) {
    const float x = one.at(i), y = other.at(i);
    const bool first = y != y || (kLargest ? x > y : x < y);
    to |= (first ? a : b) & 0xffffu << 16 * i;
  }
  return to;
}
#endif
