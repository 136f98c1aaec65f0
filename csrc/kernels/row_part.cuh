// Which part of a row in shared memory a thread owns.
//
// Threads: a row belongs to THREADS_PER_ROW of them, a group; THREADS / THREADS_PER_ROW rows of a
// tile are worked on at once. Up to 32: a part of a warp. More ("wide"): whole warps, and with
// CLUSTER > 1 all blocks of a cluster.
//
// Of ragged rows, whose COLS are no multiple of VECTOR, these are the whole words (ragged.cuh).
// Each of a row's first threads has one of its edges too, the first block's where a cluster shares
// it.
#pragma once
#include "async.cuh"
#include "elements.cuh"
#include "lanes.cuh"
#include "ragged.cuh"

constexpr int kThreads = THREADS;
constexpr int kGroup = THREADS_PER_ROW;
constexpr int kCluster = CLUSTER;
constexpr int kChunk = CHUNK;  // columns in whole words that one block owns; the last may own fewer
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
static_assert(kCluster == 1 ? kChunk == kMostWords * kLength : kWide && kTileRows == 1,
              "a cluster has one row");
constexpr int kTurns = kTileRows / kRowsAtOnce;
static_assert(!kRagged || (kGroup >= 32 && kTurns == 1 && !STORE_TILES),
              "a group's rows start at the same place of a word");

// Elements of a tile, in the words that cover it wherever it starts. Of a ragged row that a cluster
// shares there is a word on both sides of the chunk, for edges.
constexpr int kTileLength = !kRagged ? kTileRows * kChunk
                            : kCluster == 1
                                ? (kTileRows * kCols + 2 * kLength - 2) / kLength * kLength
                                : kChunk + 2 * kLength;

// The part of a row that this thread owns: vectors lane, lane + kGroup, ... of its block's chunk.
struct Part {
  int lane;
  int first_column;  // of the chunk
  int columns;       // of the chunk
  bool has_edge;
  int edge;           // the edge that the thread owns: from the chunk's first column, in the row
  int edge_in_chunk;  // the same in shared memory, where other blocks' chunks are not between

  // `shift`: elements of the row's first word before the row.
  __device__ Part(unsigned rank, int shift) : lane(static_cast<int>(threadIdx.x) % kGroup) {
    const WholeWords whole(shift);
    const int before_chunk = static_cast<int>(rank) * kChunk;
    const int left = whole.words * kLength - before_chunk;
    first_column = whole.before + before_chunk;
    columns = left < kChunk ? left : kChunk;
    has_edge = kRagged && rank == 0 && kGroup - 1 - lane < whole.edges();
    edge = whole.edge_column(kGroup - 1 - lane) - first_column;
    edge_in_chunk = edge < 0 ? edge : edge - (left - columns);
  }

  __device__ __forceinline__ int column(int i) const { return (i * kGroup + lane) * kLength; }
  __device__ __forceinline__ bool owns(int i) const {
    constexpr int kLeast = kLeastWords - (kCluster - 1) * kVectors;  // of the last block
    if ((i + 1) * kGroup <= (kLeast < kVectors ? kLeast : kVectors)) return true;
    return column(i) < columns;
  }
  // `base`: at the chunk's first column, on 16 bytes unless rows are ragged.
  template <typename T>
  __device__ __forceinline__ Vector<T, kLength> load_parameter(const T* base, int i) const {
    return load<!kRagged, false, kLength>(base + column(i));
  }
  template <typename T>
  __device__ __forceinline__ void store_result(T* base, int i,
                                               const Vector<T, kLength>& from) const {
    store<true, true, kLength>(base + column(i), from);
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
