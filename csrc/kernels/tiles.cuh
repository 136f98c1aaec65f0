// Rows that stream through shared memory: copies run ahead of the threads, and back behind them.
//
// A tile is TILE_ROWS whole rows; where a cluster shares a row, CHUNK columns of one. A block owns
// tiles id, id + owners, ... and holds STAGES of them: while the threads work on one, the next ones
// are on their way, and so many bytes are in flight as the memory needs, however few registers and
// threads there are. Results take the place of an operand and leave as a copy too (kStores > 0).
//
// Per stage: barrier `full`, its copies have landed; barrier `empty`, all warps are done with it.
// Thread 0, the leader, starts the copies. What ends within a word of 16 bytes is read to the
// word's end, which is mapped; the results of such a tile, the last one, are written by the
// threads.
//
// Of ragged rows, whose COLS are no multiple of VECTOR, a tile comes as the 16-byte words that
// cover it. A block's tiles all start at the same place of a word, so its rows' whole words
// (ragged.cuh) are at the same places in all of them.
//
// Threads: as in row_part.cuh.
#pragma once
#include "arrivals.cuh"
#include "row_part.cuh"

// A stage, and the parity of the phase that its barriers are in when it is met.
struct Cursor {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <typename T, int kLoads, int kStores>
class TileRing {
 public:
  static constexpr int kArray = (kTileLength * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
  static constexpr int kStage = kLoads * kArray;
  static constexpr int kBarriers = 2 * kStages * kBarrierBytes;
  // Two tiles are worked on at a time: of three, one would be on its way for half a step only.
  static constexpr bool kAtOnce = (kStages == 2 || kStages == 3) && kStores == 0;
  static constexpr bool kMayBeCut = kStores > 0 && kCols * sizeof(T) % 16 != 0;

  // `barriers`: kBarriers bytes. from[] and the first kStores of to[] start on words.
  __device__ TileRing(Shared stages, Shared barriers, const T* const (&from)[kLoads],
                      T* const (&to)[kLoads], long long rows, unsigned rank)
      : stages_(stages), full_(barriers), empty_(barriers + kStages * kBarrierBytes) {
    const int first_column = static_cast<int>(rank) * kChunk;
    const int left = kMostWords * kLength - first_column;
    columns_ = left < kChunk ? left : kChunk;
    const long long tiles = (rows + kTileRows - 1) / kTileRows;
    const long long id = blockIdx.x / kCluster;
    const long long owners = gridDim.x / kCluster;
    count_ = static_cast<int>((tiles - id + owners - 1) / owners);
    first_row_ = id * kTileRows;
    tile_stride_ = owners * kTileRows;
    first_column_ = first_column;
    shift_ = shift_of_row(first_row_);
    const long long last = rows - first_row_ - (count_ - 1) * tile_stride_;
    last_rows_ = last < kTileRows ? static_cast<int>(last) : kTileRows;
    for (int a = 0; a < kLoads; ++a) {
      from_[a] = from[a];
      to_[a] = to[a];
    }
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int s = 0; s < kStages; ++s) {
        barrier_init(full_ + s * kBarrierBytes, 1);
        barrier_init(empty_ + s * kBarrierBytes, kWarps * kWarpArrivals);
      }
    }
  }

  // After the barriers are visible to all threads.
  __device__ void start() {
    if (threadIdx.x != 0) return;
#pragma unroll 1
    for (int k = 0; k < kStages; ++k) load_tile(k, k);
  }

  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ int last_rows() const { return last_rows_; }
  __device__ __forceinline__ long long first_row() const { return first_row_; }
  __device__ __forceinline__ long long rows_to_next_tile() const { return tile_stride_; }

  // Bytes from where a tile is to the first column of the block's chunk of row r of it; of a ragged
  // row to its first whole word.
  __device__ __forceinline__ int place_of(int r) const {
    constexpr int kSize = sizeof(T);
    if constexpr (!kRagged) return r * kChunk * kSize;
    if constexpr (kCluster > 1) return kLength * kSize;
    return (shift_ + r * kCols + kLength - 1) / kLength * kLength * kSize;
  }

  // Waits until tile k is in shared memory. All threads, tiles in order. Returns where it is.
  __device__ __forceinline__ Shared acquire(int k) {
    const Shared tile = at(in_.stage);
    barrier_wait(full_ + in_.stage * kBarrierBytes, in_.parity);
    in_.advance();
    return tile;
  }

  // The calling warp is done with tile k, its results are in arrays [0, kStores) of it.
  __device__ __forceinline__ void release(int k) {
    if constexpr (kStores > 0) {
      if (is_cut(k)) {
        put(k, at(out_.stage));
      } else {
        publish_to_copies();
      }
    }
    __syncwarp();
    warp_arrives(empty_ + out_.stage * kBarrierBytes);
    out_.advance();
    if (threadIdx.x != 0) return;
    if constexpr (kAtOnce) {
      serve(k);
    } else if (k > 0) {  // one tile late: by now the slowest warp is done with it as well
      serve(k - 1);
    }
  }

