// Scales of a tile, from the numbers that the threads hold (quantize_tile.cuh).
//
// `values.row(i, y)`: row i of the thread, float32; 0 past the array's last column, where a part of
// the eight is past it.
#pragma once
#include "halving.cuh"
#include "quantize_tile.cuh"

// Whose largest magnitudes are of use.
[[maybe_unused]] constexpr bool kOfRows = kRows || kScales == kSquare;
constexpr bool kRowsInWarp = kHasBlocks && kBlock <= kPartCols;
constexpr bool kColumnsInWarp = kHasBlocks && kBlock <= kPartRows;

// Largest magnitudes of the thread's rows and columns.
template <typename Values>
__device__ __forceinline__ void find_largest(const Values& values, float (&rows)[kEdge],
                                             float (&columns)[kEdge]) {
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    float y[kEdge];
    values.row(i, y);
#pragma unroll
    for (int j = 0; j < kEdge; ++j) {
      if (kOfRows) rows[i] = larger_magnitude(rows[i], y[j]);
      if (kColumns && kHasBlocks) columns[j] = larger_magnitude(columns[j], y[j]);
    }
  }
}
// The same of 16-bit numbers, two at a time: without their signs their bits are ordered as they
// are, infinity and NaN above the rest.
template <typename T>
__device__ __forceinline__ void find_largest_of_pairs(const Held<T>& held, float (&rows)[kEdge],
                                                      float (&columns)[kEdge]) {
  Vector<T, kEdge> of_columns{};
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    Vector<T, 2> of_row{};
#pragma unroll
    for (int w = 0; w < kEdge / 2; ++w) {
      const unsigned magnitudes = held.rows[i].words[w] & 0x7fff7fffu;
      of_row.words[0] = larger_pair(of_row.words[0], magnitudes);
      of_columns.words[w] = larger_pair(of_columns.words[w], magnitudes);
    }
    of_row.words[0] = larger_pair(of_row.words[0], of_row.words[0] << 16);
    rows[i] = of_row.at(1);
  }
#pragma unroll
  for (int j = 0; j < kEdge; ++j) columns[j] = of_columns.at(j);
}
template <typename T>
__device__ __forceinline__ void find_largest(const Held<T>& held, float (&rows)[kEdge],
                                             float (&columns)[kEdge]) {
  if constexpr (kByHalves && sizeof(T) == 2) {
    find_largest_of_pairs(held, rows, columns);
  } else {
    find_largest<Held<T>>(held, rows, columns);
  }
}

// Largest finite magnitudes of the thread's rows and columns. To look for other numbers at each
// would cost more than to look again where there is one.
template <typename Values, typename Again>
__device__ __forceinline__ void find_magnitudes(const Values& values, const Again& again,
                                                float (&rows)[kEdge], float (&columns)[kEdge]) {
  find_largest(values, rows, columns);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kEdge; ++i) {
    largest = larger_magnitude(largest, kOfRows ? rows[i] : columns[i]);
  }
  if (magnitude_key(largest) < kInfinite) return;
#pragma unroll
  for (int j = 0; j < kEdge; ++j) columns[j] = 0.0f;
#pragma unroll 1
  for (int i = 0; i < kEdge; ++i) {
    float y[kEdge], of_row = 0.0f;
    again.row(i, y);
#pragma unroll
    for (int j = 0; j < kEdge; ++j) {
      const float finite = magnitude_key(y[j]) < kInfinite ? y[j] : 0.0f;
      of_row = larger_magnitude(of_row, finite);
      columns[j] = larger_magnitude(columns[j], finite);
    }
#pragma unroll
    for (int k = 0; k < kEdge; ++k) rows[k] = k == i ? of_row : rows[k];
  }
}

