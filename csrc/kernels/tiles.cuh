// Rows that stream through shared memory: copies run ahead of the threads, and back behind them.
//
// A tile is TILE_ROWS whole rows; where a cluster shares a row, CHUNK columns of one. A block owns
// tiles id, id + owners, ... and holds STAGES of them: while the threads work on one, the next ones
// are on their way, and so many bytes are in flight as the memory needs, however few registers and
// threads there are. Results take the place of an operand and leave as a copy too (kStores > 0).
//
// Per stage: barrier `full`, its copies have landed; barrier `empty`, all warps are done with it.
// Thread 0, the leader, starts the copies. Tiles that copies cannot move, since a pointer or a size
// is no multiple of 16 bytes, are moved by the threads.
//
// Threads: a row belongs to THREADS_PER_ROW of them, a group; THREADS / THREADS_PER_ROW rows of a
// tile are worked on at once. Up to 32: a part of a warp. More ("wide"): whole warps, and with
// CLUSTER > 1 all blocks of a cluster.
#pragma once
#include "async.cuh"
#include "elements.cuh"
#include "reduce.cuh"

constexpr int kCols = COLS;
constexpr int kLength = VECTOR;
constexpr int kThreads = THREADS;
constexpr int kGroup = THREADS_PER_ROW;
constexpr int kCluster = CLUSTER;
constexpr int kChunk = CHUNK;  // columns of a row that one block owns; the last may own fewer
constexpr int kStages = STAGES;
constexpr bool kWide = kGroup > 32;
constexpr int kRowsAtOnce = kThreads / kGroup;
constexpr int kTileRows = TILE_ROWS;
constexpr int kWarps = kThreads / 32;
constexpr int kVectors = kChunk / kLength;
constexpr int kCount = (kVectors + kGroup - 1) / kGroup;  // vectors a thread owns of a row
static_assert(kChunk % kLength == 0 && kCols % kLength == 0, "a row is whole vectors");
static_assert(kThreads % 32 == 0 && kTileRows % kRowsAtOnce == 0, "whole warps, whole turns");
static_assert(kWide ? kGroup % 32 == 0 : kTileRows == kRowsAtOnce, "whole warps, or one turn");
static_assert(kCluster == 1 ? kChunk == kCols : kWide && kTileRows == 1, "a cluster has one row");
constexpr int kTurns = kTileRows / kRowsAtOnce;

// The part of a row that this thread owns: vectors lane, lane + kGroup, ... of its block's chunk.
struct Part {
  int lane;
  int columns;  // of the chunk

  __device__ __forceinline__ int column(int i) const { return (i * kGroup + lane) * kLength; }
  __device__ __forceinline__ bool owns(int i) const {
    if constexpr (kCluster == 1 && kCount * kGroup == kVectors) return true;
    return column(i) < columns;
  }
};

template <int kLen, typename T>
__device__ __forceinline__ Vector<T, kLen> load_shared(Shared from) {
  Vector<T, kLen> to;
  constexpr int kBytes = Vector<T, kLen>::kBytes;
  constexpr int kStep = kBytes >= 16 ? 4 : kBytes / 4;
#pragma unroll
  for (int w = 0; w < to.kWords; w += kStep > 0 ? kStep : 1) {
    load_words<kStep>(from + 4 * w, to.words + w);
  }
  return to;
}

