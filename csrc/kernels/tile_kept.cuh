// A tile's rows, gamma and beta in shared memory: fetched, and read again and again.
#pragma once
#include "norm_values.cuh"
#include "quantize_tile.cuh"

constexpr int kCols = COLS;
constexpr bool kEven = kCols % kEdge == 0;

// Eight numbers in shared memory, as words of 16 bytes kStride apart.
template <typename T, int kStride>
struct Eight {
  static constexpr int kWords = Vector<T, kEdge>::kBytes / 16;
  uint4* at;

  // A thread waits for words before it reads them.
  __device__ __forceinline__ void fetch(const T* from) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      fetch_word(at + w * kStride, reinterpret_cast<const uint4*>(from) + w);
    }
  }
  __device__ __forceinline__ Vector<T, kEdge> get() const {
    Vector<T, kEdge> row;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint4 word = at[w * kStride];
      row.words[4 * w] = word.x;
      row.words[4 * w + 1] = word.y;
      row.words[4 * w + 2] = word.z;
      row.words[4 * w + 3] = word.w;
    }
    return row;
  }
  __device__ __forceinline__ void set(const Vector<T, kEdge>& row) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      at[w * kStride] = make_uint4(row.words[4 * w], row.words[4 * w + 1], row.words[4 * w + 2],
                                   row.words[4 * w + 3]);
    }
  }
};

// The thread's numbers of a tile, where they take no registers from pass to pass: no other thread
// reads or writes them.
struct KeptRows {
  using Row = Eight<X, kTileThreads>;
  using Words = uint4[kTurns][kEdge][Row::kWords][kTileThreads];

  Words& words;

  __device__ __forceinline__ Row at(int turn, int i) const {
    return {&words[turn][i][0][threadIdx.x]};
  }
};

// gamma or beta of the tile's columns: threads wait for words, then for each other, before they
// read them.
template <typename T>
struct Parameter {
  using Columns = Eight<T, 1>;
  using Words = uint4[kTileCols / kEdge][Columns::kWords];

  Words& words;

  // `from`: of the tile's first column.
  __device__ __forceinline__ void fetch(const T* __restrict__ from, int count) const {
    const bool aligned = is_aligned<kEdge>(from);
#pragma unroll 1
    for (int v = static_cast<int>(threadIdx.x); v < kTileCols / kEdge; v += kTileThreads) {
      const int col = v * kEdge;
      const Columns to = {words[v]};
      if (aligned && col + kEdge <= count) {
        to.fetch(from + col);
      } else {
        to.set(load_first<kEven, false>(from + col, count - col, false));
      }
    }
  }
  __device__ __forceinline__ Vector<T, kEdge> at(const Place& place) const {
    return Columns{words[place.col / kEdge]}.get();
  }
};

// Fetches x. `at`: the tile's first number.
__device__ __forceinline__ void keep_words(const X* __restrict__ at, const Tile& tile,
                                           KeptRows kept) {
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const Place place(turn);
    const X* from = at + place.row * kCols + place.col;
#pragma unroll
    for (int i = 0; i < kEdge; ++i) {
      if (place.col < tile.cols) {
        kept.at(turn, i).fetch(from + i * kCols);
      } else {
        kept.at(turn, i).set({});
      }
    }
  }
}
// The same element by element, of a tile that is cut or does not lie as words.
__device__ __forceinline__ void keep_elements(const X* __restrict__ at, const Tile& tile,
                                              KeptRows kept) {
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const Place place(turn);
#pragma unroll 1
    for (int i = 0; i < kEdge; ++i) {
      const X* from = at + static_cast<long long>(place.row_of(tile, i)) * kCols + place.col;
      kept.at(turn, i).set(load_first<kEven, true>(from, tile.cols - place.col, false));
    }
  }
}

#if HAS_ADD
// Makes h of x; `add` and `h` at the tile's first number.
__device__ __forceinline__ void add_words(const X* __restrict__ add, X* __restrict__ h,
                                          const Tile& tile, KeptRows kept) {
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const Place place(turn);
    if (place.col >= tile.cols) continue;
    const int first = place.row * kCols + place.col;
    Vector<X, kEdge> addend[kEdge];
#pragma unroll
    for (int i = 0; i < kEdge; ++i) addend[i] = load<true, true, kEdge>(add + first + i * kCols);
    wait_for_words();
#pragma unroll
    for (int i = 0; i < kEdge; ++i) {
      const Vector<X, kEdge> sum = sum_of<kEdge>(kept.at(turn, i).get(), addend[i]);
      kept.at(turn, i).set(sum);
      store<true, true, kEdge>(h + first + i * kCols, sum);
    }
  }
}
__device__ __forceinline__ void add_elements(const X* __restrict__ add, X* __restrict__ h,
                                             const Tile& tile, KeptRows kept) {
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const Place place(turn);
    const int count = tile.cols - place.col;
#pragma unroll 1
    for (int i = 0; i < kEdge; ++i) {
      const long long at = static_cast<long long>(place.row_of(tile, i)) * kCols + place.col;
      const Vector<X, kEdge> addend = load_first<kEven, true>(add + at, count, false);
      const Vector<X, kEdge> sum = sum_of<kEdge>(kept.at(turn, i).get(), addend);
      kept.at(turn, i).set(sum);
      if (place.row + i < tile.rows) store_first<true>(h + at, sum, count);
    }
  }
}
#endif