// Where the scale of a block lies, of `rows` rows of `blocks`; that of the next row, `scale_step`
// later.
__device__ __forceinline__ long long scale_at(long long row, long long rows, long long block,
                                              long long blocks) {
  return BLOCKS_FIRST ? block * rows + row : row * blocks + block;
}
__device__ __forceinline__ long long scale_step(long long blocks) {
  return BLOCKS_FIRST ? 1 : blocks;
}
__device__ __forceinline__ long long blocks_along(long long length) {
  return (length + kBlock - 1) / kBlock;
}
__device__ __forceinline__ Scale* row_scale_at(const Shape& shape, const Tile& tile,
                                               const Written& written, int row, int block) {
  return written.scales + scale_at(tile.row_at(shape, row), shape.groups * shape.rows,
                                   tile.first_col / kBlock + block,
                                   blocks_along(length_of_row(shape)));
}
__device__ __forceinline__ Scale* column_scale_at(const Shape& shape, const Tile& tile,
                                                  const Written& written, int col, int block) {
  return written.turned_scales + scale_at(tile.column_at(shape, shape.cols, tile.first_col + col),
                                          shape.cols * shape.groups,
                                          tile.first_row / kBlock + block,
                                          blocks_along(shape.rows));
}

// A lane's scales, of neighbouring rows or columns, of which `count` are there.
template <int kCount>
__device__ __forceinline__ void write_scales(Scale* to, long long step,
                                             const Scale (&scales)[kCount], int count) {
  if constexpr (BLOCKS_FIRST && kScales == kRow32 && kCount == 2) {
    if (count >= 2 && step == 1 && reinterpret_cast<unsigned long long>(to) % 2 == 0) {
      const unsigned both = scales[0].bits | scales[1].bits << 8;
      *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(both);
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (k < count) to[k * step] = scales[k];
  }
}

// Blocks that lie in a warp: their lanes share the magnitudes, and the work on scales.
__device__ __forceinline__ void scale_rows(const Shape& shape, const Tile& tile, const Place& place,
                                           const Written& written, float (&largest)[kEdge],
                                           TileBuffers& shared) {
  using Rows = Halving<kBlock / kEdge, 1>;
  Rows::reduce(largest, Larger{});
  const int block = place.col / kBlock, first = place.row + Rows::kept();
  Scale scales[Rows::kLeft];
#pragma unroll
  for (int k = 0; k < Rows::kLeft; ++k) {
    const Scaling<Scale> scaling(__float_as_uint(largest[k]));
    shared.rows[block][first + k] = __float_as_int(scaling.factor);
    scales[k] = scaling.written;
  }
  if (block * kBlock < tile.cols) {
    write_scales(row_scale_at(shape, tile, written, first, block),
                 scale_step(blocks_along(length_of_row(shape))), scales, tile.rows - first);
  }
}
__device__ __forceinline__ void scale_columns(const Shape& shape, const Tile& tile,
                                              const Place& place, const Written& written,
                                              float (&largest)[kEdge], TileBuffers& shared) {
  using Columns = Halving<kLanesDown, kLanesAcross>;
  Columns::reduce(largest, Larger{});
  const int block = place.row / kBlock, first = place.col + Columns::kept();
  Scale scales[Columns::kLeft];
#pragma unroll
  for (int k = 0; k < Columns::kLeft; ++k) {
    const Scaling<Scale> scaling(__float_as_uint(largest[k]));
    shared.columns[block][first + k] = __float_as_int(scaling.factor);
    scales[k] = scaling.written;
  }
  if (block * kBlock < tile.rows) {
    write_scales(column_scale_at(shape, tile, written, first, block),
                 shape.groups * scale_step(blocks_along(shape.rows)), scales, tile.cols - first);
  }
}

// Blocks of several warps: first the largest magnitude of each is raised to that of all.
__device__ __forceinline__ void raise_rows(const Place& place, float (&largest)[kEdge],
                                           TileBuffers& shared) {
  using Rows = Halving<kLanesAcross, 1>;
  Rows::reduce(largest, Larger{});
  const int row = place.row + Rows::kept();
  raise_shared(&shared.rows[place.col / kBlock][row], __float_as_int(largest[0]));
}
__device__ __forceinline__ void raise_columns(const Place& place, float (&largest)[kEdge],
                                              TileBuffers& shared) {
  using Columns = Halving<kLanesDown, kLanesAcross>;
  Columns::reduce(largest, Larger{});
#pragma unroll
  for (int k = 0; k < Columns::kLeft; ++k) {
    const int col = place.col + Columns::kept() + k;
    raise_shared(&shared.columns[place.row / kBlock][col], __float_as_int(largest[k]));
  }
}

// Then each thread works on a few of them.
__device__ __forceinline__ void scale_blocks(const Shape& shape, const Tile& tile,
                                             const Written& written, TileBuffers& shared) {
  const int t = static_cast<int>(threadIdx.x);
  if constexpr (kRows && !kRowsInWarp) {
    for (int at = t; at < kTileRows * kRowBlocks; at += kTileThreads) {
      const int row = BLOCKS_FIRST ? at % kTileRows : at / kRowBlocks;
      const int block = BLOCKS_FIRST ? at / kTileRows : at % kRowBlocks;
      const Scaling<Scale> scaling(static_cast<unsigned>(shared.rows[block][row]));
      shared.rows[block][row] = __float_as_int(scaling.factor);
      if (row < tile.rows && block * kBlock < tile.cols) {
        *row_scale_at(shape, tile, written, row, block) = scaling.written;
      }
    }
  }
  if constexpr (kColumns && !kColumnsInWarp) {
    for (int at = t; at < kTileCols * kColumnBlocks; at += kTileThreads) {
      const int col = at % kTileCols, block = at / kTileCols;
      const Scaling<Scale> scaling(static_cast<unsigned>(shared.columns[block][col]));
      shared.columns[block][col] = __float_as_int(scaling.factor);
      if (col < tile.cols && block * kBlock < tile.rows) {
        *column_scale_at(shape, tile, written, col, block) = scaling.written;
      }
    }
  }
}

constexpr bool kBlocksInWarp =
    kHasBlocks && (!kRows || kRowsInWarp) && (!kColumns || kColumnsInWarp);

// Warps below each other have parts of the same lines of columns: they write them together, so that
// L2 gets fewer requests.
constexpr bool kTogether = kColumns && !kLines && kTileRows == 128;

// Once all turns' magnitudes are there.
__device__ __forceinline__ void finish_scales(const Shape& shape, const Tile& tile,
                                              const Written& written, TileBuffers& shared) {
  if constexpr (kBlocksInWarp && !kTogether) {
    __syncwarp();
  } else {
    __syncthreads();
    if constexpr (kHasBlocks && !kBlocksInWarp) {
      scale_blocks(shape, tile, written, shared);
      __syncthreads();
    }
  }
}

__device__ __forceinline__ void raise_square(const Place& place, const float (&rows)[kEdge],
                                             TileBuffers& shared) {
  float largest = rows[0];
#pragma unroll
  for (int i = 1; i < kEdge; ++i) largest = Larger{}(largest, rows[i]);
  const int key = largest_of_lanes<1, 32>(__float_as_int(largest));
  if (threadIdx.x % 32 == 0) raise_shared(&shared.squares[place.col / kBlock], key);
}

// Returns what the thread's square is multiplied by.
__device__ __forceinline__ float scale_square(const Shape& shape, const Tile& tile,
                                              const Place& place, const Written& written,
                                              const TileBuffers& shared) {
  const int square = place.col / kBlock;
  const Scaling<Scale> scaling(static_cast<unsigned>(shared.squares[square]));
  if (place.row == 0 && place.col % kBlock == 0 && place.col < tile.cols) {
    const long long down = tile.first_row / kBlock, across = tile.first_col / kBlock + square;
    const long long squares_across = blocks_along(length_of_row(shape));
    const long long squares_down = blocks_along(shape.rows);
    if (kRows) {
      written.scales[(tile.group * squares_down + down) * squares_across + across] =
          scaling.written;
    }
    if (kColumns) {
      const long long column = tile.column_at(shape, squares_across, across);
      written.turned_scales[column * squares_down + down] = scaling.written;
    }
  }
  return scaling.factor;
}

template <typename Values, typename Again>
__device__ __forceinline__ void find_scales(const Values& values, const Again& again,
                                            const Shape& shape, const Tile& tile,
                                            const Place& place, const Written& written,
                                            TileBuffers& shared) {
  float rows[kEdge] = {}, columns[kEdge] = {};
  if (place.col < tile.cols) find_magnitudes(values, again, rows, columns);
  if constexpr (kScales == kSquare) raise_square(place, rows, shared);
  if constexpr (kRows && kRowsInWarp) scale_rows(shape, tile, place, written, rows, shared);
  if constexpr (kRows && kHasBlocks && !kRowsInWarp) raise_rows(place, rows, shared);
  if constexpr (kColumns && kColumnsInWarp) {
    scale_columns(shape, tile, place, written, columns, shared);
  }
  if constexpr (kColumns && kHasBlocks && !kColumnsInWarp) raise_columns(place, columns, shared);
}
