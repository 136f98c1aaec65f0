// Rows on their way through shared memory, for rows that are longer than registers hold well.
//
// A block, one of PARTS that share a row, goes through its part of the row twice, chunk by chunk:
// all threads have BATCH words of each, kThreads apart. Copies that need no thread bring chunks
// into DEPTH places used in turn; whoever is the last to leave a chunk has its place filled with
// the one that comes DEPTH later, of the next rows too, so that memory is read while threads
// compute.
#pragma once
#include "softmax_hiding.cuh"
#include "softmax_reduce.cuh"

constexpr int kThreads = THREADS_PER_ROW;
constexpr int kParts = PARTS;
constexpr int kBatch = BATCH;
constexpr int kDepth = DEPTH;
constexpr int kPartWords = (kWords + kParts - 1) / kParts;
constexpr int kChunkWords = kThreads * kBatch;
constexpr int kChunks = (kPartWords + kChunkWords - 1) / kChunkWords;
// All threads have a word of every chunk, and every row sees it.
constexpr bool kSure =
    kEven && !CAUSAL && MASK != 2 && kPartWords * kParts == kWords && kPartWords % kChunkWords == 0;
constexpr int kRingBytes = (kDepth * 20 + 15) / 16 * 16;  // two barriers and a counter a place
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is whole warps");
static_assert(kChunks <= kDepth, "a row is there as a whole");

// The words of a row that a block has.
struct RowPart {
  int shift;  // elements of word 0 that lie before the row
  int begin, end;
  int seen_end;  // words from here on hold nothing that the row sees

  __device__ __forceinline__ RowPart(const X* row, int count, int part) {
    shift = shift_of(row, true);
    const int last = (shift + kCols + kLength - 1) / kLength;
    begin = part * kPartWords;
    end = begin + kPartWords < last ? begin + kPartWords : last;
    const int seen = count > 0 ? (shift + count + kLength - 1) / kLength : 0;
    seen_end = seen < end ? seen : end;
  }

  __device__ __forceinline__ int word(int chunk, int i) const {
    return begin + chunk * kChunkWords + i * kThreads + static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ int column(int word) const { return word * kLength - shift; }
  __device__ __forceinline__ bool sees(int chunk, int i) const {
    return kSure || word(chunk, i) < seen_end;
  }

  __device__ __forceinline__ void read_elements(Word (&to)[kBatch], const X* row, int chunk) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (sees(chunk, i)) to[i] = load_elements<false>(row, column(word(chunk, i)));
    }
  }

  __device__ __forceinline__ void store_words(X* row, const Word (&from)[kBatch], int chunk,
                                              bool whole) const {
    if (whole) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (sees(chunk, i)) store_columns(row, column(word(chunk, i)), from[i], true);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (sees(chunk, i)) store_columns(row, column(word(chunk, i)), from[i], false);
      }
    }
  }

  // Zeros for the words of which the row sees nothing.
  __device__ __forceinline__ void store_zeros(X* row, bool whole) const {
    const int from = begin > seen_end ? begin : seen_end;
    for (int w = from + static_cast<int>(threadIdx.x); w < end; w += kThreads) {
      store_columns(row, column(w), filled(0), whole);
    }
  }
};

template <int kOperands>
struct Ring {
  static constexpr int kOperandBytes = kChunkWords * 16;

  const X* from[kOperands];
  const unsigned char* mask;
  const int* first;
  const Params& p;
  Shared there, left, data;  // barriers: a chunk is there; all warps have left it
  unsigned* counters;
  int part;

  // `control`: kRingBytes on 16 bytes, of shared memory; `places`: for kDepth chunks.
  __device__ Ring(const X* const (&operands)[kOperands], const unsigned char* hidden,
                  const int* first_query, const Params& params, unsigned char* control,
                  unsigned char* places)
      : mask(hidden), first(first_query), p(params), part(blockIdx.x % kParts) {
#pragma unroll
    for (int o = 0; o < kOperands; ++o) from[o] = operands[o];
    there = shared_address(control);
    left = there + kDepth * kBarrierBytes;
    data = shared_address(places);
    counters = reinterpret_cast<unsigned*>(control + 2 * kDepth * kBarrierBytes);
    if (threadIdx.x != 0) return;
    for (int s = 0; s < kDepth; ++s) {
      barrier_init(there + s * kBarrierBytes, 1);
      barrier_init(left + s * kBarrierBytes, kThreads / 32);
      counters[s] = 0;
    }
    barriers_visible();
  }

  // Once all threads know of the barriers.
  __device__ void start() const {
    if (threadIdx.x != 0) return;
    for (int s = 0; s < kDepth; ++s) fill(s);
  }

  // Chunks are numbered over all rows of the block.
  __device__ __forceinline__ void wait(int chunk) const {
    barrier_wait(of(there, chunk), chunk / kDepth & 1);
  }

  __device__ __forceinline__ void read(int chunk, int operand, Word (&to)[kBatch]) const {
    const Shared own = place(chunk) + operand * kOperandBytes + static_cast<int>(threadIdx.x) * 16;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) load_words<4>(own + i * kThreads * 16, to[i].words);
  }

  // This warp has read a chunk for the last time. The last warp's wait is none: it orders what
  // others have read before what is now to be written.
  __device__ __forceinline__ void leave(int chunk) const {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    barrier_arrive(of(left, chunk));
    unsigned* counter = counters + chunk % kDepth;
    if (count_up(counter) + 1 < kThreads / 32) return;
    barrier_wait(of(left, chunk), chunk / kDepth & 1);
    *counter = 0;
    fill(chunk + kDepth);
  }

 private:
  static __device__ __forceinline__ Shared of(Shared barriers, int chunk) {
    return barriers + chunk % kDepth * kBarrierBytes;
  }
  __device__ __forceinline__ Shared place(int chunk) const {
    return data + chunk % kDepth * (kOperands * kOperandBytes);
  }

  // A chunk of which the row sees nothing is there at once.
  __device__ __forceinline__ void fill(int chunk) const {
    const long long row =
        blockIdx.x / kParts + static_cast<long long>(chunk / kChunks) * (gridDim.x / kParts);
    if (row >= p.rows) return;
    const RowPart words(from[0] + row * kCols, keys_of(row, mask, first, p).count, part);
    const int begin = words.begin + chunk % kChunks * kChunkWords;
    const int end = begin + kChunkWords < words.seen_end ? begin + kChunkWords : words.seen_end;
    if (end <= begin) {
      barrier_arrive(of(there, chunk));
      return;
    }
    const unsigned bytes = (end - begin) * 16;
    barrier_arrive_expecting(of(there, chunk), kOperands * bytes);
#pragma unroll
    for (int o = 0; o < kOperands; ++o) {
      bulk_load(place(chunk) + o * kOperandBytes, from[o] + row * kCols + words.column(begin),
                bytes, of(there, chunk));
    }
  }
};
