// Rows that all blocks of a launch share (resident.cuh): in which order the rows come, and which
// columns of them a block and its workers have.
//
// Rows that start at the same place of a word of 16 bytes come one after another, so that a
// worker's columns change as seldom as can be. A part starts where its first column lies, which
// need not be on a word: then words are copied that lie in it in part. That a word lies in a buffer
// in part is enough: memory is mapped, and allocated, by more than words.
#pragma once
#include "async.cuh"
#include "elements.cuh"
#include "lanes.cuh"

using X = ElementOf<X_TYPE>::Type;

constexpr int kWidth = 16 / static_cast<int>(sizeof(X));  // elements of a word
constexpr int kUnit = 2 * kWidth;                         // of a sector of memory
constexpr int kPartCols = PART_COLS;                      // of the largest part
constexpr int kLargest = LARGEST;                         // so many; others have a unit less
constexpr int kBlocks = BLOCKS;
constexpr int kPeriod = PERIOD;  // after so many rows one starts at the same place of a word
constexpr int kStep = kWidth / kPeriod;  // elements that one place is further than another
constexpr int kStages = STAGES;
constexpr int kLag = LAG;
constexpr int kWorkers = WORKERS;
constexpr int kWarps = kWorkers / 32;
constexpr int kGroups = GROUPS;
constexpr int kRowThreads = kWorkers / kGroups;
constexpr int kRowWarps = kWarps / kGroups;
constexpr int kTogether = 4;  // lanes that have one pair
constexpr int kPairs = kRowThreads / kTogether;
constexpr int kCollectors = COLLECTORS;
constexpr int kThreads = kWorkers + 32 * (2 + kCollectors);
constexpr int kPartWords = kPartCols / kWidth + (kPeriod > 1 ? 1 : 0);
constexpr int kEach = (kPartWords + kRowThreads - 1) / kRowThreads;  // words of a worker
static_assert(kPartCols % kWidth == 0, "parts of an even row are whole words");
static_assert(kWarps % kGroups == 0, "a group is whole warps");
static_assert(kStages % kGroups == 0, "a stage has rows of one group");
static_assert(kCollectors <= kStages, "a collector is no phase of a stage behind");
static_assert(kLag > 0 && kGroups * kLag < kStages, "there is a stage for the next row");

struct Pair {
  float first, second;
};

// A pair as 8 bytes that are not all 0, which is what there is before it is told: the second number
// has its bits inverted, and is another NaN where it is the one that this would make 0.
__device__ __forceinline__ unsigned long long told(const Pair& pair) {
  const unsigned second = pair.second == pair.second ? __float_as_uint(pair.second) : 0x7fc00000u;
  return static_cast<unsigned long long>(~second) << 32 | __float_as_uint(pair.first);
}
__device__ __forceinline__ Pair pair_told(unsigned long long word) {
  return {__uint_as_float(static_cast<unsigned>(word)),
          __uint_as_float(~static_cast<unsigned>(word >> 32))};
}

__device__ constexpr int first_column_of(int block) {
  return block * kPartCols - (block > kLargest ? block - kLargest : 0) * kUnit;
}
__device__ constexpr int part_columns(int block) {
  return block == kBlocks - 1 ? COLS - first_column_of(block)
                              : kPartCols - (block >= kLargest ? kUnit : 0);
}
constexpr int kLeastCols = part_columns(kBlocks - 1);

// Columns of a part of `count` that its words from `first` to before `last` hold; `shift` is how
// many elements of word 0 lie before the part.
__device__ __forceinline__ int columns_of_words(int first, int last, int shift, int count) {
  const auto column = [&](int word) {
    const int at = word * kWidth - shift;
    return at < 0 ? 0 : at > count ? count : at;
  };
  return column(last) - column(first);
}

// A row on its way through the stages: `parity` is that of its stage's barriers. The rows of a
// place come one after another, those of place p, which start p · kStep elements after a word does,
// before those of p + 1.
struct RowCursor {
  int row = 0, place = 0, stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance(int rows, int count) {
    for (int i = 0; i < count; ++i) {
      row += kPeriod;
      while (kPeriod > 1 && row >= rows && place + 1 < kPeriod) row = first_row(++place);
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }

 private:
  // A row is COLS / kStep places further than the one before, so 1 place is `inverse()` rows.
  static __device__ constexpr int inverse() {
    int found = 1;
    while (COLS / kStep % kPeriod * found % kPeriod != 1 % kPeriod) ++found;
    return found;
  }
  static __device__ __forceinline__ int first_row(int of_place) {
    constexpr int kInverse = inverse();
    return of_place * kInverse % kPeriod;
  }
};

// Shared memory where workers, kWidth columns apart, have no bank conflicts: a plane for each place
// in a word.
constexpr int kPlane = kPartCols / kWidth;
__device__ __forceinline__ int plane_of(int column) {
  return column % kWidth * kPlane + column / kWidth;
}

// A worker's words of a part: kRowThreads apart.
struct OwnWords {
  int shift, count;

