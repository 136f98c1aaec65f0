// What norms compute of an element, from the statistics of its row: norm_forward.cuh,
// norm_backward.cuh.
#pragma once
#include "norm_values.cuh"

__device__ __forceinline__ float result_of(float h, float mean, float rstd, float gamma,
                                           float beta) {
  const float scaled = (LAYER ? h - mean : h) * rstd * scaled_by(gamma);
  return HAS_BETA ? scaled + beta : scaled;
}

struct RowStatistics {
  float mean;
  float rstd;
};

// dx of an element of a row; `scale` is `scaled_by` of gamma.
struct RowResult {
  RowStatistics of;
  float slope;  // rstd times the mean of w · xhat
  float mean_w;

  __device__ __forceinline__ float operator()(float x, float dy, float scale, float dh) const {
    const float w = dy * scale;
    const float centred = LAYER ? x - of.mean : x;
    const float result = of.rstd * ((LAYER ? w - mean_w : w) - centred * slope);
    return HAS_ADD ? result + dh : result;
  }
};
