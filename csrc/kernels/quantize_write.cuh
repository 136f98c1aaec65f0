// A tile's scales and its data: from the numbers that the threads hold (quantize_tile.cuh).
//
// `values.take(turn)`: then `values.row(i, y)` is row i that the thread has in this turn
// (quantize_blocks.cuh). `values.forget()`: what was made of them before is not kept in registers.
// `kMakeOnce`: they are made at a price, and a warp that has whole blocks keeps them.
#pragma once
#include "quantize_blocks.cuh"

// Where a thread leaves 8 bytes of a column, or takes 16 of them: neither meets another of its warp
// in a bank.
__device__ __forceinline__ unsigned char* line_at(TileBuffers& shared, int col, int row) {
  return &shared.lines[kLines ? col : 0][kLines ? row ^ col / kEdge % 8 * 16 : 0];
}

// Columns of a whole tile as lines of 128 bytes: a warp's own would be sectors of 32, and L2 takes
// as long for each as for a line.
__device__ __forceinline__ void write_lines(const Shape& shape, const Tile& tile,
                                            const Written& written, TileBuffers& shared) {
  constexpr int kWord = 16, kWords = kTileRows / kWord, kAtOnce = kTileThreads / kWords;
  const int t = static_cast<int>(threadIdx.x), row = t % kWords * kWord;
  const bool aligned = (shape.rows | reinterpret_cast<long long>(written.turned)) % kWord == 0;
#pragma unroll 1
  for (int first = 0; first < kTileCols; first += kAtOnce) {
    const int col = first + t / kWords;
    if (col >= tile.cols) break;
    const uint4 word = *reinterpret_cast<const uint4*>(line_at(shared, col, row));
    unsigned char* to = written.turned +
                        tile.column_at(shape, shape.cols, tile.first_col + col) * shape.rows +
                        tile.first_row + row;
    if (aligned) {
      __stcs(reinterpret_cast<uint4*>(to), word);
    } else {
      __stcs(reinterpret_cast<uint2*>(to), make_uint2(word.x, word.y));
      __stcs(reinterpret_cast<uint2*>(to) + 1, make_uint2(word.z, word.w));
    }
  }
}

// The tile's data, as it lies and turned, each number made once: of a whole tile whose rows and
// columns are words. Returns the largest magnitude.
template <typename Values>
__device__ __forceinline__ float write_words(const Values& values, const Shape& shape,
                                             const Tile& tile, const Place& place,
                                             const Written& written, float factor,
                                             TileBuffers& shared) {
  unsigned char* to_row = written.data + tile.row_at(shape, place.row) * length_of_row(shape) +
                          tile.first_col + place.col;
  const int* row_factors = &shared.rows[place.col / kBlock % kRowBlocks][place.row];
  float column_factors[kEdge];
  if constexpr (kColumns && kHasBlocks) {
    const int* from = &shared.columns[place.row / kBlock][place.col];
#pragma unroll
    for (int j = 0; j < kEdge; ++j) column_factors[j] = __int_as_float(from[j]);
  }
  unsigned turned[kColumns ? 2 * kEdge : 1];
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kEdge; i += 2) {
    float y[2][kEdge], scaled[2][kEdge];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      values.row(i + r, y[r]);
      if constexpr (kRows || !kHasBlocks) {
        const float by = kHasBlocks ? __int_as_float(row_factors[i + r]) : factor;
#pragma unroll
        for (int j = 0; j < kEdge; ++j) {
          if (kAmax) largest = larger_magnitude(largest, y[r][j]);
          scaled[r][j] = flushed_product(y[r][j], by);
        }
      }
      if constexpr (kRows) {
        __stcs(reinterpret_cast<uint2*>(to_row), fp8_words<Format>(scaled[r]));
        to_row += length_of_row(shape);
      }
    }
    if constexpr (kColumns) {
#pragma unroll
      for (int j = 0; j < kEdge; ++j) {
        const float low = kHasBlocks ? flushed_product(y[0][j], column_factors[j]) : scaled[0][j];
        const float high = kHasBlocks ? flushed_product(y[1][j], column_factors[j]) : scaled[1][j];
        const unsigned pair = fp8_pair(low, high, Format{});
        unsigned& word = turned[2 * j + i / 4];
        word = i % 4 == 0 ? pair : word | pair << 16;
        if constexpr (kByHalves) {  // before the rest of the column takes registers
          if (i % 4 == 2) {
            unsigned char* to = line_at(shared, place.col + j, place.row) + i / 4 * 4;
            *reinterpret_cast<unsigned*>(to) = word;
          }
        }
      }
    }
  }
  if constexpr (kLines && !kByHalves) {
#pragma unroll
    for (int j = 0; j < kEdge; ++j) {
      *reinterpret_cast<uint2*>(line_at(shared, place.col + j, place.row)) =
          make_uint2(turned[2 * j], turned[2 * j + 1]);
    }
  } else if constexpr (kColumns && !kLines) {
    unsigned char* to = written.turned +
                        tile.column_at(shape, shape.cols, tile.first_col + place.col) * shape.rows +
                        tile.first_row + place.row;
#pragma unroll
    for (int j = 0; j < kEdge; ++j) {
      __stcs(reinterpret_cast<uint2*>(to), make_uint2(turned[2 * j], turned[2 * j + 1]));
      advance(to, shape.groups * shape.rows);
    }
  }
  return largest;
}