  __device__ __forceinline__ int word(int i) const {
    return i * kRowThreads + static_cast<int>(threadIdx.x) % kRowThreads;
  }
  __device__ __forceinline__ int column(int i) const { return word(i) * kWidth - shift; }
  // Whether all workers have a word i, which ends inside the part.
  static __device__ constexpr bool is_sure(int i) {
    return (i + 1) * kRowThreads * kWidth <= kLeastCols;
  }
  __device__ __forceinline__ bool owns(int i) const { return is_sure(i) || column(i) < count; }
  __device__ __forceinline__ bool is_whole(int i) const {
    if (kPeriod == 1) return true;
    return (i > 0 || column(i) >= 0) && (is_sure(i) || column(i) + kWidth <= count);
  }
  __device__ __forceinline__ bool is_column(int column) const {
    return static_cast<unsigned>(column) < static_cast<unsigned>(count);
  }
  // Columns of the lanes that have pair `pair` together.
  __device__ __forceinline__ int columns_of_pair(int pair) const {
    int columns = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int first = i * kRowThreads + pair * kTogether;
      columns += columns_of_words(first, first + kTogether, shift, count);
    }
    return columns;
  }

  // Zero for what is outside the part.
  template <typename T>
  __device__ __forceinline__ void hide(Vector<T, kWidth>& word, int i) const {
    if (is_whole(i)) return;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (is_column(column(i) + j)) continue;
      if constexpr (sizeof(T) == 4) {
        word.words[j] = 0;
      } else {
        word.words[j / 2] &= j % 2 ? 0x0000ffffu : 0xffff0000u;
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ void store_word(T* part, int i, const Vector<T, kWidth>& from) const {
    T* const own = part + column(0) + i * (kRowThreads * kWidth);
    if (is_whole(i)) {
      store<true, true, kWidth>(own, from);
      return;
    }
    auto left = from;  // the element that is stored comes first: no other has an index
#pragma unroll 1
    for (int j = 0; j < kWidth; ++j) {
      if (is_column(column(i) + j)) {
        if constexpr (sizeof(T) == 4) {
          ::store_word<true>(own, j, left.words[0]);
        } else {
          ::store_word<true>(own, j, static_cast<unsigned short>(left.words[0]));
        }
      }
#pragma unroll
      for (int w = 0; w < left.kWords; ++w) {
        const unsigned next = w + 1 < left.kWords ? left.words[(w + 1) % left.kWords] : 0;
        left.words[w] = sizeof(T) == 4 ? next : __funnelshift_r(left.words[w], next, 16);
      }
    }
  }
};

// gamma or beta of a part. Where a worker's columns change from row to row they are read from
// shared memory, else from where they are.
template <typename T>
struct Parameter {
  static constexpr int kSize = static_cast<int>(sizeof(T));
  static constexpr int kBytes = kPeriod > 1 ? ((kPartCols + kWidth) * kSize + 15) / 16 * 16 : 0;
  const T* part;
  Shared planes;

  // `from`: at the part's first column. All threads, which meet at a barrier before others than
  // this one read; `memory`: kBytes of the block.
  __device__ Parameter(const T* __restrict__ from, unsigned char* memory, int count)
      : part(from), planes(shared_address(memory)) {
    if constexpr (kPeriod == 1) return;
    for (int c = static_cast<int>(threadIdx.x); c < count; c += kThreads) {
      const auto one = load<true, false, 1>(from + c);
      store_words<kSize / 4>(planes + plane_of(c) * kSize, one.words);
    }
  }
  // Word i of a worker.
  __device__ __forceinline__ Vector<T, kWidth> word(const OwnWords& own, int i) const {
    if constexpr (kPeriod == 1) {
      return load<true, false, kWidth>(part + own.column(i));
    }
    Vector<T, kWidth> to{};
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int place = j - own.shift;  // below 0: in the word before
      const int plane = (place & (kWidth - 1)) * kPlane - (place < 0 ? 1 : 0);
      unsigned bits;
      load_words<kSize / 4>(planes + (plane + own.word(i)) * kSize, &bits);
      to.words[j * kSize / 4] |= kSize == 4 ? bits : bits << 16 * (j % 2);
    }
    own.hide(to, i);
    return to;
  }
};
