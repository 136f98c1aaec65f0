// The instructions that C++ has no word for. Everything else here is plain C++, so that NVRTC needs
// no header of the CUDA toolkit, and a host compiler can stand in for the device in tests.
#pragma once

__device__ __forceinline__ float float_from_f16(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Two values rounded to nearest even, `low` in the low half. One instruction from sm_80 on.
__device__ __forceinline__ unsigned f16x2_from_floats(float low, float high) {
  unsigned bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

__device__ __forceinline__ unsigned bf16x2_from_floats(float low, float high) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// Returns once all launches before this one on the stream have ended and what they wrote is there:
// for launches that start early, which there are from sm_90 on. In others it costs nothing.
__device__ __forceinline__ void wait_for_launches_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A launch after this one that starts early may do so once all blocks of this one have come here.
__device__ __forceinline__ void let_launches_after_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Hides from the compiler where a register's value came from, so that it computes again what was
// computed from it before. Without this it keeps unpacked copies of packed rows alive across a
// reduction, which costs twice the registers.
__device__ __forceinline__ void forget_origin(unsigned& word) { asm volatile("" : "+r"(word)); }
