// Scales of a tile, and its data: from the numbers that the threads hold (quantize_tile.cuh).
//
// `values.at(i, j)`: row i, column j of the thread's sub-tile, float32. Past the array's ends it is
// 0 or what the last row or column has: either leaves largest magnitudes as they are.
// `values.forget()`: what was made of them before is not kept in registers.
#pragma once
#include "quantize_tile.cuh"

// Makes shared.key the largest key of the tile: after the block's next barrier.
template <typename Values>
__device__ __forceinline__ void find_largest(const Values& values, TileBuffers& shared) {
  int key = 0;
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
#pragma unroll
    for (int j = 0; j < kEdge; ++j) {
      key = larger(key, kAmax ? magnitude_key(values.at(i, j)) : finite_key(values.at(i, j)));
    }
  }
  key = largest_of_lanes<1, 32>(key);
  if (threadIdx.x % 32 == 0) raise_shared(&shared.key, key);
}

__device__ __forceinline__ void write_square_scale(const Shape& shape, const Tile& tile,
                                                   const Written& written, Scale scale) {
  const long long down = tile.first_row / kTile, across = tile.first_col / kTile;
  if (kRows) {
    const long long row = tile.group * shape.tiles_down + down;
    written.scales[row * shape.tiles_across + across] = scale;
  }
  if (kColumns) {
    const long long column = tile.column_at(shape, shape.tiles_across, across);
    written.turned_scales[column * shape.tiles_down + down] = scale;
  }
}

// Where the scale of a block lies, of `rows` rows of `blocks`.
__device__ __forceinline__ long long scale_at(long long row, long long rows, long long block,
                                              long long blocks) {
  return BLOCKS_FIRST ? block * rows + row : row * blocks + block;
}
__device__ __forceinline__ Scale* row_scale_at(const Shape& shape, const Tile& tile,
                                               const Written& written, int row, int block) {
  const long long at =
      scale_at(tile.row_at(shape, row), shape.groups * shape.rows, tile.first_col / kBlock + block,
               (shape.cols + kBlock - 1) / kBlock);
  return written.scales + at;
}
__device__ __forceinline__ Scale* column_scale_at(const Shape& shape, const Tile& tile,
                                                  const Written& written, int col, int block) {
  const long long at =
      scale_at(tile.column_at(shape, shape.cols, tile.first_col + col), shape.cols * shape.groups,
               tile.first_row / kBlock + block, (shape.rows + kBlock - 1) / kBlock);
  return written.turned_scales + at;
}

// What the thread's rows and columns are multiplied by.
struct Factors {
  float rows[kEdge];
  float columns[kEdge];
};

// Largest keys of the thread's rows and columns, over lanes that share their blocks. Eight at a
// time, since one after the other waits for the shuffles.
template <typename Values>
__device__ __forceinline__ void find_keys(const Values& values, int (&rows)[kEdge],
                                          int (&columns)[kEdge]) {
#pragma unroll
  for (int i = 0; i < kEdge; ++i) rows[i] = columns[i] = 0;
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
#pragma unroll
    for (int j = 0; j < kEdge; ++j) {
      const int key = finite_key(values.at(i, j));
      if (kRows) rows[i] = larger(rows[i], key);
      if (kColumns) columns[j] = larger(columns[j], key);
    }
  }
  if constexpr (kRows) share_largest<1, kBlock / kEdge>(rows);
  if constexpr (kColumns) share_largest<kLanesAcross, 32>(columns);
}

// Scales of blocks: those of rows are written, those of columns left in shared memory.
template <typename Values>
__device__ __forceinline__ void find_scales(const Values& values, const Shape& shape,
                                            const Tile& tile, const Place& place,
                                            const Written& written, TileBuffers& shared,
                                            Factors& factors) {
  const int col = place.across * kEdge, row = place.down * kEdge;
  int rows[kEdge], columns[kEdge];
  find_keys(values, rows, columns);
  if constexpr (kRows) {
    const long long apart = BLOCKS_FIRST ? 1 : (shape.cols + kBlock - 1) / kBlock;
    Scale* scale = row_scale_at(shape, tile, written, row, col / kBlock);
    const bool writes = col % kBlock == 0 && col < tile.cols;
#pragma unroll
    for (int i = 0; i < kEdge; ++i) {
      const Scaling<Scale> scaling(rows[i]);
      factors.rows[i] = scaling.factor;
      if (writes && row + i < tile.rows) *scale = scaling.written;
      advance(scale, apart);
    }
  }
  if constexpr (kColumns) {
    if constexpr (kScales == kRow128) {
      if (threadIdx.x % 32 < kLanesAcross) {
#pragma unroll
        for (int j = 0; j < kEdge; ++j) raise_shared(&shared.column_keys[col + j], columns[j]);
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kEdge; ++j) columns[j] = shared.column_keys[col + j];
    }
#pragma unroll
    for (int j = 0; j < kEdge; ++j) {
      const Scaling<Scale> scaling(columns[j]);
      factors.columns[j] = scaling.factor;
      if (row % kBlock == 0) shared.column_scales[col + j][row / kBlock] = scaling.written;
    }
  }
}

