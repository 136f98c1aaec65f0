// Scales of a tile, and its data: from the numbers that the threads hold (quantize_tile.cuh).
#pragma once
#include "quantize_tile.cuh"

// Makes shared.key the largest key of the tile: after the block's next barrier.
template <typename T>
__device__ __forceinline__ void find_largest(const Held<T>& values, TileBuffers& shared) {
  unsigned key = 0;
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

template <typename T>
__device__ __forceinline__ unsigned key_of_row(const Held<T>& values, int i) {
  unsigned key = 0;
#pragma unroll
  for (int j = 0; j < kEdge; ++j) key = larger(key, finite_key(values.at(i, j)));
  return largest_of_lanes<1, kBlock / kEdge>(key);
}

// `factor`: where one serves the tile. Else scales are found and written, too.
template <typename T>
__device__ __forceinline__ void write_rows(const Held<T>& values, const Shape& shape,
                                           const Tile& tile, const Place& place,
                                           const Written& written, float factor) {
  const int col = place.across * kEdge, row = place.down * kEdge;
  const bool aligned = (shape.cols | reinterpret_cast<long long>(written.data)) % kEdge == 0;
  const long long scales_of_row = (shape.cols + kBlock - 1) / kBlock;
  const long long first = tile.row_at(shape, row);
  unsigned char* data = written.data + first * shape.cols + tile.first_col + col;
  Scale* scale = written.scales + first * scales_of_row + (tile.first_col + col) / kBlock;
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    if constexpr (kScales == kRow128 || kScales == kRow32) {
      const Scaling<Scale> scaling(key_of_row(values, i));
      factor = scaling.factor;
      if (col % kBlock == 0 && row + i < tile.rows && col < tile.cols) *scale = scaling.written;
      advance(scale, scales_of_row);
    }
    float scaled[kEdge];
#pragma unroll
    for (int j = 0; j < kEdge; ++j) scaled[j] = flushed_product(values.at(i, j), factor);
    if (row + i < tile.rows) {
      store_first(data, fp8_words<Format>(scaled), tile.cols - col, aligned);
    }
    advance(data, shape.cols);
  }
}

template <typename T>
__device__ __forceinline__ unsigned key_of_column(const Held<T>& values, int j) {
  unsigned key = 0;
#pragma unroll
  for (int i = 0; i < kEdge; ++i) key = larger(key, finite_key(values.at(i, j)));
  return largest_of_lanes<kLanesAcross, 32>(key);
}

// Brings keys of columns together over the block, where their blocks are longer than a warp's rows.
template <typename T>
__device__ __forceinline__ void find_column_keys(const Held<T>& values, const Place& place,
                                                 TileBuffers& shared) {
#pragma unroll
  for (int j = 0; j < kEdge; ++j) {
    const unsigned key = key_of_column(values, j);
    if (threadIdx.x % 32 < kLanesAcross) {
      raise_shared(&shared.column_keys[place.across * kEdge + j], key);
    }
  }
  __syncthreads();
}

// What `turn` left of the columns' scales.
__device__ __forceinline__ void write_column_scales(const Shape& shape, const Tile& tile,
                                                    Scale* scales, const TileBuffers& shared) {
  const int col = threadIdx.x;
  if (col >= tile.cols) return;
  const long long scales_of_column = (shape.rows + kBlock - 1) / kBlock;
  Scale* to = scales + tile.column_at(shape, shape.cols, tile.first_col + col) * scales_of_column +
              tile.first_row / kBlock;
#pragma unroll
  for (int b = 0; b < kTile / kBlock; ++b) {
    if (b * kBlock < tile.rows) to[b] = shared.column_scales[col][b];
  }
}

// Into shared memory, a piece of 8 rows a column.
template <typename T>
__device__ __forceinline__ void turn(const Held<T>& values, const Place& place, float factor,
                                     TileBuffers& shared) {
  if constexpr (kScales == kRow128) find_column_keys(values, place, shared);
  const int row = place.down * kEdge;
#pragma unroll
  for (int j = 0; j < kEdge; ++j) {
    const int col = place.across * kEdge + j;
    if constexpr (kScales == kRow128 || kScales == kRow32) {
      const unsigned key = kScales == kRow128 ? shared.column_keys[col] : key_of_column(values, j);
      const Scaling<Scale> scaling(key);
      if (row % kBlock == 0) shared.column_scales[col][row / kBlock] = scaling.written;
      factor = scaling.factor;
    }
    float scaled[kEdge];
#pragma unroll
    for (int i = 0; i < kEdge; ++i) scaled[i] = flushed_product(values.at(i, j), factor);
    const int piece = place.down ^ swizzle(place.across);
    shared.turned[col * kSubTiles + piece] = fp8_words<Format>(scaled);
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
template <typename T>
__device__ __forceinline__ void quantize_tile(Held<T>& values, const Shape& shape, const Tile& tile,
                                              const Place& place, const Written& written,
                                              const float* given, TileBuffers& shared) {
  unsigned* const amax = kAmax ? written.amax + tile.entry : nullptr;
  unsigned seen = 0;
  if (kAmax && threadIdx.x == 0) seen = seen_so_far(amax);
  if constexpr (kAmax || kScales == kSquare) find_largest(values, shared);
  float factor = 1.0f;
  if constexpr (kScales == kTensor) factor = reciprocal(given[tile.entry]);
  if constexpr (kScales == kSquare) {
    __syncthreads();
    const Scaling<Scale> scaling(shared.key);
    if (threadIdx.x == 0) write_square_scale(shape, tile, written, scaling.written);
    factor = scaling.factor;
  }
  // A loop, since else the compiler begins the columns before the rows have left the registers.
#pragma unroll 1
  for (int way = kRows ? 0 : 1; way < (kColumns ? 2 : 1); ++way) {
    values.forget();
    if (kRows && way == 0) {
      write_rows(values, shape, tile, place, written, factor);
    } else if constexpr (kColumns) {
      turn(values, place, factor, shared);
    }
  }
  if constexpr (kColumns || kAmax) __syncthreads();
  if constexpr (kColumns) write_turned(shape, tile, written.turned, shared);
  if constexpr (kColumns && (kScales == kRow128 || kScales == kRow32)) {
    write_column_scales(shape, tile, written.turned_scales, shared);
  }
  if (kAmax && threadIdx.x == 0) report(amax, seen, shared.key);
}