template <int kLen, typename T>
__device__ __forceinline__ void store_shared(Shared to, const Vector<T, kLen>& from) {
  constexpr int kBytes = Vector<T, kLen>::kBytes;
  constexpr int kStep = kBytes >= 16 ? 4 : kBytes / 4;
#pragma unroll
  for (int w = 0; w < from.kWords; w += kStep > 0 ? kStep : 1) {
    store_words<kStep>(to + 4 * w, from.words + w);
  }
}

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
  static constexpr int kArray = (kTileRows * kChunk * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
  static constexpr int kStage = kLoads * kArray;
  static constexpr int kBarriers = 2 * kStages * kBarrierBytes;

  // `barriers`: kBarriers bytes. `aligned`: from[] and the first kStores of to[] lie on 16 bytes.
  __device__ TileRing(Shared stages, Shared barriers, const T* const (&from)[kLoads],
                      T* const (&to)[kLoads], long long rows, bool aligned, unsigned rank)
      : stages_(stages), full_(barriers), empty_(barriers + kStages * kBarrierBytes) {
    const int first_column = static_cast<int>(rank) * kChunk;
    columns_ = kCols - first_column < kChunk ? kCols - first_column : kChunk;
    const long long tiles = (rows + kTileRows - 1) / kTileRows;
    const long long id = blockIdx.x / kCluster;
    const long long owners = gridDim.x / kCluster;
    count_ = static_cast<int>((tiles - id + owners - 1) / owners);
    first_row_ = id * kTileRows;
    tile_stride_ = owners * kTileRows;
    first_column_ = first_column;
    const long long last = rows - first_row_ - (count_ - 1) * tile_stride_;
    last_rows_ = last < kTileRows ? static_cast<int>(last) : kTileRows;
    bulk_ = aligned ? count_ - (last_rows_ * columns_ * static_cast<int>(sizeof(T)) % 16 != 0) : 0;
    for (int a = 0; a < kLoads; ++a) {
      from_[a] = from[a];
      to_[a] = to[a];
    }
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) {
        barrier_init(full_ + s * kBarrierBytes, 1);
        barrier_init(empty_ + s * kBarrierBytes, kWarps);
      }
    }
  }

  // After the barriers are visible to all threads.
  __device__ void start() {
    if (threadIdx.x != 0) return;
    for (int k = 0; k < kStages; ++k) load_tile(k, k);
  }

  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ int columns() const { return columns_; }
  __device__ __forceinline__ int last_rows() const { return last_rows_; }
  __device__ __forceinline__ long long first_row() const { return first_row_; }
  __device__ __forceinline__ long long rows_to_next_tile() const { return tile_stride_; }

  // Waits until tile k is in shared memory. All threads, tiles in order. Returns where it is.
  __device__ __forceinline__ Shared acquire(int k) {
    const Shared tile = at(in_.stage);
    if (k < bulk_) {
      barrier_wait(full_ + in_.stage * kBarrierBytes, in_.parity);
    } else {
      fetch(k, tile);
    }
    in_.advance();
    return tile;
  }

  // The calling warp is done with tile k, its results are in arrays [0, kStores) of it.
  __device__ __forceinline__ void release(int k) {
    if constexpr (kStores > 0) {
      if (k < bulk_) {
        publish_to_copies();
      } else {
        put(k, at(out_.stage));
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty_ + out_.stage * kBarrierBytes);
    out_.advance();
    // One tile late: by now the slowest warp is done with it as well.
    if (threadIdx.x == 0 && k > 0) serve(k - 1);
  }

  // After the last release, all threads: the stages are free for other uses.
  __device__ __forceinline__ void finish() {
    if (threadIdx.x == 0) {
      serve(count_ - 1);
      bulk_wait_read<0>();
    }
    __syncthreads();
  }

 private:
  __device__ __forceinline__ Shared at(int stage) const { return stages_ + stage * kStage; }
  __device__ __forceinline__ long long offset_of(int k) const {
    return (first_row_ + k * tile_stride_) * kCols + first_column_;
  }
  __device__ __forceinline__ int elements(int k) const {
    return (k == count_ - 1 ? last_rows_ : kTileRows) * columns_;
  }

  __device__ __forceinline__ void load_tile(int k, int stage) {
    if (k >= bulk_) return;
    const Shared full = full_ + stage * kBarrierBytes;
    const unsigned bytes = elements(k) * sizeof(T);
    const long long offset = offset_of(k);
    barrier_arrive_expecting(full, kLoads * bytes);
#pragma unroll
    for (int a = 0; a < kLoads; ++a) {
      bulk_load(at(stage) + a * kArray, from_[a] + offset, bytes, full);
    }
  }

  // The leader's part once all warps are done with tile k: its results leave, and a tile takes the
  // place of k, or, while the results of k are on their way out, of k - 1.
  __device__ __forceinline__ void serve(int k) {
    barrier_wait(empty_ + done_.stage * kBarrierBytes, done_.parity);
    if constexpr (kStores == 0) {
      load_tile(k + kStages, done_.stage);
    } else {
      if (k < bulk_) {
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

  // What the copies cannot move, element by element.
  __device__ void fetch(int k, Shared tile) {
    if (k >= kStages) barrier_wait(empty_ + in_.stage * kBarrierBytes, in_.parity ^ 1);
    if (threadIdx.x == 0) bulk_wait_read<0>();
    __syncthreads();
    for (int a = 0; a < kLoads; ++a) {
      const T* from = from_[a] + offset_of(k);
#pragma unroll 1
      for (int i = threadIdx.x; i < elements(k); i += kThreads) {
        store_shared(tile + a * kArray + i * static_cast<int>(sizeof(T)),
                     load<false, false, 1>(from + i));
      }
    }
    __syncthreads();
  }

  __device__ void put(int k, Shared tile) {
    __syncthreads();
    for (int a = 0; a < kStores; ++a) {
      T* to = to_[a] + offset_of(k);
#pragma unroll 1
      for (int i = threadIdx.x; i < elements(k); i += kThreads) {
        const auto value = load_shared<1, T>(tile + a * kArray + i * static_cast<int>(sizeof(T)));
        store<false, false, 1>(to + i, value);
      }
    }
  }

  Shared stages_, full_, empty_;
  const T* from_[kLoads];
  T* to_[kLoads];
  long long first_row_, tile_stride_;
  int count_, columns_, first_column_, last_rows_;
  int bulk_;  // tiles before this one move as copies
  Cursor in_, out_, done_;
};
