// LayerNorm and RMSNorm, forward, for rows that fit in registers and start anywhere in a word.
//
//   h, mean, rstd, y as in norm_forward.cuh.
//
// Layout: as in norm_forward.cuh; x, y, add and h on 16 bytes.
// Threads: block (THREADS_PER_ROW, ROWS_PER_BLOCK), threadIdx.y picks the row. All rows of a block
// start at the same place of a word, PERIOD rows apart, and the grid strides over those: so their
// whole words (ragged.cuh) have the same columns, and gamma and beta lie in shared memory cut as
// the rows are.
#include "lanes.cuh"
#include "mean.cuh"
#include "norm_parameters.cuh"
#include "norm_results.cuh"
#include "ragged_slice.cuh"

constexpr int kRowsAtOnce = ROWS_PER_BLOCK;
constexpr int kThreads = kGroup * kRowsAtOnce;
constexpr int kPeriod = PERIOD;
constexpr int kGammaBytes = (kCols * static_cast<int>(sizeof(Gamma)) + 15) / 16 * 16;
static_assert(kThreads % 32 == 0, "a block is whole warps");

// Mean and sum of squared distances from it, of a row in registers, one barrier: as in reduce.cuh,
// but for how many elements warps own, which is known when the kernel runs.
class Moments {
  static constexpr int kWarps = kGroup > 32 ? kGroup / 32 : 1;
  struct alignas(16) OfWarp {
    float sum, mean, count, squares;
  };

 public:
  using Buffers = OfWarp[2][kRowsAtOnce][kWarps];

  __device__ __forceinline__ Moments(Buffers& shared, const RaggedSlice& slice)
      : shared_(shared), count_(static_cast<float>(slice.elements_of(threadIdx.x / 32))) {
    share_ = count_ > 0.0f ? 1.0f / count_ : 0.0f;
  }

  template <typename Squares>
  __device__ __forceinline__ void operator()(float sum, const Squares& squares_about, float& mean,
                                             float& squares) {
    if (LAYER) sum = sum_lanes<kLanes>(sum);
    if constexpr (kGroup <= 32) {
      mean = LAYER ? mean_of<kCols>(sum) : 0.0f;
      squares = sum_lanes<kLanes>(squares_about(mean));
      return;
    }
    const float own = LAYER ? mean_of(sum, count_, share_) : 0.0f;
    squares = sum_lanes<32>(squares_about(own));
    OfWarp* const parts = shared_[turn_][threadIdx.y];
    turn_ ^= 1;
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = {sum, own, count_, squares};
    __syncthreads();
    mean = squares = 0.0f;
    if (LAYER) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) mean += parts[w].sum;
      mean = mean_of<kCols>(mean);
    }
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      squares += parts[w].squares;
      if (!LAYER) continue;
      const float distance = parts[w].mean - mean;
      squares += parts[w].count * distance * distance;
    }
  }

 private:
  static constexpr int kLanes = kGroup < 32 ? kGroup : 32;
  Buffers& shared_;
  float count_, share_;
  int turn_ = 0;
};

