// Rows of softmax: which keys of a row are seen, and a row's elements as aligned 16-byte words.
//
// A row of COLS elements need not start on a 16-byte boundary. It is read as the aligned words that
// cover it; what the first and the last of them hold of the neighbouring rows is hidden. `shift` is
// how many elements of the first word lie before the row, so word w holds the columns from
// w · kLength - shift on. That a word lies in the buffer in part is enough: memory is mapped, and
// allocated, by more than words.
//
// Where the pointers of a launch differ in alignment, rows of one cannot share words with those of
// another: then each element moves by itself and shift is 0. A branch, the same for all, decides.
#pragma once
#include "elements.cuh"
#include "softmax_ptx.cuh"

using X = ElementOf<X_TYPE>::Type;
constexpr int kCols = COLS;
constexpr int kLength = 16 / sizeof(X);
constexpr bool kEven = kCols % kLength == 0;  // a row has as many words as it fills
constexpr int kWords = kEven ? kCols / kLength : (kCols + 2 * kLength - 2) / kLength;
using Word = Vector<X, kLength>;

// The scalars of a launch (shardops/kernels/softmax_plan.py). A mask has as many rows as the dims
// that it has give it: its row is that of the digits (row / mask_below[i]) % mask_size[i].
struct Params {
  long long rows;
  long long queries;   // CAUSAL: rows a batch entry
  long long diagonal;  // CAUSAL: query i sees keys up to i + *first + diagonal
  long long mask_below[3];
  long long mask_size[3];
  float scale;    // forward: 2 log2(e) |scale|
  unsigned zero;  // 0, which the compiler does not know
};

#if WIDE_ROWS
using RowIndex = unsigned long long;
#else
using RowIndex = unsigned;  // its division takes a quarter of the time
#endif

// What a row sees: keys before `count` that its row of the mask, if any, does not hide.
struct Keys {
  int count;
  const unsigned char* hidden;
};

__device__ __forceinline__ int causal_count(RowIndex query, const int* first, const Params& p) {
  const long long count =
      static_cast<long long>(query) + (first == nullptr ? 0 : *first) + p.diagonal + 1;
  return static_cast<int>(count < 0 ? 0 : count > kCols ? kCols : count);
}

__device__ __forceinline__ Keys keys_of(long long row, const unsigned char* mask, const int* first,
                                        const Params& p) {
  Keys keys = {kCols, nullptr};
  const RowIndex index = static_cast<RowIndex>(row);
#if CAUSAL
  keys.count = causal_count(index % static_cast<RowIndex>(p.queries), first, p);
#endif
#if MASK
  long long mask_row = 0;
#pragma unroll
  for (int i = 0; i < MASK_DIGITS; ++i) {
    RowIndex digit = index;
    const RowIndex below = static_cast<RowIndex>(p.mask_below[i]);
    const RowIndex size = static_cast<RowIndex>(p.mask_size[i]);
    if (below > 1) digit /= below;
    if (digit >= size) digit %= size;
    mask_row = mask_row * p.mask_size[i] + digit;
  }
#if MASK == 1  // a byte a key
  keys.hidden = mask + mask_row * kCols;
#else  // a byte a row
  if (mask[mask_row]) keys.count = 0;
#endif
#endif
  return keys;
}

__device__ __forceinline__ bool is_seen(const Keys& keys, int column) {
  return column >= 0 && column < keys.count && !(MASK == 1 && keys.hidden[column]);
}

// ---- words -------------------------------------------------------------------------------------

// Whether rows that start at the same element of each pointer start at the same place in a word.
template <typename... Pointers>
__device__ __forceinline__ bool share_words(const X* one, const Pointers*... others) {
  const auto place = [](const X* p) { return reinterpret_cast<unsigned long long>(p) % 16; };
  return (!kEven || place(one) == 0) && (... && (place(others) == place(one)));
}

__device__ __forceinline__ int shift_of(const X* row, bool whole) {
  if (kEven || !whole) return 0;
  return static_cast<int>(reinterpret_cast<unsigned long long>(row) % 16 / sizeof(X));
}

__device__ __forceinline__ bool is_inside(int column) { return column >= 0 && column < kCols; }

