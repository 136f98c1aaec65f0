// What quantising kernels do by PTX: apart from the rest, so that a host compiler can stand in.
#pragma once

// The product, subnormal factors and a subnormal product as 0: the numbers that XLA:CPU gives.
__device__ __forceinline__ float flushed_product(float a, float b) {
  float product;
  asm("mul.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

// The larger of a magnitude and that of `value`; NaN where one is NaN.
__device__ __forceinline__ float larger_magnitude(float magnitude, float value) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(magnitude), "f"(fabsf(value)));
  return larger;
}

// Two numbers of 16 bits without a sign in a word; the larger of each.
__device__ __forceinline__ unsigned larger_pair(unsigned a, unsigned b) { return __vmaxu2(a, b); }

// A line of 128 bytes on its way to the L2 cache.
__device__ __forceinline__ void fetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// 1 / value, rounded as a division is.
__device__ __forceinline__ float reciprocal(float value) {
  float result;
  asm("rcp.rn.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// One place at a time: else the compiler computes those of all rows first, and they take registers.
template <typename T>
__device__ __forceinline__ void advance(T*& place, long long by) {
  place += by;
  asm volatile("" : "+l"(place));
}

// Of all blocks of the launch, in whatever order they come.
__device__ __forceinline__ void raise_to(unsigned* largest, unsigned value) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(largest), "r"(value) : "memory");
}
__device__ __forceinline__ unsigned seen_so_far(const unsigned* largest) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(largest) : "memory");
  return value;
}

__device__ __forceinline__ void raise_shared(int* largest, int value) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(largest));
  asm volatile("red.relaxed.cta.shared.max.s32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}

// 16 bytes on their way from global to shared memory; the thread itself may read them after
// `wait_for_words`.
__device__ __forceinline__ void fetch_word(uint4* to, const void* from) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_words() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// In groups: a group is what was fetched since the one before; all but the newest kLeft are there.
__device__ __forceinline__ void end_group_of_words() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
