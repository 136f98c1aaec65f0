// Short rows, many to a block, between memory and shared memory as one run of 16-byte words.
//
// A tile is TILE_ROWS rows, whole words; in shared memory each of its rows is a team's, GROUP
// neighbouring lanes: lane t has the row's units t, t + GROUP, ... A unit is as many elements as
// divide a row's length and a word's, up to a word, so that each lies in one place. A row may start
// at any unit, which costs nothing there.
#pragma once
#include "lanes.cuh"
#include "softmax_row.cuh"

constexpr int kThreads = THREADS;
constexpr int kGroup = GROUP;
constexpr int kTileRows = TILE_ROWS;
constexpr int kTile = kTileRows * kCols;
constexpr int kTileWords = kTile / kLength;
constexpr int kCopies = (kTileWords + kThreads - 1) / kThreads;
constexpr int kTeams = kThreads / kGroup;
constexpr int kUnit = kEven ? kLength : kCols % 4 == 0 ? 4 : kCols % 2 == 0 ? 2 : 1;
constexpr int kEach = (kCols / kUnit + kGroup - 1) / kGroup;
using Unit = Vector<X, kUnit>;
static_assert(kTile % kLength == 0, "a tile is whole words");
static_assert(kTileRows % kTeams == 0, "all threads make the same number of turns");

// Whether a word of the tile holds a key that a causal mask shows, or belongs to several rows.
__device__ __forceinline__ bool is_wanted(int word, long long tile_row, const int* first,
                                          const Params& p) {
#if CAUSAL
  const int row = word * kLength / kCols;
  const int column = word * kLength - row * kCols;
  if (column + kLength > kCols) return true;
  const RowIndex query = remainder(static_cast<RowIndex>(tile_row + row), p.queries);
  return column < causal_count(query, first, p);
#else
  return true;
#endif
}

// Column of a lane's i-th unit.
__device__ __forceinline__ int unit_column(int i) {
  return (i * kGroup + static_cast<int>(threadIdx.x) % kGroup) * kUnit;
}

__device__ __forceinline__ bool has_unit(int i) {
  return (i + 1) * kGroup * kUnit <= kCols || unit_column(i) < kCols;
}

// `count` elements from memory: all words of the tile, or fewer in the last one.
struct TileCopy {
  Word words[kCopies];

  __device__ __forceinline__ void load_words(const X* from, int count, long long tile_row,
                                             const int* first, const Params& p) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int word = i * kThreads + static_cast<int>(threadIdx.x);
      words[i] = Word{};
      if ((word + 1) * kLength <= count && is_wanted(word, tile_row, first, p)) {
        words[i] = load<true, true, kLength>(from + word * kLength);
      }
    }
  }
  __device__ __forceinline__ void put(X* tile, int count) const {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int word = i * kThreads + static_cast<int>(threadIdx.x);
      if ((word + 1) * kLength <= count) {
        store<true, false, kLength>(tile + word * kLength, words[i]);
      }
    }
  }
};

// The elements that are no whole word of both: all of them where `whole` is false.
__device__ __forceinline__ void copy_elements(X* to, const X* from, int count, bool whole) {
  const int start = whole ? count / kLength * kLength : 0;
  for (int e = start + static_cast<int>(threadIdx.x); e < count; e += kThreads) to[e] = from[e];
}

__device__ __forceinline__ void write_tile(X* to, const X* tile, int count, bool whole) {
  if (whole) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int word = i * kThreads + static_cast<int>(threadIdx.x);
      if ((word + 1) * kLength <= count) {
        store<true, true, kLength>(to + word * kLength,
                                   load<true, false, kLength>(tile + word * kLength));
      }
    }
  }
  copy_elements(to, tile, count, whole);
}

template <typename... Pointers>
__device__ __forceinline__ bool all_aligned(const Pointers*... pointers) {
  return (... && is_aligned<kLength>(pointers));
}