// The same byte by byte, of a tile that is cut or does not lie so.
template <typename Values>
__device__ __forceinline__ float write_bytes(const Values& values, const Shape& shape,
                                             const Tile& tile, const Place& place,
                                             const Written& written, float factor,
                                             const TileBuffers& shared) {
  const long long first_col = tile.first_col + place.col;
  unsigned char* to_row =
      written.data + tile.row_at(shape, place.row) * length_of_row(shape) + first_col;
  unsigned char* to_column = written.turned +
                             tile.column_at(shape, shape.cols, first_col) * shape.rows +
                             tile.first_row + place.row;
  float largest = 0.0f;
#pragma unroll 1
  for (int i = 0; i < kEdge && place.row + i < tile.rows; ++i) {
    float y[kEdge];
    values.row(i, y);
    const int row_factor = shared.rows[place.col / kBlock % kRowBlocks][place.row + i];
#pragma unroll
    for (int j = 0; j < kEdge; ++j) {
      if (place.col + j >= tile.cols) continue;
      if (kAmax) largest = larger_magnitude(largest, y[j]);
      if constexpr (kRows) {
        const float by = kHasBlocks ? __int_as_float(row_factor) : factor;
        to_row[j] = static_cast<unsigned char>(fp8_pair(flushed_product(y[j], by), 0.0f, Format{}));
      }
      if constexpr (kColumns) {
        const int column_factor = shared.columns[place.row / kBlock % kColumnBlocks][place.col + j];
        const float by = kHasBlocks ? __int_as_float(column_factor) : factor;
        to_column[j * shape.groups * shape.rows] =
            static_cast<unsigned char>(fp8_pair(flushed_product(y[j], by), 0.0f, Format{}));
      }
    }
    to_row += length_of_row(shape);
    to_column += 1;
  }
  return largest;
}

// Numbers that are made once: for what makes them at a price.
struct Made {
  float y[kEdge][kEdge];

  template <typename Values>
  __device__ __forceinline__ explicit Made(const Values& values) {
#pragma unroll
    for (int i = 0; i < kEdge; ++i) values.row(i, y[i]);
  }
  __device__ __forceinline__ void row(int i, float (&values)[kEdge]) const {
#pragma unroll
    for (int j = 0; j < kEdge; ++j) values[j] = y[i][j];
  }
};

// What is read of the tile's entry: before the tile itself, so that nobody waits for it later.
struct Entry {
  float scale = 1.0f;  // that is given
  unsigned seen = 0;   // of amax

  __device__ __forceinline__ Entry(const Written& written, const float* given, const Tile& tile) {
    if constexpr (kScales == kTensor) scale = given[tile.entry];
    if (kAmax && threadIdx.x % 32 == 0) seen = seen_so_far(written.amax + tile.entry);
  }
};

// All threads of the block, once, after `clear` and a barrier. `again`: the same numbers, where the
// compiler need not know i; `whole`: the tile is, and x and results are words.
template <typename Values, typename Again>
__device__ __forceinline__ void quantize_tile(Values& values, Again& again, bool whole,
                                              const Shape& shape, const Tile& tile,
                                              const Written& written, const Entry& entry,
                                              TileBuffers& shared) {
  // A warp that has whole blocks goes on with each part by itself.
  constexpr bool kApart = Values::kMakeOnce && kBlocksInWarp;
  float factor = 1.0f, largest = 0.0f;
  if constexpr (kScales == kTensor) {
    factor = reciprocal(entry.scale);
  } else if constexpr (!kApart) {
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      values.take(turn);
      again.take(turn);
      find_scales(values, again, shape, tile, Place(turn), written, shared);
    }
    finish_scales(shape, tile, written, shared);
    values.forget();
  }
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const Place place(turn);
    float of_turn = 0.0f;
    values.take(turn);
    if constexpr (kApart) {
      const Made made(values);
      find_scales(made, values, shape, tile, place, written, shared);
      __syncwarp();
      if (whole && place.col < tile.cols) {
        of_turn = write_words(made, shape, tile, place, written, factor, shared);
      } else if (place.col < tile.cols) {
        again.take(turn);
        of_turn = write_bytes(again, shape, tile, place, written, factor, shared);
      }
    } else if (place.col < tile.cols) {
      const auto find_factor = [&] {
        if constexpr (kScales != kSquare) return factor;
        return scale_square(shape, tile, place, written, shared);
      };
      // Apart from each other, so that neither keeps registers for the other.
      if (whole) {
        factor = find_factor();
        of_turn = write_words(values, shape, tile, place, written, factor, shared);
      } else {
        factor = find_factor();
        again.take(turn);
        of_turn = write_bytes(again, shape, tile, place, written, factor, shared);
      }
    }
    largest = larger_magnitude(largest, of_turn);
  }
  if constexpr (kLines) {
    if (whole) {
      __syncthreads();
      write_lines(shape, tile, written, shared);
    }
  }
  if constexpr (kAmax) {
    const int key = largest_of_lanes<1, 32>(magnitude_key(largest));
    if (threadIdx.x % 32 == 0) report(written.amax + tile.entry, entry.seen, key);
  }
}
