// Vectors of 8 elements, and the part of one that is left at a row's end.
#pragma once
#include "elements.cuh"

constexpr int kEdge = 8;

// The first `count` elements at `from`, the others 0. `kEven`: counts are multiples of 8.
template <bool kEven, bool kStream, typename T>
__device__ __forceinline__ Vector<T, kEdge> load_first(const T* from, int count, bool aligned) {
  if (count >= kEdge) {
    return aligned ? load<true, kStream, kEdge>(from) : load<false, kStream, kEdge>(from);
  }
  Vector<T, kEdge> to{};
  if constexpr (!kEven) {
#pragma unroll
    for (int i = 0; i < kEdge; ++i) {
      if (i >= count) continue;
      const unsigned bits = load<false, kStream, 1>(from + i).words[0];
      if constexpr (sizeof(T) == 4) {
        to.words[i] = bits;
      } else {
        to.words[i / 2] |= bits << i % 2 * 16;
      }
    }
  }
  return to;
}

// The same way back, element by element.
template <bool kStream, typename T>
__device__ __forceinline__ void store_first(T* to, const Vector<T, kEdge>& from, int count) {
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    if (i >= count) continue;
    if constexpr (sizeof(T) == 4) {
      store_word<kStream>(to, i, from.words[i]);
    } else {
      const unsigned bits = from.words[i / 2] >> i % 2 * 16;
      store_word<kStream>(to, i, static_cast<unsigned short>(bits));
    }
  }
}