template <bool kStream>
__device__ __forceinline__ Word load_elements(const X* row, int column) {
  Word to{};
#pragma unroll
  for (int j = 0; j < kLength; ++j) {
    if (!is_inside(column + j)) continue;
    const unsigned bits = load<true, kStream, 1>(row + column + j).words[0];
    to.words[j * sizeof(X) / 4] |= sizeof(X) == 4 ? bits : bits << 16 * (j % 2);
  }
  return to;
}

__device__ __forceinline__ void store_elements(X* row, int column, const Word& from, bool whole) {
#pragma unroll
  for (int w = 0; w < from.kWords; ++w) {
    if constexpr (sizeof(X) == 4) {
      if (is_inside(column + w)) store_word<true>(row + column + w, 0, from.words[w]);
    } else {
      X* to = row + column + 2 * w;
      const bool low = is_inside(column + 2 * w), high = is_inside(column + 2 * w + 1);
      if (whole && low && high) {
        store_word<true>(to, 0, from.words[w]);
      } else {
        if (low) store_word<true>(to, 0, static_cast<unsigned short>(from.words[w]));
        if (high) store_word<true>(to, 1, static_cast<unsigned short>(from.words[w] >> 16));
      }
    }
  }
}

template <bool kStream>
__device__ __forceinline__ Word load_columns(const X* row, int column, bool whole) {
  return whole ? load<true, kStream, kLength>(row + column) : load_elements<kStream>(row, column);
}

__device__ __forceinline__ void store_columns(X* row, int column, const Word& from, bool whole) {
  if (whole && (kEven || (column >= 0 && column + kLength <= kCols))) {
    store<true, true, kLength>(row + column, from);
  } else {
    store_elements(row, column, from, whole);
  }
}

// Makes the compiler unpack a word anew: it would keep the elements unpacked since the word's last
// use, twice the registers. ptxas sees through an empty asm, not through an unknown 0.
__device__ __forceinline__ void forget(Word& word, const Params& p) {
#pragma unroll
  for (int w = 0; w < word.kWords; ++w) {
    if constexpr (sizeof(X) < 4) word.words[w] += p.zero;
  }
}

// ---- hiding ------------------------------------------------------------------------------------

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

__device__ __forceinline__ Word filled(unsigned bits) {
  Word to;
#pragma unroll
  for (int w = 0; w < to.kWords; ++w) to.words[w] = bits;
  return to;
}

// The bits of the first `count` elements of a word, as far as they are in its register w.
__device__ __forceinline__ unsigned first_bits(int count, int w) {
  const int bits = count * 8 * static_cast<int>(sizeof(X)) - 32 * w;
  return bits <= 0 ? 0 : bits >= 32 ? 0xffffffffu : (1u << bits) - 1;
}

// Fills the elements before column 0 and from column `end` on.
template <unsigned kFill>
__device__ __forceinline__ void hide_outside(Word& word, int column, int end) {
  if ((kEven || column >= 0) && column + kLength <= end) return;
#pragma unroll
  for (int w = 0; w < word.kWords; ++w) {
    unsigned kept = first_bits(end - column, w);
    if (!kEven) kept &= ~first_bits(-column, w);
    word.words[w] = (word.words[w] & kept) | (kFill & ~kept);
  }
}

// The mask's bytes of a word's columns. Those outside the row are any bytes of it.
struct MaskBytes {
  unsigned words[kLength / 4];
};

__device__ __forceinline__ MaskBytes mask_bytes(const unsigned char* hidden, int column) {
  using Address = unsigned long long;
  MaskBytes to;
  const Address row = reinterpret_cast<Address>(hidden);
  if (kEven && row % kLength == 0) {
    if constexpr (kLength == 8) {
      const uint2 both = *reinterpret_cast<const uint2*>(hidden + column);
      to.words[0] = both.x;
      to.words[1] = both.y;
    } else {
      to.words[0] = *reinterpret_cast<const unsigned*>(hidden + column);
    }
    return to;
  }
  const Address first = row / 4 * 4, last = (row + kCols - 1) / 4 * 4;
  const Address at = row + column;
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
    unsigned bits;
    if constexpr (sizeof(X) == 4) {
      bits = (mask.words[0] >> 8 * w & 1) * 0xffffffffu;
    } else {
      const unsigned two = mask.words[w / 2] >> 16 * (w % 2);
      bits = ((two & 1) | (two & 0x100) << 8) * 0xffffu;
    }
    word.words[w] = (word.words[w] & ~bits) | (kFill & bits);
  }
}
