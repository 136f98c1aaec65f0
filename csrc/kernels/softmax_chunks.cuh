// Long rows in shared memory, for rows that are longer than registers hold well.
//
// A block, one of PARTS that share a row, goes through its part of the row twice, chunk by chunk:
// each thread has BATCH words of a chunk, kThreads apart. Copies that need no thread bring all
// chunks, each told of by a barrier, so that the first pass begins with the first of them; what
// computes meanwhile is another block of the multiprocessor. A block has one row, for the GPU gives
// blocks to multiprocessors as they become free: some reach memory faster than others.
#pragma once
#include "softmax_hiding.cuh"
#include "softmax_reduce.cuh"

constexpr int kThreads = THREADS_PER_ROW;
constexpr int kParts = PARTS;
constexpr int kBatch = BATCH;
constexpr int kPartWords = (kWords + kParts - 1) / kParts;
constexpr int kChunkWords = kThreads * kBatch;
constexpr int kChunks = (kPartWords + kChunkWords - 1) / kChunkWords;
// All threads have a word of every chunk, and every row sees it.
constexpr bool kSure =
    kEven && !CAUSAL && MASK != 2 && kPartWords * kParts == kWords && kPartWords % kChunkWords == 0;
// A mask's bytes of a chunk start on 16 bytes.
constexpr bool kMaskInChunks =
    MASK == 1 && kCols % 16 == 0 && (kParts == 1 || kPartWords % (16 / kLength) == 0);
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is whole warps");

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

  __device__ __forceinline__ int seen_chunks() const {
    if (kSure) return kChunks;
    const int words = seen_end - begin;
    return words > 0 ? (words + kChunkWords - 1) / kChunkWords : 0;
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

__device__ __forceinline__ bool is_on_word(const void* pointer) {
  return reinterpret_cast<unsigned long long>(pointer) % 16 == 0;
}

template <int kOperands>
struct Chunks {
  static constexpr int kOperandBytes = kChunkWords * 16;
  static constexpr int kBytes =
      kOperands * kOperandBytes + (kMaskInChunks ? kChunkWords * kLength : 0);
  static constexpr int kExchangeBytes = Exchange<kThreads, 1, kParts>::kBytes;
  static constexpr int kControlBytes = (kExchangeBytes + kChunks * kBarrierBytes + 127) / 128 * 128;

  const X* from[kOperands];
  Shared there, data;  // a barrier a chunk, the chunks

  // `memory`: of the block, on 128 bytes. The exchange's part of it comes first.
  __device__ Chunks(const X* const (&operands)[kOperands], unsigned char* memory) {
#pragma unroll
    for (int o = 0; o < kOperands; ++o) from[o] = operands[o];
    there = shared_address(memory) + kExchangeBytes;
    data = shared_address(memory) + kControlBytes;
    if (threadIdx.x != 0) return;
    for (int c = 0; c < kChunks; ++c) barrier_init(there + c * kBarrierBytes, 1);
    barriers_visible();
  }

  // The thread that made the barriers starts all copies of the row's part, as far as it sees.
  __device__ void fetch(long long row, const RowPart& words, const unsigned char* hidden) const {
    if (threadIdx.x != 0) return;
    for (int c = 0; c < words.seen_chunks(); ++c) {
      const int begin = words.begin + c * kChunkWords;
      const int end = begin + kChunkWords < words.seen_end ? begin + kChunkWords : words.seen_end;
      const unsigned bytes = (end - begin) * 16;
      const unsigned mask_bytes = kMaskInChunks ? ((end - begin) * kLength + 15) / 16 * 16 : 0;
      barrier_arrive_expecting(of(c), kOperands * bytes + mask_bytes);
#pragma unroll
      for (int o = 0; o < kOperands; ++o) {
        bulk_load(place(c) + o * kOperandBytes, from[o] + row * kCols + words.column(begin), bytes,
                  of(c));
      }
      if (kMaskInChunks) {
        bulk_load(place(c) + kOperands * kOperandBytes, hidden + words.column(begin), mask_bytes,
                  of(c));
      }
    }
  }

  __device__ __forceinline__ void wait(int chunk) const { barrier_wait(of(chunk), 0); }

  __device__ __forceinline__ void read(int chunk, int operand, Word (&to)[kBatch]) const {
    const Shared own = place(chunk) + operand * kOperandBytes + static_cast<int>(threadIdx.x) * 16;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) load_words<4>(own + i * kThreads * 16, to[i].words);
  }

  __device__ __forceinline__ void read_mask(int chunk, MaskBytes (&to)[kBatch]) const {
    const Shared own =
        place(chunk) + kOperands * kOperandBytes + static_cast<int>(threadIdx.x) * kLength;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      load_words<kLength / 4>(own + i * kThreads * kLength, to[i].words);
    }
  }

 private:
  __device__ __forceinline__ Shared of(int chunk) const { return there + chunk * kBarrierBytes; }
  __device__ __forceinline__ Shared place(int chunk) const { return data + chunk * kBytes; }
};
