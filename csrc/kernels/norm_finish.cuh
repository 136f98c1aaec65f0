// The parameter gradients of a norm: the last sum over the backward kernel's blocks.
//
//   dgamma[c] = sum_b partials[0, b, c],  dbeta[c] = sum_b partials[1, b, c] (HAS_BETA)
//
// Layout: partials [1 + HAS_BETA, blocks, COLS] float32; dgamma, dbeta [COLS] float32.
// Threads: block (TILE_COLS, TILE_ROWS) sums TILE_COLS columns; thread (i, j) takes partials
// j, j + TILE_ROWS, ... of column i, BATCH of them on their way at once, then column i's TILE_ROWS
// sums are added up pairwise in shared memory. blockIdx.y picks dgamma or dbeta. A fixed order: the
// same bits every run.
//
// It may start while the backward kernel still runs, and waits for that here.
#include "ptx.cuh"

constexpr int kCols = COLS;
constexpr int kTileCols = TILE_COLS;
constexpr int kTileRows = TILE_ROWS;
constexpr int kBatch = BATCH;
static_assert((kTileRows & (kTileRows - 1)) == 0, "the pairwise sum halves the rows");

extern "C" __global__ void __launch_bounds__(kTileCols* kTileRows)
    norm_finish(const float* __restrict__ partials, float* __restrict__ dgamma,
#if HAS_BETA
                float* __restrict__ dbeta,
#endif
                int blocks) {
  wait_for_launches_before();
  __shared__ float tile[kTileRows][kTileCols];
  const long long column = static_cast<long long>(blockIdx.x) * kTileCols + threadIdx.x;
  const bool active = column < kCols;
  const float* source = partials + static_cast<long long>(blockIdx.y) * blocks * kCols + column;

  float sum = 0.0f;
  for (int first = threadIdx.y; active && first < blocks; first += kTileRows * kBatch) {
    float values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int b = first + i * kTileRows;
      values[i] = b < blocks ? source[static_cast<long long>(b) * kCols] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) sum += values[i];
  }
  tile[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
#pragma unroll
  for (int half = kTileRows / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) tile[threadIdx.y][threadIdx.x] += tile[threadIdx.y + half][threadIdx.x];
    __syncthreads();
  }
  if (active && threadIdx.y == 0) {
    float* to = dgamma;
#if HAS_BETA
    if (blockIdx.y == 1) to = dbeta;
#endif
    to[column] = tile[0][threadIdx.x];
  }
}
