// Norms, forward, of launches whose pointers are not aligned: element by element.
//
// Rare, so made for little code, which is what a kernel takes to compile: one loop makes all passes
// over a row's elements, and is not unrolled.
//
// Threads: a warp a row.
#pragma once
#include "lanes.cuh"
#include "norm_results.cuh"

__device__ __forceinline__ void forward_by_elements(
    const X* __restrict__ x, const Gamma* __restrict__ gamma, const Beta* __restrict__ beta,
    const X* __restrict__ add, X* __restrict__ y, X* h, float* __restrict__ mean_out,
    float* __restrict__ rstd_out, long long rows, float epsilon, int warps_of_block) {
  const int thread = static_cast<int>(threadIdx.y) * THREADS_PER_ROW + threadIdx.x;
  const int lane = thread % 32;
#pragma unroll 1
  for (long long first = static_cast<long long>(blockIdx.x) * warps_of_block; first < rows;
       first += static_cast<long long>(gridDim.x) * warps_of_block) {
    // Warps past the last row do that one again: all of a block make the same number of turns.
    const long long own_row = first + thread / 32;
    const long long row = own_row < rows ? own_row : rows - 1;
    const long long start = row * COLS;
    const X* const values = HAS_ADD ? h + start : x + start;
    float mean = 0.0f, rstd = 0.0f;
#pragma unroll 1
    for (int pass = LAYER || HAS_ADD ? 0 : 1; pass < 3; ++pass) {
      float total = 0.0f;
#pragma unroll 1
      for (int c = lane; c < COLS; c += 32) {
        if (HAS_ADD && pass == 0) {
          set_element<false>(h + start + c, element(x[start + c]) + element(add[start + c]));
        }
        const float value = element(values[c]);
        const float centred = value - mean;
        total += pass == 0 ? value : centred * centred;
        if (pass == 2) {
          const float bias = HAS_BETA ? element(beta[c]) : 0.0f;
          const float result = result_of(value, mean, rstd, element(gamma[c]), bias);
          set_element<true>(y + start + c, result);
        }
      }
      total = sum_lanes<32>(total) * (1.0f / COLS);
      if (LAYER && pass == 0) mean = total;
      if (pass == 1) rstd = inverse_root(total + epsilon);
    }
    if (lane == 0) {
      if (LAYER) mean_out[row] = mean;
      rstd_out[row] = rstd;
    }
  }
}
