// Largest magnitudes, and the scales that they ask for.
//
//   float32:  scale = max(amax / fmax, 2^-126), 1 where amax is 0 or subnormal
//   MXFP8:    scale = 2^max(floor(log2(amax)) - floor(log2(fmax)), -126)
//   data = round(clip(x · (1 / scale), -fmax, fmax))
#pragma once
#include "fp8.cuh"
#include "magnitudes.cuh"

// What a scale covers: codes of the launch plan.
constexpr int kTensor = 0;                   // an entry; it is given
[[maybe_unused]] constexpr int kRow128 = 1;  // 1 x 128
[[maybe_unused]] constexpr int kSquare = 2;  // 128 x 128
constexpr int kRow32 = 3;                    // 1 x 32, a power of two
constexpr int kScales = SCALES;
constexpr int kBlock = kScales == kRow32 ? 32 : 128;
using Format = FormatOf<FORMAT>::Type;
struct Code {
  unsigned char bits;
};
template <bool kPowers>
struct ScaleOf {
  using Type = float;
};
template <>
struct ScaleOf<true> {
  using Type = Code;
};
using Scale = ScaleOf<kScales == kRow32>::Type;

// A scale, as it is written, and what values are multiplied by. `bits`: of the largest finite
// magnitude.
template <typename T>
struct Scaling;
template <>
struct Scaling<float> {
  float written;
  float factor;
  __device__ __forceinline__ explicit Scaling(unsigned bits) {
    const float wanted = __uint_as_float(bits) * (1.0f / Format::kLargest);
    const float least = __uint_as_float(0x00800000u);
    written = bits < 0x00800000u ? 1.0f : wanted > least ? wanted : least;
    factor = reciprocal(written);
  }
};
template <>
struct Scaling<Code> {
  Code written;
  float factor;
  __device__ __forceinline__ explicit Scaling(unsigned bits) {
    const int wanted = static_cast<int>(bits >> 23) - Format::kLargestExponent;
    const int code = wanted > 1 ? wanted : 1;
    written = {static_cast<unsigned char>(code)};
    factor = __uint_as_float(static_cast<unsigned>(254 - code) << 23);
  }
};
