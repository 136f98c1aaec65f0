// Scales of 32 elements (E8M0) in the order that cuBLASLt reads, 0 where there are none.
//
//   to[r / 128, b / 4, r % 32, r / 32 % 4, b % 4] = scale of row r, block b
//
// Layout: that scale is at from[rows.offset(r) + blocks.offset(b)]; `to` is dense.
// Threads: 128 a block; blocks of lhs, then of rhs. A block takes 128 rows x 64 blocks of scales, a
// thread 16 of each of 4 rows, 32 apart: 16 bytes in a row of each of 4 tiles.
#pragma once

constexpr int kThreads = 128;
constexpr int kTileRows = 128, kTileBlocks = 4;
constexpr int kTileWords = kTileRows * kTileBlocks / 16;
constexpr int kRows = 4, kRowsApart = 32;  // of a thread
constexpr int kTiles = 4;                  // of a thread
constexpr int kStrip = 16;                 // tiles of a block
constexpr int kDigits = DIGITS;

// An index over dims that need not lie one after the other, the last one fastest.
struct Digits {
  unsigned size[kDigits];
  long long stride[kDigits];

  __device__ __forceinline__ long long offset(unsigned index) const {
    if constexpr (kDigits == 1) return index * stride[0];
    long long at = 0;
#pragma unroll
    for (int d = kDigits - 1; d >= 0; --d) {
      const unsigned above = index / size[d];
      at += (index - above * size[d]) * stride[d];
      index = above;
    }
    return at;
  }
};

struct Scales {
  unsigned row_count;
  unsigned block_count;
  Digits rows;
  Digits blocks;
  unsigned thread_blocks;
};

// A thread's codes of a row.
struct Codes {
  unsigned words[kTiles];
};

// Those of four tiles from `from` on, side by side, of which there are `count`. Only words that
// hold one of them are read.
__device__ __forceinline__ Codes codes_along(const unsigned char* from, unsigned count) {
  constexpr unsigned kMost = kTiles * kTileBlocks;
  if (count > kMost) count = kMost;
  const unsigned before = reinterpret_cast<unsigned long long>(from) % 4;
  const unsigned* at = reinterpret_cast<const unsigned*>(from - before);
  unsigned words[kTiles + 1];
#pragma unroll
  for (int w = 0; w <= kTiles; ++w) words[w] = 4 * w < count + before ? at[w] : 0;
  Codes codes;
#pragma unroll
  for (int w = 0; w < kTiles; ++w) {
    const unsigned four = __funnelshift_r(words[w], words[w + 1], 8 * before);
    const unsigned first = 4 * w;
    const unsigned missing = count >= first + 4 ? 0 : count <= first ? 4 : first + 4 - count;
    codes.words[w] = missing == 4 ? 0 : four & 0xffffffffu >> 8 * missing;
  }
  return codes;
}

// Those of a tile, wherever they lie.
__device__ __forceinline__ unsigned codes_apart(const unsigned char* row, const Scales& scales,
                                                unsigned first) {
  unsigned codes = 0;
#pragma unroll
  for (unsigned b = 0; b < kTileBlocks; ++b) {
    if (first + b < scales.block_count) {
      const unsigned code = row[scales.blocks.offset(first + b)];
      codes |= code << 8 * b;
    }
  }
  return codes;
}

__device__ __forceinline__ void arrange(const unsigned char* from, uint4* to, const Scales& scales,
                                        unsigned index) {
  const unsigned tiles = (scales.block_count + kTileBlocks - 1) / kTileBlocks;
  const unsigned strips = (tiles + kStrip - 1) / kStrip, panel = index / strips;
  const unsigned t = threadIdx.x;
  const bool along = kDigits == 1 && scales.blocks.stride[0] == 1;
  // Neighbouring threads read neighbouring bytes.
  const unsigned part = along ? t % kTiles : t / kRowsApart;
  const unsigned r = along ? t / kTiles : t % kRowsApart;
  const unsigned tile = (index - panel * strips) * kStrip + part * kTiles;
  if (tile >= tiles) return;
  to += (static_cast<long long>(panel) * tiles + tile) * kTileWords + r;
  const unsigned char* rows[kRows];
  bool there[kRows];
#pragma unroll
  for (int q = 0; q < kRows; ++q) {
    const unsigned row = panel * kTileRows + q * kRowsApart + r;
    there[q] = row < scales.row_count;
    rows[q] = from + (there[q] ? scales.rows.offset(row) : 0);
  }
  if (!along) {
#pragma unroll 1
    for (int w = 0; w < kTiles; ++w) {
      if (tile + w >= tiles) break;
      unsigned words[kRows] = {};
#pragma unroll
      for (int q = 0; q < kRows; ++q) {
        if (there[q]) words[q] = codes_apart(rows[q], scales, (tile + w) * kTileBlocks);
      }
      to[w * kTileWords] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return;
  }
  const unsigned first = tile * kTileBlocks;
  // Words of four tiles, in all rows or in none.
  const bool whole = reinterpret_cast<unsigned long long>(from) % 16 == 0 &&
                     (scales.block_count | scales.rows.stride[0]) % 16 == 0;
  Codes codes[kRows];
  if (whole) {
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      const uint4* word = reinterpret_cast<const uint4*>(rows[q] + first);
      const uint4 found = there[q] ? *word : make_uint4(0, 0, 0, 0);
      codes[q] = {{found.x, found.y, found.z, found.w}};
    }
  } else {
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      codes[q] = codes_along(rows[q] + first, there[q] ? scales.block_count - first : 0);
    }
  }
#pragma unroll
  for (int w = 0; w < kTiles; ++w) {
    if (tile + w < tiles) {
      to[w * kTileWords] =
          make_uint4(codes[0].words[w], codes[1].words[w], codes[2].words[w], codes[3].words[w]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    scale_tiles(const unsigned char* __restrict__ lhs, const unsigned char* __restrict__ rhs,
                uint4* __restrict__ lhs_tiles, uint4* __restrict__ rhs_tiles, Scales of_lhs,
                Scales of_rhs) {
  const unsigned of_others = of_lhs.thread_blocks;
  if (blockIdx.x < of_others) {
    arrange(lhs, lhs_tiles, of_lhs, blockIdx.x);
  } else {
    arrange(rhs, rhs_tiles, of_rhs, blockIdx.x - of_others);
  }
}
