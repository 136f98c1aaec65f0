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
[[maybe_unused]] constexpr int kWords =
    kEven ? kCols / kLength : (kCols + 2 * kLength - 2) / kLength;
using Word = Vector<X, kLength>;

// Divides a row's number below 2^31: n / value = n · factor / 2^(31 + shift), rounded down, which
// is a tenth of the instructions of a division. Numbers of 64 bits are divided by `value`.
struct Divisor {
  long long value;
  unsigned factor;
  unsigned shift;
};

// The scalars of a launch (shardops/kernels/softmax_plan.py). A mask has as many rows as the dims
// that it has give it: its row is that of the digits (row / mask_below[i]) % mask_size[i].
struct Params {
  long long rows;
  Divisor queries;     // CAUSAL: rows a batch entry
  long long diagonal;  // CAUSAL: query i sees keys up to i + *first + diagonal
  Divisor mask_below[3];
  Divisor mask_size[3];
  float scale;    // forward: 2 log2(e) |scale|
  unsigned zero;  // 0, which the compiler does not know
};

#if WIDE_ROWS
using RowIndex = unsigned long long;
#else
using RowIndex = unsigned;
#endif

__device__ __forceinline__ RowIndex quotient(RowIndex n, const Divisor& by) {
#if WIDE_ROWS
  return n / static_cast<RowIndex>(by.value);
#else
  return static_cast<RowIndex>(static_cast<unsigned long long>(n) * by.factor >> (31 + by.shift));
#endif
}

__device__ __forceinline__ RowIndex remainder(RowIndex n, const Divisor& by) {
  return n - quotient(n, by) * static_cast<RowIndex>(by.value);
}

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
  [[maybe_unused]] const RowIndex index = static_cast<RowIndex>(row);
#if CAUSAL
  keys.count = causal_count(remainder(index, p.queries), first, p);
#endif
#if MASK
  long long mask_row = 0;
#pragma unroll
  for (int i = 0; i < MASK_DIGITS; ++i) {
    const RowIndex digit = remainder(quotient(index, p.mask_below[i]), p.mask_size[i]);
    mask_row = mask_row * p.mask_size[i].value + digit;
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

__device__ __forceinline__ Word filled(unsigned bits) {
  Word to;
#pragma unroll
  for (int w = 0; w < to.kWords; ++w) to.words[w] = bits;
  return to;
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
