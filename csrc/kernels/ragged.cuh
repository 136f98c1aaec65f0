// Rows that do not start on 16 bytes, as the aligned words that cover them.
//
// A word of kLength elements that starts at `column` of a row of kCols may reach over the row's
// ends; what it holds there belongs to the neighbouring rows. That a word lies in a buffer in part
// is enough to read it: memory is mapped, and allocated, by more than words.
//
// Rows r and r + 16 / gcd(16, bytes of a row) start at the same place of a word. So threads that
// take only such rows own the same columns in all of them, and what belongs to columns stays in
// their registers.
#pragma once
#include "elements.cuh"

constexpr int kCols = COLS;
constexpr int kLength = VECTOR;
constexpr bool kRagged = kCols % kLength != 0;
// Columns of the words that cover a row, wherever it starts.
[[maybe_unused]] constexpr int kSpan =
    kRagged ? (kCols + 2 * kLength - 2) / kLength * kLength : kCols;

template <int kWord, typename T>
__device__ __forceinline__ int place_in_word(const T* pointer) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(pointer) / sizeof(T) % kWord);
}

// Whether a launch's rows can move as words: the same for the whole grid.
template <typename T, typename... Pointers>
__device__ __forceinline__ bool moves_as_words(const T* one, const Pointers*... others) {
  constexpr int kWord = 16 / sizeof(T);
  const int place = kRagged ? place_in_word<kWord>(one) : 0;
  return place_in_word<kWord>(one) == place && (... && (place_in_word<kWord>(others) == place));
}

// Elements between the start of a row's first word and the row.
template <typename T>
__device__ __forceinline__ int shift_of_row(const T* rows, long long row, bool as_words) {
  return kRagged && as_words ? place_in_word<kLength>(rows + row * kCols) : 0;
}
// The same where all rows together start on a word.
__device__ __forceinline__ int shift_of_row(long long row) {
  return kRagged ? static_cast<int>(row % kLength) * (kCols % kLength) % kLength : 0;
}

// A row's whole words, and its edges: fewer than 2 * kLength elements that lie in words which it
// shares with its neighbours.
constexpr int kMostWords = kCols / kLength;
[[maybe_unused]] constexpr int kLeastWords = kRagged ? (kCols - kLength + 1) / kLength : kMostWords;
struct WholeWords {
  int before;  // elements before the first whole word
  int words;

  __device__ __forceinline__ explicit WholeWords(int shift)
      : before(kRagged && shift > 0 ? kLength - shift : 0),
        words(kRagged ? (kCols - before) / kLength : kMostWords) {}

  __device__ __forceinline__ int edges() const { return kCols - words * kLength; }
  __device__ __forceinline__ int edge_column(int edge) const {
    return edge < before ? edge : words * kLength + edge;
  }
};

__device__ __forceinline__ bool is_column(int column) {
  return static_cast<unsigned>(column) < static_cast<unsigned>(kCols);
}
__device__ __forceinline__ bool is_inside(int column) {
  return !kRagged || (column >= 0 && column + kLength <= kCols);
}
// Elements of the word that starts at `column` that are the row's.
__device__ constexpr int count_inside(int column) {
  const int begin = column > 0 ? column : 0;
  const int end = column + kLength < kCols ? column + kLength : kCols;
  return end > begin ? end - begin : 0;
}

// Zero for what is outside the row.
template <typename T>
__device__ __forceinline__ void hide_outside(Vector<T, kLength>& word, int column) {
  if (is_inside(column)) return;
#pragma unroll
  for (int w = 0; w < word.kWords; ++w) {
    if constexpr (sizeof(T) == 4) {
      if (!is_column(column + w)) word.words[w] = 0;
    } else {
      if (!is_column(column + 2 * w)) word.words[w] &= 0xffff0000u;
      if (!is_column(column + 2 * w + 1)) word.words[w] &= 0x0000ffffu;
    }
  }
}

// Element by element, from `at`, where `column` is; zero for what is outside.
template <typename T>
__device__ __forceinline__ Vector<T, kLength> load_inside(const T* at, int column) {
  Vector<T, kLength> to{};
#pragma unroll
  for (int j = 0; j < kLength; ++j) {
    if (!is_column(column + j)) continue;
    const unsigned bits = load<true, false, 1>(at + j).words[0];
    to.words[j * sizeof(T) / 4] |= sizeof(T) == 4 ? bits : bits << 16 * (j % 2);
  }
  return to;
}

// kPairs: `at` is even, so two elements of 16 bits may move as one.
template <bool kPairs, bool kStream, typename T>
__device__ __forceinline__ void store_inside(T* at, int column, const Vector<T, kLength>& from) {
#pragma unroll
  for (int w = 0; w < from.kWords; ++w) {
    if constexpr (sizeof(T) == 4) {
      if (is_column(column + w)) store_word<kStream>(at, w, from.words[w]);
    } else {
      const bool low = is_column(column + 2 * w), high = is_column(column + 2 * w + 1);
      if (kPairs && low && high) {
        store_word<kStream>(at, w, from.words[w]);
      } else {
        const unsigned bits = from.words[w];
        if (low) store_word<kStream>(at, 2 * w, static_cast<unsigned short>(bits));
        if (high) store_word<kStream>(at, 2 * w + 1, static_cast<unsigned short>(bits >> 16));
      }
    }
  }
}

// gamma or beta from `at`, where `column` is: their rows start anywhere.
template <typename T>
__device__ __forceinline__ Vector<T, kLength> load_parameter(const T* at, int column,
                                                             bool aligned) {
  if constexpr (kRagged) return load_inside(at, column);
  return aligned ? load<true, false, kLength>(at) : load<false, false, kLength>(at);
}
