// Means and reciprocal deviations of a tile's rows, of which a cluster of CLUSTER blocks has all
// columns, each block a tile of them.
//
// Warps sum each part of the tile; for LayerNorm they centre a row's part on its own mean, and
// parts are merged as in reduce.cuh: those of a block first, which are sent to all blocks of the
// cluster. All merge the same numbers in the same order. Of tall tiles such sums would take shared
// memory that a multiprocessor has another block for: there each block merges a share of the rows
// and sends their statistics to all.
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

constexpr bool kShares = SHARES;  // each block merges as many rows as the others
constexpr int kMergedRows = kShares ? kTileRows / kCluster : kTileRows;
static_assert(kMergedRows * (kShares ? kCluster : 1) == kTileRows, "no row is left");

struct StatisticsBuffers {
  alignas(16) Sums of_parts[kPartsAcross][kTileRows];
  Sums of_blocks[kCluster][kMergedRows];
  alignas(16) float of_rows[kTileRows][2];  // mean, rstd
  alignas(8) unsigned char sums_are_here[kBarrierBytes];
  unsigned char rows_are_here[kBarrierBytes];
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
template <int kWidth, int kParts, int kRowsOfParts>
__device__ __forceinline__ Sums merged(const Sums (&parts)[kParts][kRowsOfParts], int row,
                                       int first) {
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
      const Shared rows_barrier = shared_address(shared.rows_are_here);
      barrier_init(barrier, 1);
      if (kShares) barrier_init(rows_barrier, 1);
      barriers_visible();
      barrier_arrive_expecting(barrier, kCluster * kMergedRows * sizeof(Sums));
      if (kShares) barrier_arrive_expecting(rows_barrier, sizeof(shared.of_rows));
    }
    cluster_arrive();
  }
}

struct Statistics {
  float mean;
  float rstd;
};
__device__ __forceinline__ Statistics statistics_of(const Sums& all, float epsilon) {
  return {mean_of<kCols>(all.sum), inverse_root(all.squares * (1.0f / kCols) + epsilon)};
}

// The block's sums of a row go to all blocks, which merge them.
__device__ __forceinline__ void merge_all(int row, const Sums& own, float epsilon,
                                          StatisticsBuffers& shared) {
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
  const Statistics found = statistics_of(merged<kTileCols>(shared.of_blocks, row, 0), epsilon);
  shared.of_rows[row][0] = found.mean;
  shared.of_rows[row][1] = found.rstd;
}

// The block's sums of a row go to the one block that merges them. kCluster threads then merge the
// same row of this block's share, and each sends its statistics to one of the blocks.
__device__ __forceinline__ void merge_share(int row, const Sums& own, float epsilon,
                                            StatisticsBuffers& shared) {
  const unsigned rank = cluster_rank();
  const Shared sums_barrier = shared_address(shared.sums_are_here);
  const Shared rows_barrier = shared_address(shared.rows_are_here);
  send_to_rank(shared_address(&shared.of_blocks[rank][row % kMergedRows]), sums_barrier,
               row / kMergedRows, own.sum, own.squares);
  barrier_wait(sums_barrier, 0);
  const int taken = row % kMergedRows;
  const Statistics found = statistics_of(merged<kTileCols>(shared.of_blocks, taken, 0), epsilon);
  send_to_rank(shared_address(shared.of_rows[rank * kMergedRows + taken]), rows_barrier,
               row / kMergedRows, found.mean, found.rstd);
  barrier_wait(rows_barrier, 0);
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
  if (row >= kTileRows) return;
  const Sums own = merged<kPartCols>(shared.of_parts, row, first_col);
  if constexpr (kShares) {
    merge_share(row, own, epsilon, shared);
  } else {
    merge_all(row, own, epsilon, shared);
  }
}
