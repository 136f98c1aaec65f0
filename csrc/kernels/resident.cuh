// Rows that all blocks of a launch share, each read from memory once.
//
// A block has the same PART_COLS columns, its part, of every row: copies bring the parts of STAGES
// rows into shared memory ahead of the threads. What a block finds of its part of a row, a pair of
// numbers, it tells all others through memory, and LAG rows of a group later it has theirs too and
// writes its part of the results. So the blocks must all run at the same time: the launch is
// resident.
//
// Threads: WORKERS in GROUPS, which take rows in turn, and warps with one task each: one starts the
// copies, one tells the block's pairs, COLLECTORS bring all blocks' pairs together, each for one
// row in so many.
//
// Per stage four barriers: `full`, the row is there; `summed`, the workers' pairs are; `ready`, the
// row's statistics are; `empty`, the results are written and the block's pair is told. A row comes
// when all of the row before it in its stage has been used: the copies wait for `empty`, and
// nothing is summed before `full`. A stage has rows of one group, which so meets each phase of its
// barriers.
#pragma once
#include "arrivals.cuh"
#include "resident_words.cuh"

// How many columns a lane's pairs are of, which are `whole` with those of the other lanes.
template <int kCount>
struct Counts {
  float columns[kCount];
  float shares[kCount];  // 1 / columns
  float share_of_all;

  template <typename Columns>
  __device__ __forceinline__ Counts(int pairs, int whole, const Columns& columns_of)
      : share_of_all(1.0f / static_cast<float>(whole)) {
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
      const int pair = m * 32 + static_cast<int>(threadIdx.x) % 32;
      columns[m] = pair < pairs ? static_cast<float>(columns_of(pair)) : 0.0f;
      shares[m] = columns[m] > 0.0f ? 1.0f / columns[m] : 0.0f;
    }
  }
};

// What the threads of a block share. `kRowValues`: pairs of numbers that belong to a row come with
// it from memory.
template <int kOperands, bool kRowValues = false>
class Stages {
  static constexpr int kArray = kPartWords * 16;
  static constexpr int kBarriers = 4 * kStages * kBarrierBytes;
  static constexpr int kPairBytes = 8 * (kPairs + 2);  // and the statistics, the row's values

 public:
  static constexpr int kControlBytes = (kBarriers + kStages * kPairBytes + 127) / 128 * 128;
  static constexpr int kBytes = kControlBytes + kStages * kOperands * kArray;

