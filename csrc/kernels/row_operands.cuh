// What a thread has of rows that it fetches ahead, and of gamma and beta (row_sums.cuh).
#pragma once
#include "quantize_ptx.cuh"
#include "row_sums.cuh"

constexpr int kThreads = kGroup * kRowsAtOnce;

// The thread's words of a row in a stage.
struct Words {
  uint4 (*first)[kThreads];

  // `row`: where its first column is.
  __device__ __forceinline__ void fetch(const Part& part, const X* __restrict__ row,
                                        bool aligned) const {
    if (!aligned) {
      copy(part, row);
      return;
    }
    const X* from = row + part.first;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (part.owns(i)) fetch_word(&first[i][part.thread], from + i * kGroup * kLength);
    }
  }
  __device__ __forceinline__ Vector<X, kLength> at(const Part& part, int i, bool active) const {
    if (!active || !part.owns(i)) return {};
    const uint4 word = first[i][part.thread];
    return {{word.x, word.y, word.z, word.w}};
  }
  __device__ __forceinline__ void set(const Part& part, int i,
                                      const Vector<X, kLength>& word) const {
    first[i][part.thread] = make_uint4(word.words[0], word.words[1], word.words[2], word.words[3]);
  }

 private:
  __device__ __forceinline__ void copy(const Part& part, const X* __restrict__ row) const {
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      if (!part.owns(i)) continue;
      set(part, i, load<false, true, kLength>(row + part.column(i)));
    }
  }
};

// The thread's part of gamma or beta; 0 where that is not there.
template <typename T, bool kIsGamma, bool kThere = true>
class Parameter {
 public:
  __device__ __forceinline__ Parameter(const Part& part, const T* __restrict__ from) {
    if constexpr (!kThere) return;
    const bool aligned = is_aligned<kLength>(from);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Vector<T, kLength> vector = {};
      if (part.owns(i)) {
        vector = aligned ? load<true, false, kLength>(from + part.column(i))
                         : load<false, false, kLength>(from + part.column(i));
      }
      if constexpr (OPEN) {
#pragma unroll
        for (int j = 0; j < kLength; ++j) open_[i][j] = value(vector, j);
      } else {
        held_[i] = vector;
      }
    }
  }
  // Before the values of a row: what was unpacked for the one before is not kept.
  __device__ __forceinline__ void forget(int i) {
    if constexpr (kThere && !OPEN) held_[i].forget();
  }
  __device__ __forceinline__ float at(int i, int j) const {
    if constexpr (!kThere) return 0.0f;
    return OPEN ? open_[i][j] : value(held_[i], j);
  }

 private:
  static __device__ __forceinline__ float value(const Vector<T, kLength>& of, int j) {
    return kIsGamma ? scaled_by(of.at(j)) : of.at(j);
  }
  Vector<T, kLength> held_[OPEN ? 1 : kCount];
  float open_[OPEN ? kCount : 1][kLength];
};
