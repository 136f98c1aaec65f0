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

__device__ __forceinline__ bool is_word(const void* from, unsigned bytes) {
  return reinterpret_cast<unsigned long long>(from) % bytes == 0;
}

// The codes of a tile in a row. `along`: blocks lie side by side.
__device__ __forceinline__ unsigned load_codes(const unsigned char* row, const Scales& scales,
                                               unsigned first, bool along) {
  if (along && first + kTileBlocks <= scales.block_count && is_word(row + first, 4)) {
    return *reinterpret_cast<const unsigned*>(row + first);
  }
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
  const unsigned char* rows[kRows];
  bool there[kRows];
#pragma unroll
  for (int q = 0; q < kRows; ++q) {
    const unsigned row = panel * kTileRows + q * kRowsApart + r;
    there[q] = row < scales.row_count;
    rows[q] = from + (there[q] ? scales.rows.offset(row) : 0);
  }
  to += (static_cast<long long>(panel) * tiles + tile) * kTileWords + r;
  // Words of four tiles, in all rows or in none.
  if (along && is_word(from, 16) && (scales.block_count | scales.rows.stride[0]) % 16 == 0) {
    uint4 words[kRows];
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      words[q] = make_uint4(0, 0, 0, 0);
      if (there[q]) words[q] = *reinterpret_cast<const uint4*>(rows[q] + tile * kTileBlocks);
    }
    to[0 * kTileWords] = make_uint4(words[0].x, words[1].x, words[2].x, words[3].x);
    to[1 * kTileWords] = make_uint4(words[0].y, words[1].y, words[2].y, words[3].y);
    to[2 * kTileWords] = make_uint4(words[0].z, words[1].z, words[2].z, words[3].z);
    to[3 * kTileWords] = make_uint4(words[0].w, words[1].w, words[2].w, words[3].w);
    return;
  }
#pragma unroll 1
  for (unsigned at = tile; at < tile + kTiles && at < tiles; ++at) {
    unsigned words[kRows] = {};
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      if (there[q]) words[q] = load_codes(rows[q], scales, at * kTileBlocks, along);
    }
    *to = make_uint4(words[0], words[1], words[2], words[3]);
    to += kTileWords;
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
