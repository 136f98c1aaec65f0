// float32 to 8 bits: rounded to nearest even, saturated at the format's largest number; NaN is
// 0x7f.
//
// Two numbers in one instruction from sm_89 on. Older GPUs, and the host in tests, compute the
// bits.
#pragma once

// Format codes of the launch plan (shardops/kernels/quantize_plan.py).
struct E4M3 {
  static constexpr int kMantissa = 3;
  static constexpr int kBias = 7;
  static constexpr float kLargest = 448.0f;
  static constexpr int kLargestExponent = 8;
};
struct E5M2 {
  static constexpr int kMantissa = 2;
  static constexpr int kBias = 15;
  static constexpr float kLargest = 57344.0f;
  static constexpr int kLargestExponent = 15;
};
template <int kCode>
struct FormatOf;
template <>
struct FormatOf<0> {
  using Type = E4M3;
};
template <>
struct FormatOf<1> {
  using Type = E5M2;
};

template <typename Format>
__device__ __forceinline__ unsigned fp8_bits(float value) {
  constexpr int kShift = 23 - Format::kMantissa;
  constexpr unsigned kSmallestNormal = (128u - Format::kBias) << 23;
  // A float32 whose last bit is worth the smallest subnormal: adding it rounds to multiples of
  // that.
  constexpr unsigned kGrid = (151u - Format::kBias - Format::kMantissa) << 23;
  const unsigned bits = __float_as_uint(value);
  const unsigned magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  const unsigned largest = __float_as_uint(Format::kLargest);
  const unsigned kept = magnitude < largest ? magnitude : largest;
  unsigned rounded;
  if (kept < kSmallestNormal) {
    rounded = __float_as_uint(__uint_as_float(kept) + __uint_as_float(kGrid)) - kGrid;
  } else {
    const unsigned half = (1u << (kShift - 1)) - 1 + (kept >> kShift & 1);
    rounded = ((kept + half) >> kShift) - ((127u - Format::kBias) << Format::kMantissa);
  }
  return rounded | bits >> 24 & 0x80u;
}

// `low` in the low byte of 16 bits.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
__device__ __forceinline__ unsigned fp8_pair(float low, float high, E4M3) {
  unsigned short bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}
__device__ __forceinline__ unsigned fp8_pair(float low, float high, E5M2) {
  unsigned short bits;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}
#else
template <typename Format>
__device__ __forceinline__ unsigned fp8_pair(float low, float high, Format) {
  return fp8_bits<Format>(low) | fp8_bits<Format>(high) << 8;
}
#endif

template <typename Format>
__device__ __forceinline__ unsigned fp8_word(float a, float b, float c, float d) {
  return fp8_pair(a, b, Format{}) | fp8_pair(c, d, Format{}) << 16;
}

template <typename Format>
__device__ __forceinline__ uint2 fp8_words(const float (&v)[8]) {
  return make_uint2(fp8_word<Format>(v[0], v[1], v[2], v[3]),
                    fp8_word<Format>(v[4], v[5], v[6], v[7]));
}