  // `memory`: kBytes on 128 bytes; `operands`: on 16. All threads, which meet at a barrier before
  // they go on. `pairs`: [rows, kBlocks], zeros.
  __device__ Stages(unsigned char* memory, const X* const (&operands)[kOperands],
                    unsigned long long* pairs_of_blocks, long long rows_there)
      : rows(static_cast<int>(rows_there)),  // memory holds fewer than 2^31 such rows
        block(static_cast<int>(blockIdx.x)),
        first_column(first_column_of(block)),
        columns(part_columns(block)),
        pairs(pairs_of_blocks),
        base(shared_address(memory)) {
#pragma unroll
    for (int a = 0; a < kOperands; ++a) from[a] = operands[a];
    if (threadIdx.x != 0) return;
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full(s), 1);
      barrier_init(summed(s), kRowWarps * kWarpArrivals);
      barrier_init(ready(s), 1);
      barrier_init(empty(s), (kRowWarps + 1) * kWarpArrivals);
    }
    barriers_visible();
  }

  const int rows;
  const int block;
  const int first_column;
  const int columns;

  // The part's place in a row of an array.
  __device__ __forceinline__ long long offset(const RowCursor& at) const {
    return static_cast<long long>(at.row) * COLS + first_column;
  }

  __device__ __forceinline__ OwnWords own_words(const RowCursor& at) const {
    return {at.place * kStep, columns};
  }

  // ---- the workers ------------------------------------------------------------------------------

  __device__ __forceinline__ void wait_for_row(const RowCursor& at) const {
    barrier_wait(full(at.stage), at.parity);
  }
  __device__ __forceinline__ Vector<X, kWidth> word(const RowCursor& at, int operand,
                                                    int index) const {
    Vector<X, kWidth> to;
    const Shared place = data(at.stage) + operand * kArray + index * 16;
#pragma unroll
    for (int w = 0; w < to.kWords; w += 4) load_words<4>(place + 4 * w, to.words + w);
    return to;
  }
  __device__ __forceinline__ Pair row_values(const RowCursor& at) const {
    return pair_at(values_of_row(at.stage) + 8);
  }
  // `pair`: that of the kTogether lanes.
  __device__ __forceinline__ void tell(const RowCursor& at, const Pair& pair) const {
    if (threadIdx.x % kTogether == 0) {
      put_pair(pairs_of_workers(at.stage) + threadIdx.x % kRowThreads / kTogether * 8, pair);
    }
    __syncwarp();
    warp_arrives(summed(at.stage));
  }
  __device__ __forceinline__ Pair wait_for_statistics(const RowCursor& at) const {
    barrier_wait(ready(at.stage), at.parity);
    return pair_at(values_of_row(at.stage));
  }
  __device__ __forceinline__ void release(const RowCursor& at) const {
    __syncwarp();
    warp_arrives(empty(at.stage));
  }

  // ---- the warps with one task ------------------------------------------------------------------

  // Brings the rows. `first`, `second`: of each row, with kRowValues.
  __device__ void fetch(const float* first, const float* second) const {
    RowCursor at;
    for (int k = 0; k < rows; ++k) {
      Pair values = {0.0f, 0.0f};
      if (kRowValues) values = {first == nullptr ? 0.0f : first[at.row], second[at.row]};
      if (k >= kStages) barrier_wait(empty(at.stage), at.parity ^ 1);
      if (threadIdx.x % 32 == 0) fetch_row(at, values);
      __syncwarp();  // a lane that fell behind could miss two phases of a barrier
      at.advance(rows, 1);
    }
  }

  // Tells all blocks what this one's workers have found of each row.
  template <typename Merge>
  __device__ void tell_blocks(const Merge& merge) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int kShare = (kPairs + 31) / 32;
    RowCursor at;
    const auto counts_now = [&] {
      const OwnWords own = own_words(at);
      return Counts<kShare>(kPairs, own.count, [&](int pair) { return own.columns_of_pair(pair); });
    };
    auto counts = counts_now();
    for (int k = 0; k < rows; ++k) {
      Pair of_workers[kShare];
      barrier_wait(summed(at.stage), at.parity);
#pragma unroll
      for (int m = 0; m < kShare; ++m) {
        const int other = m * 32 + lane;
        of_workers[m] = merge.nothing();
        if (other < kPairs) of_workers[m] = pair_at(pairs_of_workers(at.stage) + other * 8);
      }
      const Pair all = merge(of_workers, counts);
      if (lane == 0) tell_grid(pairs + static_cast<long long>(at.row) * kBlocks + block, told(all));
      release(at);
      const int place = at.place;
      at.advance(rows, 1);
      if (at.place != place) counts = counts_now();
    }
  }

  // Brings the blocks' pairs together, for rows `collector`, + kCollectors, ... in the order that
  // they come in; `statistics(row, pair of the whole row)` is what the workers get.
  template <typename Merge, typename Statistics>
  __device__ void collect(int collector, const Merge& merge, const Statistics& statistics) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int kShare = (kBlocks + 31) / 32;
    const Counts<kShare> counts(kBlocks, COLS, [](int other) { return part_columns(other); });
    RowCursor at;
    at.advance(rows, collector);
    for (int k = collector; k < rows; k += kCollectors) {
      barrier_wait(full(at.stage), at.parity);  // nobody reads the statistics before these any more
      const unsigned long long* of_row = pairs + static_cast<long long>(at.row) * kBlocks;
      unsigned long long words[kShare];
      bool all_told;
      do {  // all of them are looked for at once
        all_told = true;
#pragma unroll
        for (int m = 0; m < kShare; ++m) {
          const int other = m * 32 + lane;
          words[m] = other < kBlocks ? told_by_grid(of_row + other) : told(merge.nothing());
        }
#pragma unroll
        for (int m = 0; m < kShare; ++m) all_told = all_told && words[m] != 0;
      } while (!all_told);
      Pair of_blocks[kShare];
#pragma unroll
      for (int m = 0; m < kShare; ++m) of_blocks[m] = pair_told(words[m]);
      const Pair found = statistics(at.row, merge(of_blocks, counts));
      if (lane == 0) {
        put_pair(values_of_row(at.stage), found);
        barrier_arrive(ready(at.stage));
      }
      at.advance(rows, kCollectors);
    }
  }

 private:
  __device__ __forceinline__ Shared full(int s) const { return base + 4 * s * kBarrierBytes; }
  __device__ __forceinline__ Shared summed(int s) const { return full(s) + kBarrierBytes; }
  __device__ __forceinline__ Shared ready(int s) const { return full(s) + 2 * kBarrierBytes; }
  __device__ __forceinline__ Shared empty(int s) const { return full(s) + 3 * kBarrierBytes; }
  __device__ __forceinline__ Shared values_of_row(int s) const {
    return base + kBarriers + s * kPairBytes;
  }
  __device__ __forceinline__ Shared pairs_of_workers(int s) const { return values_of_row(s) + 16; }
  __device__ __forceinline__ Shared data(int s) const {
    return base + kControlBytes + s * kOperands * kArray;
  }

  static __device__ __forceinline__ Pair pair_at(Shared at) {
    unsigned words[2];
    load_words<2>(at, words);
    return {__uint_as_float(words[0]), __uint_as_float(words[1])};
  }
  static __device__ __forceinline__ void put_pair(Shared at, const Pair& pair) {
    const unsigned words[2] = {__float_as_uint(pair.first), __float_as_uint(pair.second)};
    store_words<2>(at, words);
  }

  __device__ __forceinline__ void fetch_row(const RowCursor& at, const Pair& values) const {
    const OwnWords part = own_words(at);
    const unsigned bytes = (part.shift + part.count + kWidth - 1) / kWidth * 16;
    const long long start = offset(at) - part.shift;
    if (kRowValues) put_pair(values_of_row(at.stage) + 8, values);
    barrier_arrive_expecting(full(at.stage), kOperands * bytes);
#pragma unroll
    for (int a = 0; a < kOperands; ++a) {
      bulk_load(data(at.stage) + a * kArray, from[a] + start, bytes, full(at.stage));
    }
  }

  const X* from[kOperands];
  unsigned long long* const pairs;
  const Shared base;
};
