// Softmax, forward, for rows of any length: the row is read twice.
//
//   x, mask, first, y as in softmax_forward.cuh.
//
// Threads: PARTS blocks of THREADS_PER_ROW a row. STAGE 0: they are a cluster (PARTS > 1) and the
// second pass finds the row in L2, mostly. STAGES 1 and 2 are two launches, for GPUs without
// clusters: 1 writes parts [rows, PARTS, 2], what each block found of its part (largest logit,
// sum), and 2 merges them and writes y.
#include "softmax_logits.cuh"
#include "softmax_reduce.cuh"

constexpr int kThreads = THREADS_PER_ROW;
constexpr int kParts = PARTS;
constexpr int kPartWords = (kWords + kParts - 1) / kParts;
constexpr int kClusterParts = STAGE == 0 ? kParts : 1;
constexpr int kBatch = 4;  // words a thread has under way
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is whole warps");

// The words of a row that a block works on, in batches: `use(words, columns)` gets kBatch of them a
// thread, loaded and hidden as far as the row sees and hidden altogether past that.
struct Span {
  const X* row;
  Keys keys;
  int shift, begin, end;  // columns: of the part, which ends at the row's end or before
  bool whole;

  template <bool kStream, typename Use>
  __device__ __forceinline__ void for_each(int until, const Use& use) const {
    const int seen_end = end < keys.count ? end : keys.count;
    for (int column = begin + static_cast<int>(threadIdx.x) * kLength; column < until;
         column += kBatch * kThreads * kLength) {
      Word words[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = column + i * kThreads * kLength;
        if (at < seen_end) words[i] = load_columns<kStream>(row, at, whole);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = column + i * kThreads * kLength;
        if (at < seen_end) {
          MaskBytes mask;
          if (MASK == 1) mask = mask_bytes(keys.hidden, keys.hidden + at);
          hide(words[i], at, keys, mask);
        } else {
          words[i] = filled(kHidden);
        }
      }
      use(words, column);
    }
  }
};

__device__ __forceinline__ Part part_of_thread(const Span& span, float scale) {
  Part part = {negative_infinity(), 0.0f};
  span.for_each<false>(span.end < span.keys.count ? span.end : span.keys.count,
                       [&](const Word(&words)[kBatch], int) { add_words(part, words, scale); });
  return part;
}

__device__ __forceinline__ void write(const Span& span, X* y, const Part& total, float scale) {
  const bool regular = total.sum > 0.0f;
  const Weights weights(base_of(total.top), scale);
  const float inverse = fast_reciprocal(total.sum) * weights.rest;
  if (!regular) {
    for (int at = span.begin + static_cast<int>(threadIdx.x) * kLength; at < span.end;
         at += kThreads * kLength) {
      store_columns(y, at, without_softmax(at, span.keys), span.whole);
    }
    return;
  }
  span.for_each<true>(span.end, [&](const Word(&words)[kBatch], int column) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = column + i * kThreads * kLength;
      if (at >= span.end) continue;
      store_columns(y, at, softmax_of(words[i], weights, inverse), span.whole);
    }
  });
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    softmax_forward_long(const X* __restrict__ x,
#if MASK
                         const unsigned char* __restrict__ mask,
#endif
#if FIRST
                         const int* __restrict__ first,
#endif
#if STAGE == 2
                         const float* __restrict__ parts,
#endif
#if STAGE == 1
                         float* __restrict__ parts,
#else
                         X* __restrict__ y,
#endif
                         const Params p) {
#if !MASK
  constexpr const unsigned char* mask = nullptr;
#endif
#if !FIRST
  constexpr const int* first = nullptr;
#endif
#if STAGE != 2
  extern __shared__ __align__(16) float shared[];
  Exchange<kThreads, 1, kClusterParts> exchange(shared);
  exchange.wait_for_cluster();
#endif
#if STAGE == 1
  const bool whole = share_words(x);
#else
  const bool whole = share_words(x, y);
#endif
  const int begin = static_cast<int>(blockIdx.x % kParts) * kPartWords;

  for (long long row = blockIdx.x / kParts; row < p.rows; row += gridDim.x / kParts) {
    const X* x_row = x + row * kCols;
    const int shift = shift_of(x_row, whole);
    const long long part_end = static_cast<long long>(begin + kPartWords) * kLength - shift;
    const Span span = {x_row,
                       keys_of(row, mask, first, p),
                       shift,
                       begin * kLength - shift,
                       part_end < kCols ? static_cast<int>(part_end) : kCols,
                       whole};
#if STAGE != 2
    Part total = merged_lanes<32>(part_of_thread(span, p.scale), p.scale);
    constexpr int kPairs = decltype(exchange)::kPairs;
    if constexpr (kPairs > 1) {
      total = merged_parts<kPairs>(exchange.over_row(total.top, total.sum), p.scale);
    }
#else
    const Part total = merged_parts<kParts>(parts + row * 2 * kParts, p.scale);
#endif
#if STAGE == 1
    if (threadIdx.x == 0) {
      float* to = parts + (row * kParts + blockIdx.x % kParts) * 2;
      to[0] = total.top;
      to[1] = total.sum;
    }
#else
    write(span, y + row * kCols, total, p.scale);
#endif
  }
}
