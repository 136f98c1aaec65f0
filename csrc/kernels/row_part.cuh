// Which part of a row in shared memory a thread owns.
//
// Threads: a row belongs to THREADS_PER_ROW of them, a group; THREADS / THREADS_PER_ROW rows of a
// tile are worked on at once. Up to 32: a part of a warp. More ("wide"): whole warps, and with
// CLUSTER > 1 all blocks of a cluster.
//
// Ragged rows, whose COLS are no multiple of VECTOR, are the words that cover them (ragged.cuh).
#pragma once
#include "async.cuh"
#include "elements.cuh"
#include "lanes.cuh"
#include "ragged.cuh"

constexpr int kThreads = THREADS;
constexpr int kGroup = THREADS_PER_ROW;
constexpr int kCluster = CLUSTER;
constexpr int kChunk = CHUNK;  // columns of the span that one block owns; the last may own fewer
constexpr int kStages = STAGES;
constexpr bool kWide = kGroup > 32;
constexpr int kRowsAtOnce = kThreads / kGroup;
constexpr int kTileRows = TILE_ROWS;
constexpr int kWarps = kThreads / 32;
constexpr int kVectors = kChunk / kLength;
constexpr int kCount = (kVectors + kGroup - 1) / kGroup;  // vectors a thread owns of a row
static_assert(kChunk % kLength == 0, "a row is whole vectors");
static_assert(kThreads % 32 == 0 && kTileRows % kRowsAtOnce == 0, "whole warps, whole turns");
static_assert(kWide ? kGroup % 32 == 0 : kTileRows == kRowsAtOnce, "whole warps, or one turn");
static_assert(kCluster == 1 ? kChunk == kSpan : kWide && kTileRows == 1, "a cluster has one row");
constexpr int kTurns = kTileRows / kRowsAtOnce;
static_assert(!kRagged || (kGroup >= 32 && kTurns == 1 && !STORE_TILES),
              "a group's rows start at the same place of a word");

// The part of a row that this thread owns: vectors lane, lane + kGroup, ... of its block's chunk.
struct Part {
  int lane;
  int first_column;  // of the chunk: below 0 where a word starts before the row
  int columns;       // of the chunk, in whole words

  // `shift`: elements of the row's first word before the row.
  __device__ Part(unsigned rank, int shift)
      : lane(static_cast<int>(threadIdx.x) % kGroup),
        first_column(static_cast<int>(rank) * kChunk - shift) {
    const int left = (kCols + shift + kLength - 1) / kLength * kLength - (first_column + shift);
    columns = left < kChunk ? left : kChunk;
  }

  __device__ __forceinline__ int column(int i) const { return (i * kGroup + lane) * kLength; }
  __device__ __forceinline__ int column_of_row(int i) const { return first_column + column(i); }
  __device__ __forceinline__ bool owns(int i) const {
    if constexpr (!kRagged && kCluster == 1 && kCount * kGroup == kVectors) return true;
    return column(i) < columns;
  }
  // Whether all of vector i is of this row.
  __device__ __forceinline__ bool is_whole(int i) const {
    constexpr int kLeast = kCols - (kCluster - 1) * kChunk;  // columns of the last chunk
    if (!kRagged || (i > 0 && (i + 1) * kGroup * kLength <= kLeast)) return true;
    return is_inside(column_of_row(i));
  }
  template <typename T>
  __device__ __forceinline__ void hide(Vector<T, kLength>& word, int i) const {
    if (!is_whole(i)) hide_outside(word, column_of_row(i));
  }

  // `base`: at the chunk's first column, on 16 bytes unless rows are ragged.
  template <typename T>
  __device__ __forceinline__ Vector<T, kLength> load_parameter(const T* base, int i) const {
    if constexpr (kRagged) return load_inside(base + column(i), column_of_row(i));
    return load<true, false, kLength>(base + column(i));
  }
  template <typename T>
  __device__ __forceinline__ void store_result(T* base, int i,
                                               const Vector<T, kLength>& from) const {
    if (is_whole(i)) {
      store<true, true, kLength>(base + column(i), from);
    } else {
      store_inside<true, true>(base + column(i), column_of_row(i), from);
    }
  }

  // Calls use(c) for each element of the row that this thread owns, in turn: `c` counts from the
  // chunk's first column.
  template <typename Use>
  __device__ __forceinline__ void for_each(const Use& use) const {
    constexpr int kToNextVector = (kGroup - 1) * kLength + 1;
#pragma unroll 1
    for (int c = lane * kLength; c < columns; c += (c + 1) % kLength ? 1 : kToNextVector) {
      if (!kRagged || is_column(first_column + c)) use(c);
    }
  }
};

template <int kLen, typename T>
__device__ __forceinline__ Vector<T, kLen> load_shared(Shared from) {
  Vector<T, kLen> to;
  constexpr int kBytes = Vector<T, kLen>::kBytes;
  constexpr int kStep = kBytes >= 16 ? 4 : kBytes / 4;
#pragma unroll
  for (int w = 0; w < to.kWords; w += kStep > 0 ? kStep : 1) {
    load_words<kStep>(from + 4 * w, to.words + w);
  }
  return to;
}

template <int kLen, typename T>
__device__ __forceinline__ void store_shared(Shared to, const Vector<T, kLen>& from) {
  constexpr int kBytes = Vector<T, kLen>::kBytes;
  constexpr int kStep = kBytes >= 16 ? 4 : kBytes / 4;
#pragma unroll
  for (int w = 0; w < from.kWords; w += kStep > 0 ? kStep : 1) {
    store_words<kStep>(to + 4 * w, from.words + w);
  }
}
