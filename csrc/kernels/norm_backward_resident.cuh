// LayerNorm and RMSNorm, backward, rows that all blocks of a launch share (sm_90 and newer).
//
//   dx as in norm_backward.cuh;  dgamma[c] = sum_rows dy · xhat,  dbeta[c] = sum_rows dy (HAS_BETA)
//
// Layout: as in norm_backward.cuh; dgamma, dbeta [COLS] float32, whole: a block has all rows of its
// columns. pairs [rows, blocks] 8 bytes each, zeros.
// Threads: as in resident.cuh. A worker keeps the sums of its columns in registers; where its
// columns move on within words, so do the sums.
#include "norm_backward_parameters.cuh"
#include "norm_results.cuh"
#include "resident_gradients.cuh"

constexpr int kOperands = 2 + HAS_ADD;  // x, dy, dh
using Rows = Stages<kOperands, true>;

struct Sums {
  static __device__ __forceinline__ Pair nothing() { return {0.0f, 0.0f}; }

  template <int kCount>
  __device__ __forceinline__ Pair operator()(const Pair (&of)[kCount],
                                             const Counts<kCount>&) const {
    Pair all = of[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) {
      all.first += of[i].first;
      all.second += of[i].second;
    }
    return {sum_lanes<32>(all.first), LAYER ? sum_lanes<32>(all.second) : 0.0f};
  }
};

// gamma of a worker's columns, which are others at each place of a word: that of the rows that
// come. Rows that are written may be of the place before, whose gamma is kept too where there are
// registers for it, and else read again.
struct OwnScale {
  static constexpr bool kKeepsBefore = kMoves && kSums == 1 && sizeof(Gamma) == 2;

  const Parameter<Gamma>& gamma;
  int place = -1, place_before = -1;
  Vector<Gamma, kWidth> words[kEach], before[kKeepsBefore ? kEach : 1];

  __device__ __forceinline__ explicit OwnScale(const Parameter<Gamma>& of_part) : gamma(of_part) {}

  __device__ __forceinline__ void load(const RowCursor& at, const OwnWords& own) {
    if (place == at.place) return;
    place_before = place;
    place = at.place;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if constexpr (kKeepsBefore) before[i] = words[i];
      if (own.owns(i)) words[i] = gamma.word(own, i);
    }
  }
  __device__ __forceinline__ Vector<Gamma, kWidth> word(const RowCursor& at, const OwnWords& own,
                                                        int i) const {
    if (!kMoves || place == at.place) return words[i];
    if (kKeepsBefore && place_before == at.place) return before[kKeepsBefore * i];
    return gamma.word(own, i);
  }
};

__device__ __forceinline__ Vector<X, kWidth> word_of(const Rows& rows, const RowCursor& at,
                                                     int operand, const OwnWords& own, int i) {
  auto word = rows.word(at, operand, own.word(i));
  own.hide(word, i);
  return word;
}

// What kTogether lanes have of the sums of w · xhat and w over the row that has come.
__device__ __forceinline__ Pair sums_of(const Rows& rows, const RowCursor& at, const OwnWords& own,
                                        const OwnScale& scale) {
  const Pair of = rows.row_values(at);
  Pair sums = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!own.owns(i)) continue;
    const auto values = word_of(rows, at, 0, own, i);
    const auto cotangents = word_of(rows, at, 1, own, i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float centred = LAYER ? values.at(j) - of.first : values.at(j);
      const float w = cotangents.at(j) * scaled_by(scale.words[i].at(j));
      sums.first += w * centred;
      sums.second += w;
    }
  }
  return {sum_lanes<kTogether>(sums.first) * of.second,
          LAYER ? sum_lanes<kTogether>(sums.second) : 0.0f};
}

static_assert(Rows::kBytes + Parameter<Gamma>::kBytes + Gradients::kBytes <= SHARED_BYTES,
              "the plan's size");
