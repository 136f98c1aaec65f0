// Means and reciprocal deviations of a tile's rows, of which a cluster of CLUSTER blocks has all
// columns, each block a tile of them.
//
// Warps sum each part of the tile; for LayerNorm they centre a row's part on its own mean, and
// parts are merged as in reduce.cuh: those of a block first, which are sent to all blocks of the
// cluster. All merge the same numbers in the same order.
#pragma once
#include "async.cuh"
#include "halving.cuh"
#include "mean.cuh"
#include "tile_kept.cuh"

constexpr int kCluster = CLUSTER;
static_assert(kTileRows <= kTileThreads, "a thread for each row");

// Of a part of a row: `squares` of the distances from the part's own mean, or from 0 for RMSNorm.
struct alignas(8) Sums {
  float sum;
  float squares;
};

struct StatisticsBuffers {
  alignas(16) Sums of_parts[kPartsAcross][kTileRows];
  Sums of_blocks[kCluster][kTileRows];
  alignas(16) float of_rows[kTileRows][2];  // mean, rstd
  alignas(16) unsigned char sums_are_here[kBarrierBytes];
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
  float values[kEdge][kEdge];
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    const Vector<X, kEdge> row = kept.at(turn, i).get();
#pragma unroll
    for (int j = 0; j < kEdge; ++j) values[i][j] = row.at(j);
  }
  float centres[kEdge] = {};
#if LAYER
  float sums[kEdge];
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    sums[i] = values[i][0];
#pragma unroll
    for (int j = 1; j < kEdge; ++j) sums[i] += values[i][j];
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
    squares[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < kEdge; ++j) {
      if (!kEven && j >= count) continue;
      const float centred = LAYER ? values[i][j] - centres[i] : values[i][j];
      squares[i] += centred * centred;
    }
    if (LAYER && kEven && count <= 0) squares[i] = 0.0f;
  }
  Rows::reduce(squares, Sum{});
  of_rows[Rows::kept()].squares = squares[0];
}

// Before the tile is loaded: then nobody waits long until all blocks of the cluster have begun.
__device__ __forceinline__ void start_statistics(StatisticsBuffers& shared) {
  if constexpr (kCluster > 1) {
    if (threadIdx.x == 0) {
      const Shared barrier = shared_address(shared.sums_are_here);
      barrier_init(barrier, 1);
      barriers_visible();
      barrier_arrive_expecting(barrier, kCluster * kTileRows * sizeof(Sums));
    }
    cluster_arrive();
  }
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
      const Shared barrier = shared_address(shared.sums_are_here);
      for (unsigned to = 0; to < kCluster; ++to) {
        send_to_rank(mine, barrier, to, own.sum, own.squares);
      }
      barrier_wait(barrier, 0);
    }
  }
  if (row < kTileRows) {
    const Sums all = merged<kCluster, kTileCols>(shared.of_blocks, row, 0);
    shared.of_rows[row][0] = mean_of<kCols>(all.sum);
    shared.of_rows[row][1] = inverse_root(all.squares * (1.0f / kCols) + epsilon);
  }
}
