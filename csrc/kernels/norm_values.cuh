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

__device__ __forceinline__ float normalised(float h, float mean, float rstd, float gamma,
                                            float beta) {
  const float scaled = (h - mean) * rstd * (gamma + (ZERO_CENTERED ? 1.0f : 0.0f));
  return HAS_BETA ? scaled + beta : scaled;
}

template <int kLength>
__device__ __forceinline__ Vector<X, kLength> sum_of(const Vector<X, kLength>& x,
                                                     const Vector<X, kLength>& add) {
  float total[kLength];
#pragma unroll
  for (int j = 0; j < kLength; ++j) total[j] = x.at(j) + add.at(j);
  return rounded<X>(total);
}
