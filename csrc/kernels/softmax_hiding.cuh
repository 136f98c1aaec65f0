// Hiding: what of a word a row does not see is filled with other bits.
#pragma once
#include "softmax_row.cuh"

// The bits of an infinity in every element of a 32-bit register.
__device__ constexpr unsigned infinity_bits(bool negative, float) {
  return negative ? 0xff800000u : 0x7f800000u;
}
__device__ constexpr unsigned infinity_bits(bool negative, BFloat16) {
  return negative ? 0xff80ff80u : 0x7f807f80u;
}
__device__ constexpr unsigned infinity_bits(bool negative, Float16) {
  return negative ? 0xfc00fc00u : 0x7c007c00u;
}

// The bits of the first `count` elements of a word, as far as they are in its register w.
__device__ __forceinline__ unsigned first_bits(int count, int w) {
  const int bits = count * 8 * static_cast<int>(sizeof(X)) - 32 * w;
  return bits <= 0 ? 0 : bits >= 32 ? 0xffffffffu : (1u << bits) - 1;
}

// Fills the elements from column `end` on.
template <unsigned kFill>
__device__ __forceinline__ void hide_from(Word& word, int column, int end) {
  if (column + kLength <= end) return;
#pragma unroll
  for (int w = 0; w < word.kWords; ++w) {
    const unsigned kept = first_bits(end - column, w);
    word.words[w] = (word.words[w] & kept) | (kFill & ~kept);
  }
}

// Fills the elements before column 0 too.
template <unsigned kFill>
__device__ __forceinline__ void hide_outside(Word& word, int column, int end) {
  hide_from<kFill>(word, column, end);
  if (kEven || column >= 0) return;
#pragma unroll
  for (int w = 0; w < word.kWords; ++w) {
    const unsigned before = first_bits(-column, w);
    word.words[w] = (word.words[w] & ~before) | (kFill & before);
  }
}

// The mask's bytes of a word's columns.
struct MaskBytes {
  unsigned words[kLength / 4];
};

__device__ __forceinline__ MaskBytes mask_word(const unsigned char* own) {
  MaskBytes to;
  if constexpr (kLength == 8) {
    const uint2 both = *reinterpret_cast<const uint2*>(own);
    to.words[0] = both.x;
    to.words[1] = both.y;
  } else {
    to.words[0] = *reinterpret_cast<const unsigned*>(own);
  }
  return to;
}

// From `own` + `ahead` on, which is a multiple of 4, of a word that is the row's as a whole.
__device__ __forceinline__ MaskBytes mask_bytes_of_whole(const unsigned char* hidden,
                                                         const unsigned char* own, int ahead) {
  if (kEven && reinterpret_cast<unsigned long long>(hidden) % kLength == 0) {
    return mask_word(own + ahead);
  }
  constexpr int kWords = kLength / 4;
  const int past = static_cast<int>(reinterpret_cast<unsigned long long>(own) % 4);
  const unsigned* from = reinterpret_cast<const unsigned*>(own - past + ahead);
  unsigned parts[kWords + 1];
#pragma unroll
  for (int i = 0; i < kWords; ++i) parts[i] = from[i];
  parts[kWords] = from[past == 0 ? kWords - 1 : kWords];  // of which no more may be mapped
  MaskBytes to;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    to.words[i] = __funnelshift_r(parts[i], parts[i + 1], 8 * past);
  }
  return to;
}

// From `own` on, in the row `hidden`. Those outside the row are any bytes of it.
__device__ __forceinline__ MaskBytes mask_bytes(const unsigned char* hidden,
                                                const unsigned char* own) {
  using Address = unsigned long long;
  MaskBytes to;
  const Address row = reinterpret_cast<Address>(hidden);
  if (kEven && row % kLength == 0) return mask_word(own);
  const Address first = row / 4 * 4, last = (row + kCols - 1) / 4 * 4;
  const Address at = reinterpret_cast<Address>(own);
  unsigned parts[kLength / 4 + 1];
#pragma unroll
  for (int i = 0; i <= kLength / 4; ++i) {
    const Address word = at / 4 * 4 + 4 * i;
    parts[i] = *reinterpret_cast<const unsigned*>(word < first ? first : word > last ? last : word);
  }
#pragma unroll
  for (int i = 0; i < kLength / 4; ++i) {
    const Address both = static_cast<Address>(parts[i + 1]) << 32 | parts[i];
    to.words[i] = static_cast<unsigned>(both >> at % 4 * 8);
  }
  return to;
}

template <unsigned kFill>
__device__ __forceinline__ void hide_masked(Word& word, const MaskBytes& mask) {
#pragma unroll
  for (int w = 0; w < word.kWords; ++w) {
    const unsigned hidden = mask.words[sizeof(X) == 4 ? 0 : w / 2];
    const unsigned bytes = (hidden << 8) - hidden;  // 0 or 255, of 0 or 1
    const unsigned bits = picked_bytes(bytes, sizeof(X) == 4 ? 0x1111u * w
                                              : w % 2 == 0   ? 0x1100u
                                                             : 0x3322u);
    word.words[w] = (word.words[w] & ~bits) | (kFill & bits);
  }
}
