// A row in registers: its whole words, and the few elements before the first and after the last.
//
// A row of COLS elements need not start or end on a 16-byte boundary. Its threads have its whole
// words, kThreads apart, none of which holds anything of another row. Of the elements outside them,
// fewer than two words, the row's first threads have one each.
//
// All pointers of the launch are on 16 bytes.
#pragma once
#include "softmax_hiding.cuh"
#include "softmax_reduce.cuh"

constexpr int kThreads = THREADS_PER_ROW;
constexpr int kRows = ROWS_PER_BLOCK;
constexpr int kParts = PARTS;
constexpr int kWholeWords = kCols / kLength;
constexpr int kPartWords = (kWholeWords + kParts - 1) / kParts;
constexpr int kCount = (kPartWords + kThreads - 1) / kThreads;
// Words that each block has and that every row sees: a thread's need no test.
constexpr int kSureWords = CAUSAL || MASK == 2 ? 0
                           : kParts == 1       ? kWholeWords - (kEven ? 0 : 1)
                           : kEven && kPartWords * kParts == kWholeWords ? kPartWords
                                                                         : 0;
// Odd rows share sectors, which their neighbours' blocks want from the cache.
constexpr bool kStreamedLoads = kEven || CAUSAL;
constexpr bool kStreamedStores = kStreamedLoads || MASK == 1;
static_assert(kThreads * kRows % 32 == 0, "a block is whole warps");
static_assert(kEven || (kThreads >= 2 * (kLength - 1) && kCols >= kLength), "a thread an element");

// A grid has blocks for all rows, unless their number takes more than 32 bits.
constexpr bool kOneTurn = !WIDE_ROWS;
__device__ __forceinline__ long long rows_of_a_turn() {
  return static_cast<long long>(gridDim.x / kParts) * kRows;
}
// Whether blocks of a cluster leave out a row of which they see nothing: a next row would find them
// a step ahead of the others.
constexpr bool kLeavesOut = CAUSAL && kParts > 1 && kOneTurn;

struct Pieces {
  static constexpr int kStride = kThreads * kLength;

  int first;  // column of this thread's first word
  int end;    // the block's words end at this column
  int seen;   // those that the row sees at all end at this or before
  int edge;   // column of this thread's element outside of words; kCols: none
  int parts;  // blocks of the row's cluster that have to do with it, the first ones

  __device__ __forceinline__ Pieces(const X* row, int part, int count) {
    constexpr int kSize = static_cast<int>(sizeof(X));
    const int place = static_cast<int>(reinterpret_cast<unsigned long long>(row) % 16);
    const int head = kEven ? 0 : (16 - place) % 16 / kSize;
    const int past = kEven ? kCols : head + (kCols - head) / kLength * kLength;
    first = head + (part * kPartWords + static_cast<int>(threadIdx.x)) * kLength;
    end = past;
    if (kParts > 1) {
      const int part_end = head + (part + 1) * kPartWords * kLength;
      end = part_end < past ? part_end : past;
    }
    seen = end < count ? end : count;
    parts = kParts;
    if (kLeavesOut) {
      const int others = (count - head - 1) / (kPartWords * kLength);
      parts = count <= head ? 1 : others + 1 < kParts ? others + 1 : kParts;
    }
    edge = kCols;
    if (!kEven && part == 0) {
      const int at = static_cast<int>(threadIdx.x);
      if (at < head + kCols - past) edge = at < head ? at : past + at - head;
    }
  }

  __device__ __forceinline__ int column(int i) const { return first + i * kStride; }

  // Whether this thread has an i-th word, of which the row sees any.
  __device__ __forceinline__ bool sees(int i) const {
    return (i + 1) * kThreads <= kSureWords || column(i) < seen;
  }

  template <bool kStream>
  __device__ __forceinline__ Word load_ith(const X* row, int i) const {
    return load<true, kStream, kLength>(row + first + i * kStride);
  }
  __device__ __forceinline__ void store_words(X* row, const Word (&from)[kCount]) const {
    X* own = row + first;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (sees(i)) store<true, kStreamedStores, kLength>(own + i * kStride, from[i]);
    }
  }

  // Zeros for what the row sees nothing of: there is no need to wait for what it sees.
  __device__ __forceinline__ void store_zeros(X* row, int count) const {
    X* own = row + first;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (column(i) >= seen && column(i) < end) {
        store<true, true, kLength>(own + i * kStride, filled(0));
      }
    }
    if (!kEven && edge < kCols && edge >= count) set_element<true>(row + edge, 0.0f);
  }
};

// Makes the compiler unpack words anew: it would keep the elements unpacked since the words' last
// use, twice the registers. ptxas sees through an empty asm, not through an unknown 0.
__device__ __forceinline__ void forget(Word& word, const Params& p) {
#pragma unroll
  for (int w = 0; w < word.kWords; ++w) {
    if constexpr (sizeof(X) < 4) word.words[w] += p.zero;
  }
}
