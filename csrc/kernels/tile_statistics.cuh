// Means and reciprocal deviations of a tile's rows, of which a cluster of CLUSTER blocks has all
// columns, each block a tile of them.
//
// Warps sum each part of the tile; for LayerNorm they centre a row's part on its own mean, and
// parts are merged as in reduce.cuh: those of a block first, which are sent to all blocks of the
// cluster. All merge the same numbers in the same order.
#pragma once
#include "async.cuh"
#include "halving.cuh"
#include "norm_values.cuh"
#include "quantize_tile.cuh"

constexpr int kCols = COLS;
constexpr bool kEven = kCols % kEdge == 0;
constexpr int kCluster = CLUSTER;
static_assert(kTileRows <= kTileThreads, "a thread for each row");

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

// gamma or beta of the tile's columns: a thread fetches those that it reads, as others do.
template <typename T>
struct Parameter {
  using Columns = Eight<T, 1>;
  using Words = uint4[kTileCols / kEdge][Columns::kWords];

  Words& words;

  // `from`: of the tile's first column.
  __device__ __forceinline__ void fetch(const T* __restrict__ from, int count) const {
    const bool aligned = is_aligned<kEdge>(from);
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const int col = Place(turn).col;
      const Columns to = {words[col / kEdge]};
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

// Of a part of a row: `squares` of the distances from the part's own mean, or from 0 for RMSNorm.
struct alignas(8) Sums {
  float sum;
  float squares;
};

struct StatisticsBuffers {
  alignas(16) Sums of_parts[kPartsAcross][kTileRows];
  Sums of_blocks[kCluster][kTileRows];
  alignas(16) float of_rows[kTileRows][2];  // mean, rstd
};

// Columns from `first` on, `width` at most.
__device__ __forceinline__ int columns_of(int first, int width) {
  const int left = kCols - first;
  return left < 0 ? 0 : left < width ? left : width;
}
// 1 / of them; 0 where there are none. Their number itself is not compared with the width: ptxas of
// CUDA 13.0 makes one instruction of the clamp and the comparison, whose answer is wrong.
template <int kWidth>
__device__ __forceinline__ float share_of_columns(int first) {
  const int left = kCols - first;
  if (left >= kWidth) return 1.0f / kWidth;
  return left > 0 ? 1.0f / static_cast<float>(left) : 0.0f;
}

// Of kParts parts of a row, kWidth columns each, from column `first` on.
template <int kParts, int kWidth>
__device__ __forceinline__ Sums merged(const Sums (&parts)[kParts][kTileRows], int row, int first) {
  Sums all = {0.0f, 0.0f};
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    all.sum += LAYER ? parts[p][row].sum : 0.0f;
    all.squares += parts[p][row].squares;
  }
#if LAYER
  const float mean = all.sum * share_of_columns<kParts * kWidth>(first);
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const int from = first + p * kWidth;
    const float distance = parts[p][row].sum * share_of_columns<kWidth>(from) - mean;
    all.squares += static_cast<float>(columns_of(from, kWidth)) * distance * distance;
  }
#endif
  return all;
}

// Into shared.of_parts; `first_col`: of the tile.
__device__ __forceinline__ void sum_rows(const KeptRows& kept, int turn, int first_col,
                                         StatisticsBuffers& shared) {
  const Place place(turn);
  using Rows = Halving<kLanesAcross, 1>;
  Sums* of_rows = &shared.of_parts[place.part_across][place.row];
  float centres[kEdge] = {};
#if LAYER
  float sums[kEdge];
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    const Vector<X, kEdge> values = kept.at(turn, i).get();
    sums[i] = values.at(0);
#pragma unroll
    for (int j = 1; j < kEdge; ++j) sums[i] += values.at(j);
  }
  Rows::reduce(sums, Sum{});
  of_rows[Rows::kept()].sum = sums[0];
  __syncwarp();
  const float share = share_of_columns<kPartCols>(first_col + place.part_across * kPartCols);
#pragma unroll
  for (int i = 0; i < kEdge; ++i) centres[i] = of_rows[i].sum * share;
#endif
  const int count = kCols - first_col - place.col;  // columns from the thread's first on
  float squares[kEdge];
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    const Vector<X, kEdge> values = kept.at(turn, i).get();
    squares[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < kEdge; ++j) {
      if (!kEven && j >= count) continue;
      const float centred = LAYER ? values.at(j) - centres[i] : values.at(j);
      squares[i] += centred * centred;
    }
    if (LAYER && kEven && count <= 0) squares[i] = 0.0f;
  }
  Rows::reduce(squares, Sum{});
  of_rows[Rows::kept()].squares = squares[0];
}

// Before the tile is loaded: then nobody waits long until all blocks of the cluster have begun.
__device__ __forceinline__ void start_statistics() {
  if constexpr (kCluster > 1) cluster_arrive();
}

// Makes shared.of_rows. All threads; a barrier of the block goes before others than the row's
// thread read.
__device__ __forceinline__ void find_statistics(const KeptRows& kept, const Tile& tile,
                                                float epsilon, StatisticsBuffers& shared) {
  const int first_col = static_cast<int>(tile.first_col);
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) sum_rows(kept, turn, first_col, shared);
  __syncthreads();
  if constexpr (kCluster > 1) cluster_wait();
  const int row = static_cast<int>(threadIdx.x);
  if (row < kTileRows) {
    const Sums own = merged<kPartsAcross, kPartCols>(shared.of_parts, row, first_col);
    if constexpr (kCluster == 1) {
      shared.of_blocks[0][row] = own;
    } else {
      const Shared mine = shared_address(&shared.of_blocks[cluster_rank()][row]);
      for (unsigned to = 0; to < kCluster; ++to) {
        store_to_rank(mine, to, own.sum, own.squares);
      }
    }
  }
  if constexpr (kCluster > 1) {
    if (row / 32 * 32 < kTileRows) {  // warps that stored anything
      cluster_publish();
    } else {
      cluster_arrive();
    }
    cluster_wait();
  }
  if (row < kTileRows) {
    const Sums all = merged<kCluster, kTileCols>(shared.of_blocks, row, 0);
    shared.of_rows[row][0] = all.sum * (1.0f / kCols);
    shared.of_rows[row][1] = inverse_root(all.squares * (1.0f / kCols) + epsilon);
  }
}