  // After the last release, all threads: the stages are free for other uses.
  __device__ __forceinline__ void finish() {
    if constexpr (kStores > 0) {
      if (threadIdx.x == 0) {
        serve(count_ - 1);
        bulk_wait_read<0>();
      }
    }
    __syncthreads();
  }

 private:
  __device__ __forceinline__ Shared at(int stage) const { return stages_ + stage * kStage; }
  __device__ __forceinline__ long long offset_of(int k) const {
    return (first_row_ + k * tile_stride_) * kCols + first_column_;
  }
  __device__ __forceinline__ int rows_of(int k) const {
    return k == count_ - 1 ? last_rows_ : kTileRows;
  }
  __device__ __forceinline__ int elements(int k) const { return rows_of(k) * columns_; }
  // Whether its results end within a word.
  __device__ __forceinline__ bool is_cut(int k) const {
    return kMayBeCut && elements(k) * sizeof(T) % 16 != 0;
  }

  __device__ __forceinline__ void load_tile(int k, int stage) {
    if (k >= count_) return;
    const Shared full = full_ + stage * kBarrierBytes;
    const long long offset = offset_of(k);
    if constexpr (kRagged) {
      load_ragged(full, offset - first_column_, rows_of(k), at(stage));
    } else {
      const unsigned bytes = (elements(k) * sizeof(T) + 15) / 16 * 16;
      barrier_arrive_expecting(full, kLoads * bytes);
#pragma unroll
      for (int a = 0; a < kLoads; ++a) {
        bulk_load(at(stage) + a * kArray, from_[a] + offset, bytes, full);
      }
    }
  }

  // `offset`: of the tile's first row.
  __device__ __forceinline__ void load_ragged(Shared full, long long offset, int rows,
                                              Shared stage) {
    constexpr int kSize = sizeof(T);
    if constexpr (kCluster == 1) {
      const int bytes = (shift_ + rows * kCols + kLength - 1) / kLength * kLength * kSize;
      barrier_arrive_expecting(full, kLoads * bytes);
#pragma unroll
      for (int a = 0; a < kLoads; ++a) {
        bulk_load(stage + a * kArray, from_[a] + offset - shift_, bytes, full);
      }
    } else {
      load_chunk(full, offset, stage);
    }
  }

  // The whole words of the block's chunk; the first block has the words of the edges too. That of
  // the last ones is not beside its chunk in memory, but is in the tile.
  __device__ __forceinline__ void load_chunk(Shared full, long long offset, Shared stage) {
    constexpr int kSize = sizeof(T);
    const WholeWords whole(shift_);
    const int end = whole.words * kLength, left = end - first_column_;
    const int columns = left < 0 ? 0 : left < kChunk ? left : kChunk;
    const int ahead = first_column_ == 0 && whole.before > 0 ? kLength : 0;
    const int behind = first_column_ == 0 && whole.edges() > whole.before ? kLength : 0;
    barrier_arrive_expecting(full, kLoads * (ahead + columns + behind) * kSize);
    const long long words = offset + whole.before;
#pragma unroll
    for (int a = 0; a < kLoads; ++a) {
      const Shared to = stage + a * kArray + kLength * kSize;
      if (ahead + columns > 0) {
        bulk_load(to - ahead * kSize, from_[a] + words + first_column_ - ahead,
                  (ahead + columns) * kSize, full);
      }
      if (behind > 0) {
        bulk_load(to + columns * kSize, from_[a] + words + end, behind * kSize, full);
      }
    }
  }

  // The leader's part once all warps are done with tile k: its results leave, and a tile takes the
  // place of k, or, while the results of k are on their way out, of k - 1.
  __device__ __forceinline__ void serve(int k) {
    barrier_wait(empty_ + done_.stage * kBarrierBytes, done_.parity);
    if constexpr (kStores == 0) {
      load_tile(k + kStages, done_.stage);
    } else {
      if (!is_cut(k)) {
        const unsigned bytes = elements(k) * sizeof(T);
        const long long offset = offset_of(k);
#pragma unroll
        for (int a = 0; a < kStores; ++a) {
          bulk_store(to_[a] + offset, at(done_.stage) + a * kArray, bytes);
        }
        bulk_commit();
      }
      if (k > 0) {
        bulk_wait_read<1>();
        load_tile(k - 1 + kStages, done_.stage == 0 ? kStages - 1 : done_.stage - 1);
      }
    }
    done_.advance();
  }

  // Results that end within a word, element by element.
  __device__ void put(int k, Shared tile) {
    __syncthreads();
    const long long offset = offset_of(k);
#pragma unroll 1
    for (int i = threadIdx.x; i < elements(k); i += kThreads) {
      const Shared at = tile + i * static_cast<int>(sizeof(T));
#pragma unroll
      for (int a = 0; a < kStores; ++a) {
        store<false, false, 1>(to_[a] + offset + i, load_shared<1, T>(at + a * kArray));
      }
    }
  }

  Shared stages_, full_, empty_;
  const T* from_[kLoads];
  T* to_[kLoads];
  long long first_row_, tile_stride_;
  int count_, columns_, first_column_, last_rows_;
  int shift_;  // elements of a ragged tile's first word before it
  Cursor in_, out_, done_;
};
