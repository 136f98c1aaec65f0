// Rows that many blocks share: two launches, the sums of parts of rows, then the results.
//
// Sums: a block takes PART columns of the span of one row (ragged.cuh), EACH vectors a thread, all
// on their way at once.
//
// Results: a block owns THREADS vectors of columns, one a thread, in every row of its group: rows
// group, group + groups, ... So what belongs to columns stays in registers, and no block waits for
// another. The groups are so many that a group's ragged rows start at the same place of a word.
// Rows go from the last to the first: those that the sums read last are still in L2.
#pragma once
#include "norm_values.cuh"
#include "ragged.cuh"
#include "reduce.cuh"

constexpr int kThreads = THREADS;
constexpr int kEach = EACH;
constexpr int kPart = kThreads * kEach * kLength;
constexpr int kParts = (kSpan + kPart - 1) / kPart;
constexpr int kColumnBlocks = (kSpan + kThreads * kLength - 1) / (kThreads * kLength);
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps");

// A vector of a row at `column`, zero for what is outside.
template <bool kStream>
__device__ __forceinline__ Vector<X, kLength> load_of_row(const X* row, int column, bool as_words) {
  if (as_words) {
    auto word = load<true, kStream, kLength>(row + column);
    hide_outside(word, column);
    return word;
  }
  if constexpr (kRagged) return load_inside(row + column, column);
  return load<false, kStream, kLength>(row + column);
}

template <bool kStream>
__device__ __forceinline__ void store_of_row(X* row, int column, const Vector<X, kLength>& word,
                                             bool as_words) {
  if (as_words && is_inside(column)) {
    store<true, kStream, kLength>(row + column, word);
  } else if (as_words) {
    store_inside<true, kStream>(row + column, column, word);
  } else {
    store_inside<false, kStream>(row + column, column, word);
  }
}

// Part `id` of all rows' parts in order; vector i of it that this thread takes.
struct PartOfRow {
  long long row;
  int part;
  int shift;

  __device__ PartOfRow(long long id, const X* rows, bool as_words)
      : row(id / kParts),
        part(static_cast<int>(id % kParts)),
        shift(shift_of_row(rows, row, as_words)) {}

  __device__ __forceinline__ int column(int i) const {
    return part * kPart + (i * kThreads + static_cast<int>(threadIdx.x)) * kLength - shift;
  }
  __device__ __forceinline__ bool owns(int i) const { return column(i) < kCols; }
};

[[maybe_unused]] constexpr int kRowsAtOnce = ROWS_AT_ONCE;  // on their way
constexpr int kLanes = 8;                                   // that bring a row's sums together
[[maybe_unused]] constexpr int kBatch = kThreads / kLanes;  // rows of which that happens at once

// The columns and rows of a block of results.
struct Columns {
  long long group, groups, count;  // rows group, group + groups, ...: so many
  int column;                      // this thread's first

  __device__ Columns(const X* rows_of_x, long long rows, bool as_words)
      : group(blockIdx.x / kColumnBlocks),
        groups(gridDim.x / kColumnBlocks),
        count((rows - group + groups - 1) / groups) {
    const int block = static_cast<int>(blockIdx.x % kColumnBlocks);
    column = (block * kThreads + static_cast<int>(threadIdx.x)) * kLength -
             shift_of_row(rows_of_x, group, as_words);
  }
  __device__ __forceinline__ bool is_first_block() const { return blockIdx.x % kColumnBlocks == 0; }
  __device__ __forceinline__ bool active() const { return column < kCols; }
  __device__ __forceinline__ long long row(long long k) const { return group + k * groups; }

  // `bring_together(row, slot)`: kLanes threads' work for one row, or for none (row < 0);
  // `work(row of slot, slot, n)`: all threads' for n <= kRowsAtOnce slots.
  template <typename Together, typename Work>
  __device__ __forceinline__ void for_rows(const Together& bring_together, const Work& work) const {
    for (long long top = count; top > 0; top -= kBatch) {
      const int n = static_cast<int>(top < kBatch ? top : kBatch);
      const int slot = static_cast<int>(threadIdx.x) / kLanes;
      __syncthreads();
      bring_together(slot < n ? row(top - 1 - slot) : -1, slot);
      __syncthreads();
      if (!active()) continue;
#pragma unroll 1
      for (int j = 0; j < n; j += kRowsAtOnce) {
        work(row(top - 1 - j), j, n - j < kRowsAtOnce ? n - j : kRowsAtOnce);
      }
    }
  }
};
