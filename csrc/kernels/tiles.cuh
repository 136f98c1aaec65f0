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
// Ragged rows, whose COLS are no multiple of VECTOR, come as the 16-byte words that cover them
// (ragged.cuh), each row by a copy of its own.
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
  static constexpr int kArray = (kTileRows * kChunk * static_cast<int>(sizeof(T)) + 15) / 16 * 16;
  static constexpr int kStage = kLoads * kArray;
  static constexpr int kBarriers = 2 * kStages * kBarrierBytes;
  // Two tiles are worked on at a time: of three, one would be on its way for half a step only.
  static constexpr bool kAtOnce = (kStages == 2 || kStages == 3) && kStores == 0;

  // `barriers`: kBarriers bytes. `aligned`: from[] and the first kStores of to[] move as words.
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
    const bool cut = !kRagged && last_rows_ * columns_ * static_cast<int>(sizeof(T)) % 16 != 0;
    bulk_ = aligned ? count_ - cut : 0;
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

  __device__ __forceinline__ void load_tile(int k, int stage) {
    if (k >= bulk_) return;
    const Shared full = full_ + stage * kBarrierBytes;
    const long long offset = offset_of(k);
    if constexpr (kRagged) {
      load_ragged(full, offset, rows_of(k), at(stage));
    } else {
      const unsigned bytes = elements(k) * sizeof(T);
      barrier_arrive_expecting(full, kLoads * bytes);
#pragma unroll
      for (int a = 0; a < kLoads; ++a) {
        bulk_load(at(stage) + a * kArray, from_[a] + offset, bytes, full);
      }
    }
  }

  // The words that cover each row's chunk.
  __device__ __forceinline__ void load_ragged(Shared full, long long offset, int rows,
                                              Shared stage) {
    const auto shift_of = [&](int r) {
      return place_in_word<kLength>(from_[0] + offset - first_column_ + r * kCols);
    };
    const auto bytes_of = [&](int shift) {
      const int left = (kCols + shift + kLength - 1) / kLength * kLength - first_column_;
      return (left < 0 ? 0 : left < kChunk ? left : kChunk) * static_cast<int>(sizeof(T));
    };
    unsigned bytes = 0;
    for (int r = 0; r < rows; ++r) bytes += kLoads * bytes_of(shift_of(r));
    barrier_arrive_expecting(full, bytes);
    for (int r = 0; r < rows; ++r) {
      const int shift = shift_of(r);
      if (bytes_of(shift) == 0) continue;
#pragma unroll
      for (int a = 0; a < kLoads; ++a) {
        bulk_load(stage + a * kArray + r * kChunk * static_cast<int>(sizeof(T)),
                  from_[a] + offset + r * kCols - shift, bytes_of(shift), full);
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
    const long long offset = offset_of(k);
#pragma unroll 1
    for (int i = threadIdx.x; i < elements(k); i += kThreads) {
      const int row = i / columns_, column = i % columns_;
      const Shared at = tile + (row * kChunk + column) * static_cast<int>(sizeof(T));
#pragma unroll
      for (int a = 0; a < kLoads; ++a) {
        store_shared(at + a * kArray,
                     load<false, false, 1>(from_[a] + offset + row * kCols + column));
      }
    }
    __syncthreads();
  }

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
  int bulk_;  // tiles before this one move as copies
  Cursor in_, out_, done_;
};
