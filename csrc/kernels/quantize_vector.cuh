// Neighbouring numbers, multiplied by a factor and rounded to 8 bits, to memory.
#pragma once
#include "elements.cuh"
#include "quantize_scales.cuh"

template <int kLength>
__device__ __forceinline__ void write_fp8(unsigned char* to, const float (&y)[kLength],
                                          float factor, bool aligned) {
  if constexpr (kLength == 1) {
    *to = static_cast<unsigned char>(fp8_pair(flushed_product(y[0], factor), 0.0f, Format{}));
    return;
  }
  constexpr int kPairs = kLength > 1 ? kLength / 2 : 1;
  unsigned pairs[kPairs];
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    pairs[p] = fp8_pair(flushed_product(y[2 * p], factor), flushed_product(y[2 * p + 1], factor),
                        Format{});
  }
  if (!aligned) {
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      to[j] = static_cast<unsigned char>(pairs[j / 2] >> j % 2 * 8);
    }
  } else if constexpr (kPairs == 1) {
    store_word<true>(to, 0, static_cast<unsigned short>(pairs[0]));
  } else if constexpr (kPairs == 2) {
    store_word<true>(to, 0, pairs[0] | pairs[1] << 16);
  } else {
    store_word<true>(to, 0, make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16));
  }
}