// gamma and beta into shared memory. So many pieces of each are on their way at once as registers
// have room for beside a row.
__device__ __forceinline__ void bring(const RaggedSlice& slice, const Gamma* __restrict__ gamma,
                                      Gamma* scales, const Beta* __restrict__ beta, Beta* biases) {
  using OfGamma = Turning<kThreads, Gamma>;
  using OfBeta = Turning<kThreads, Beta>;
  constexpr int kTurns =
      HAS_BETA && OfBeta::kTurns > OfGamma::kTurns ? OfBeta::kTurns : OfGamma::kTurns;
  constexpr int kMost = kCount >= 6 ? 4 : 2;
  constexpr int kAhead = kTurns < kMost ? kTurns : kMost;
  const OfGamma of_gamma = {slice, gamma, scales};
  const OfBeta of_beta = {slice, beta, biases};
#pragma unroll 1
  for (int first = 0; first < kTurns; first += kAhead) {
    typename OfGamma::Piece scale[kAhead];
    typename OfBeta::Piece bias[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      scale[n] = of_gamma.load(first + n);
      if (HAS_BETA) bias[n] = of_beta.load(first + n);
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      of_gamma.store(first + n, scale[n]);
      if (HAS_BETA) of_beta.store(first + n, bias[n]);
    }
  }
  of_gamma.copy_rest();
  if (HAS_BETA) of_beta.copy_rest();
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    norm_forward_ragged(const X* __restrict__ x, const Gamma* __restrict__ gamma,
                        BETA_PARAMETER ADD_PARAMETER X* __restrict__ y,
                        H_PARAMETER MEAN_PARAMETER float* __restrict__ rstd_out, long long rows,
                        float epsilon) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Moments::Buffers buffers;
  Gamma* const scales = reinterpret_cast<Gamma*>(memory);
  Beta* const biases = reinterpret_cast<Beta*>(memory + kGammaBytes);
  const int place = static_cast<int>(blockIdx.x) % kPeriod;
  const RaggedSlice slice(place * kCols % kLength);
  Moments moments(buffers, slice);

  RaggedPart<X> values;
#if HAS_ADD
  RaggedPart<X> addend;
#endif
  const auto load_row = [&](long long row) {
    const bool active = row < rows;
    const long long at = row * kCols + slice.column();
    values.load(slice, x + at, active);
#if HAS_ADD
    addend.load(slice, add + at, active);
#endif
  };

  // The bound is the block's first row: all its threads make the same number of turns, as the
  // barriers want. The first row is on its way while gamma and beta are brought.
  constexpr int kTurn = kRowsAtOnce * kPeriod;  // rows
  const long long stride = static_cast<long long>(gridDim.x / kPeriod) * kTurn;
  long long first = static_cast<long long>(blockIdx.x / kPeriod) * kTurn + place;
  const long long own = static_cast<int>(threadIdx.y) * kPeriod;
  load_row(first + own);
  bring(slice, gamma, scales, beta, biases);
  __syncthreads();
#pragma unroll 1
  while (first < rows) {
    const long long row = first + own;
    const bool active = kRowsAtOnce == 1 || row < rows;
    const long long at = row * kCols + slice.column();
#if HAS_ADD
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values.words[i] = sum_of<kLength>(values.words[i], addend.words[i]);
    }
    values.edge = sum_of<1>(values.edge, addend.edge);
    if (active) values.store(slice, h + at);
#endif

    float sum = 0.0f;
    if (LAYER) {
      sum = values.edge.at(0);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int j = 0; j < kLength; ++j) sum += values.words[i].at(j);
      }
    }
    const auto squares_about = [&](float centre) {
      float total = 0.0f;
      if (slice.has_edge()) {
        const float centred = values.edge.at(0) - centre;
        total = centred * centred;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values.words[i].forget();
        if (!slice.owns(i)) continue;  // (0 - centre)^2 must not count
#pragma unroll
        for (int j = 0; j < kLength; ++j) {
          const float centred = values.words[i].at(j) - centre;
          total += centred * centred;
        }
      }
      return total;
    };
    float mean, squares;
    moments(sum, squares_about, mean, squares);
    const float rstd = inverse_root(squares * (1.0f / kCols) + epsilon);
    if (active && threadIdx.x == 0) {
#if LAYER
      mean_out[row] = mean;
#endif
      rstd_out[row] = rstd;
    }

#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!slice.owns(i)) continue;
      const auto g = load<true, false, kLength>(slice.word_of(scales, i));
#if HAS_BETA
      const auto b = load<true, false, kLength>(slice.word_of(biases, i));
#endif
      values.words[i].forget();
      float result[kLength];
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
#if HAS_BETA
        const float bias = b.at(j);
#else
        constexpr float bias = 0.0f;
#endif
        result[j] = result_of(values.words[i].at(j), mean, rstd, g.at(j), bias);
      }
      values.words[i] = rounded<X>(result);
    }
    if (slice.has_edge()) {
#if HAS_BETA
      const float bias = element(*slice.edge_of(biases));
#else
      constexpr float bias = 0.0f;
#endif
      const float result[1] = {
          result_of(values.edge.at(0), mean, rstd, element(*slice.edge_of(scales)), bias)};
      values.edge = rounded<X>(result);
    }
    if (active) values.store(slice, y + at);
    first += stride;
    load_row(first + own);
  }
}
