// The mean of values by products: a division takes as many instructions as a few elements.
#pragma once

// `sum` / `count`, where share is 1 / count, rounded. Their product may miss the value of a
// constant row by its last digit, which with a small epsilon is a large y; so the product's
// remainder is added. Not that of an infinity, which is NaN.
__device__ __forceinline__ float mean_of(float sum, float count, float share) {
  const float near = sum * share;
  const float rest = fmaf(-near, count, sum);
  return rest == rest ? fmaf(rest, share, near) : near;
}

template <int kCount>
__device__ __forceinline__ float mean_of(float sum) {
  return mean_of(sum, static_cast<float>(kCount), 1.0f / kCount);
}