static_assert(Gradients::kTogetherBytes <= Rows::kBytes - Rows::kControlBytes,
              "sums of columns fit in the stages");

__device__ __forceinline__ void write_row(const Rows& rows, const RowCursor& at,
                                          const OwnWords& own, const OwnScale& scale,
                                          const Pair& means, Gradients& gradients, X* dx) {
  const Pair of = rows.row_values(at);
  const RowResult result_of = {{of.first, of.second}, of.second * means.first, means.second};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!own.owns(i)) continue;
    const auto values = word_of(rows, at, 0, own, i);
    const auto cotangents = word_of(rows, at, 1, own, i);
    const auto gamma = scale.word(at, own, i);
#if HAS_ADD
    const auto residual = rows.word(at, 2, own.word(i));
#endif
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
#if HAS_ADD
      const float dh = residual.at(j);
#else
      constexpr float dh = 0.0f;
#endif
      result[j] = result_of(values.at(j), cotangents.at(j), scaled_by(gamma.at(j)), dh);
      const float centred = LAYER ? values.at(j) - of.first : values.at(j);
      gradients.add(i, j, cotangents.at(j) * (centred * of.second), cotangents.at(j));
    }
    own.store_word(dx + rows.offset(at), i, rounded<X>(result));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    norm_backward_resident(const X* __restrict__ dy, const X* __restrict__ x,
                           const Gamma* __restrict__ gamma,
                           MEAN_PARAMETER const float* __restrict__ rstd,
                           DH_PARAMETER X* __restrict__ dx, float* __restrict__ dgamma,
                           DBETA_PARAMETER unsigned long long* pairs, long long count) {
  extern __shared__ __align__(128) unsigned char memory[];
#if HAS_ADD
  const X* const from[kOperands] = {x, dy, dh};
#else
  const X* const from[kOperands] = {x, dy};
#endif
  const Rows rows(memory, from, pairs, count);
  Gradients gradients(memory + Rows::kControlBytes,
                      memory + Rows::kBytes + Parameter<Gamma>::kBytes);
  const Parameter<Gamma> scale(gamma + rows.first_column, memory + Rows::kBytes, rows.columns);
  if (threadIdx.x == 0) barriers_visible();
  __syncthreads();

  const int task = static_cast<int>(threadIdx.x) / 32 - kWarps;
  if (task == 0) {
    rows.fetch(mean, rstd);
  } else if (task == 1) {
    rows.tell_blocks(Sums{});
  } else if (task > 1) {
    rows.collect(task - 2, Sums{}, [](int, const Pair& all) {
      return Pair{all.first * (1.0f / COLS), all.second * (1.0f / COLS)};
    });
  } else {
    const int group = static_cast<int>(threadIdx.x) / kRowThreads;
    OwnScale own_scale(scale);
    RowCursor in, out;
    in.advance(rows.rows, group);
    out.advance(rows.rows, group);
    OwnWords own_out = rows.own_words(out);
    for (int k = group; k < rows.rows + kGroups * kLag; k += kGroups) {
      if (k < rows.rows) {
        const OwnWords own = rows.own_words(in);
        own_scale.load(in, own);
        rows.wait_for_row(in);
        rows.tell(in, sums_of(rows, in, own, own_scale));
        in.advance(rows.rows, kGroups);
      }
      if (k < kGroups * kLag) continue;
      const Pair means = rows.wait_for_statistics(out);
      write_row(rows, out, own_out, own_scale, means, gradients, dx);
      rows.release(out);
      const int place = out.place;
      out.advance(rows.rows, kGroups);
      if (kMoves && k + 1 < rows.rows + kLag && out.place != place) {
        for (int p = place; p < out.place; ++p) gradients.move();
        own_out = rows.own_words(out);
      }
    }
#if HAS_BETA
    float* const to[kSums] = {dgamma + rows.first_column, dbeta + rows.first_column};
#else
    float* const to[kSums] = {dgamma + rows.first_column};
#endif
    gradients.write(to, own_out, group);
  }
}
