// Softmax, backward, for rows of any length: the row is read twice.
//
//   dy, y, first, dx as in softmax_backward.cuh; threads and stages as in softmax_forward_long.cuh.
//   parts [rows, PARTS, 2]: what each block found of its part, (sum, 0).
#include "softmax_hiding.cuh"
#include "softmax_reduce.cuh"

constexpr int kThreads = THREADS_PER_ROW;
constexpr int kParts = PARTS;
constexpr int kPartWords = (kWords + kParts - 1) / kParts;
constexpr int kClusterParts = STAGE == 0 ? kParts : 1;
constexpr int kBatch = 2;  // words of dy and of y that a thread has under way
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is whole warps");

struct Span {
  const X *dy, *y;
  int begin, end, count;  // columns of the part; those from `count` on are not read
  bool whole;

  template <bool kStream, typename Use>
  __device__ __forceinline__ void for_each(int until, const Use& use) const {
    for (int column = begin + static_cast<int>(threadIdx.x) * kLength; column < until;
         column += kBatch * kThreads * kLength) {
      Word ys[kBatch], dys[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = column + i * kThreads * kLength;
        ys[i] = dys[i] = filled(0);
        if (at < end && at < count) {
          ys[i] = load_columns<kStream>(y, at, whole);
          dys[i] = load_columns<kStream>(dy, at, whole);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = column + i * kThreads * kLength;
        if (at >= end) continue;
        if (!kEven || CAUSAL) {
          hide_outside<0>(ys[i], at, count);
          hide_outside<0>(dys[i], at, count);
        }
        use(ys[i], dys[i], at);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    softmax_backward_long(const X* __restrict__ dy, const X* __restrict__ y,
#if FIRST
                          const int* __restrict__ first,
#endif
#if STAGE == 2
                          const float* __restrict__ parts,
#endif
#if STAGE == 1
                          float* __restrict__ parts,
#else
                          X* __restrict__ dx,
#endif
                          const Params p) {
#if !FIRST
  constexpr const int* first = nullptr;
#endif
#if STAGE != 2
  extern __shared__ __align__(16) float shared[];
  Exchange<kThreads, 1, kClusterParts> exchange(shared);
  exchange.wait_for_cluster();
#endif
#if STAGE == 1
  const bool whole = share_words(dy, y);
#else
  const bool whole = share_words(dy, y, dx);
#endif
  const int begin = static_cast<int>(blockIdx.x % kParts) * kPartWords;

  for (long long row = blockIdx.x / kParts; row < p.rows; row += gridDim.x / kParts) {
    const X* y_row = y + row * kCols;
    const int shift = shift_of(y_row, whole);
    const long long part_end = static_cast<long long>(begin + kPartWords) * kLength - shift;
    const int end = part_end < kCols ? static_cast<int>(part_end) : kCols;
    const int count = keys_of(row, nullptr, first, p).count;
    const Span span = {dy + row * kCols, y_row, begin * kLength - shift, end, count, whole};
#if STAGE != 2
    float sum = 0.0f;
    span.for_each<false>(end < count ? end : count, [&](const Word& ys, const Word& dys, int) {
#pragma unroll
      for (int j = 0; j < kLength; ++j) sum += ys.at(j) * dys.at(j);
    });
    sum = sum_lanes<32>(sum);
    constexpr int kPairs = decltype(exchange)::kPairs;
    if constexpr (kPairs > 1) sum = summed_parts<kPairs>(exchange.over_row(sum, 0.0f));
#else
    const float sum = summed_parts<kParts>(parts + row * 2 * kParts);
#endif
#if STAGE == 1
    if (threadIdx.x == 0) {
      float* to = parts + (row * kParts + blockIdx.x % kParts) * 2;
      to[0] = sum;
      to[1] = 0.0f;
    }
#else
    X* dx_row = dx + row * kCols;
    span.for_each<true>(span.end, [&](const Word& ys, const Word& dys, int at) {
      float result[kLength];
#pragma unroll
      for (int j = 0; j < kLength; ++j) result[j] = p.scale * ys.at(j) * (dys.at(j) - sum);
      Word word = rounded<X>(result);
#if CAUSAL  // 0 also where the row's sum is NaN
      hide_outside<0>(word, at, count);
#endif
      store_columns(dx_row, at, word, whole);
    });
#endif
  }
}
