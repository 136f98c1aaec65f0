// A norm's values in float32, from a row's statistics: what quantising kernels round once.
//
//   y = (h - mean) · rstd · g + beta,  g = gamma or 1 + gamma (ZERO_CENTERED)
//
// Constants: LAYER, HAS_BETA, HAS_ADD, ZERO_CENTERED, and the types' codes.
#pragma once
#include "elements.cuh"

using X = ElementOf<X_TYPE>::Type;
using Gamma = ElementOf<GAMMA_TYPE>::Type;
using Beta = ElementOf<BETA_TYPE>::Type;

__device__ __forceinline__ float scaled_by(float gamma) {
  return ZERO_CENTERED ? gamma + 1.0f : gamma;
}

// `g` is `scaled_by` of gamma.
__device__ __forceinline__ float normalised(float h, float mean, float rstd, float g, float beta) {
  const float centred = LAYER ? h - mean : h;
  const float scaled = __fmul_rn(__fmul_rn(centred, rstd), g);
  return HAS_BETA ? scaled + beta : scaled;
}

// 1 / sqrt(value): an approximation and a step of Newton's, which is none for 0 and infinity.
__device__ __forceinline__ float inverse_root(float value) {
  const float guess = rsqrtf(value);
  const float better = guess * (1.5f - 0.5f * value * guess * guess);
  return guess > 0.0f && guess < 1e30f ? better : guess;
}

template <int kLength>
__device__ __forceinline__ Vector<X, kLength> sum_of(const Vector<X, kLength>& x,
                                                     const Vector<X, kLength>& add) {
  float total[kLength];
#pragma unroll
  for (int j = 0; j < kLength; ++j) total[j] = x.at(j) + add.at(j);
  return rounded<X>(total);
}