__device__ __forceinline__ void write_column_scales(const Shape& shape, const Tile& tile,
                                                    const Written& written,
                                                    const TileBuffers& shared) {
  const int col = threadIdx.x;
  if (col >= tile.cols) return;
  Scale* to = column_scale_at(shape, tile, written, col, 0);
  constexpr int kCount = kTile / kBlock;
  if (kCount == 4 && tile.rows == kTile && reinterpret_cast<unsigned long long>(to) % 4 == 0) {
    *reinterpret_cast<unsigned*>(to) =
        *reinterpret_cast<const unsigned*>(shared.column_scales[col]);
    return;
  }
#pragma unroll
  for (int b = 0; b < kCount; ++b) {
    if (b * kBlock < tile.rows) to[b] = shared.column_scales[col][b];
  }
}

template <typename Values>
__device__ __forceinline__ void write_rows(const Values& values, const Shape& shape,
                                           const Tile& tile, const Place& place,
                                           unsigned char* data, const float (&factors)[kEdge]) {
  const int col = place.across * kEdge, row = place.down * kEdge;
  const bool aligned = (shape.cols | reinterpret_cast<long long>(data)) % kEdge == 0;
  data += tile.row_at(shape, row) * shape.cols + tile.first_col + col;
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    float scaled[kEdge];
#pragma unroll
    for (int j = 0; j < kEdge; ++j) scaled[j] = flushed_product(values.at(i, j), factors[i]);
    if (row + i < tile.rows) {
      store_first(data, fp8_words<Format>(scaled), tile.cols - col, aligned);
    }
    advance(data, shape.cols);
  }
}

// Into shared memory, a piece of 8 rows a column.
template <typename Values>
__device__ __forceinline__ void turn(const Values& values, const Place& place,
                                     const float (&factors)[kEdge], TileBuffers& shared) {
  const int piece = place.down ^ swizzle(place.across);
#pragma unroll
  for (int j = 0; j < kEdge; ++j) {
    float scaled[kEdge];
#pragma unroll
    for (int i = 0; i < kEdge; ++i) scaled[i] = flushed_product(values.at(i, j), factors[j]);
    shared.turned[(place.across * kEdge + j) * kSubTiles + piece] = fp8_words<Format>(scaled);
  }
}

// And out, 8 lanes a column, two pieces each.
__device__ __forceinline__ void write_turned(const Shape& shape, const Tile& tile,
                                             unsigned char* data, const TileBuffers& shared) {
  constexpr int kPairs = kSubTiles / 2;
  const bool aligned = (shape.rows | reinterpret_cast<long long>(data)) % 16 == 0;
#pragma unroll
  for (int first = 0; first < kTile * kPairs; first += kTileThreads) {
    const int pair = (first + static_cast<int>(threadIdx.x)) % kPairs;
    const int col = (first + static_cast<int>(threadIdx.x)) / kPairs;
    const int turned = swizzle(col / kEdge), row = pair * 2 * kEdge;
    const uint4 found =
        reinterpret_cast<const uint4*>(shared.turned)[col * kPairs + (pair ^ turned / 2)];
    const uint2 one = make_uint2(found.x, found.y), other = make_uint2(found.z, found.w);
    const uint2 low = turned % 2 ? other : one, high = turned % 2 ? one : other;
    if (col >= tile.cols || row >= tile.rows) continue;
    unsigned char* to = data +
                        tile.column_at(shape, shape.cols, tile.first_col + col) * shape.rows +
                        tile.first_row + row;
    if (aligned) {
      __stcs(reinterpret_cast<uint4*>(to), make_uint4(low.x, low.y, high.x, high.y));
    } else {
      store_first(to, low, tile.rows - row, false);
      store_first(to + kEdge, high, tile.rows - row - kEdge, false);
    }
  }
}

// All threads of the block, once, after `start_tile`. `given`: the scale of the entry.
template <typename Values>
__device__ __forceinline__ void quantize_tile(Values& values, const Shape& shape, const Tile& tile,
                                              const Place& place, const Written& written,
                                              const float* given, TileBuffers& shared) {
  unsigned* const amax = kAmax ? written.amax + tile.entry : nullptr;
  unsigned seen = 0;
  if (kAmax && threadIdx.x == 0) seen = seen_so_far(amax);
  if constexpr (kAmax || kScales == kSquare) find_largest(values, shared);
  constexpr bool kBlocks = kScales == kRow128 || kScales == kRow32;
  Factors factors;
  if constexpr (kBlocks) {
    find_scales(values, shape, tile, place, written, shared, factors);
  } else {
    float factor;
    if constexpr (kScales == kTensor) {
      factor = reciprocal(given[tile.entry]);
    } else {
      __syncthreads();
      const Scaling<Scale> scaling(shared.key);
      if (threadIdx.x == 0) write_square_scale(shape, tile, written, scaling.written);
      factor = scaling.factor;
    }
#pragma unroll
    for (int i = 0; i < kEdge; ++i) factors.rows[i] = factors.columns[i] = factor;
  }
  // A loop, since else the compiler begins the columns before the rows have left the registers.
#pragma unroll 1
  for (int way = kRows ? 0 : 1; way < (kColumns ? 2 : 1); ++way) {
    values.forget();
    if (kRows && way == 0) {
      write_rows(values, shape, tile, place, written.data, factors.rows);
    } else if constexpr (kColumns) {
      turn(values, place, factors.columns, shared);
    }
  }
  if constexpr (kColumns || kAmax) __syncthreads();
  if constexpr (kColumns) write_turned(shape, tile, written.turned, shared);
  if constexpr (kColumns && kBlocks) {
    write_column_scales(shape, tile, written, shared);
  }
  if (kAmax && threadIdx.x == 0) report(amax, seen, shared.key);
}
