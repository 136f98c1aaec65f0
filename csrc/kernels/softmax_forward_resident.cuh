// Softmax, forward, rows that all blocks of a launch share (sm_90 and newer).
//
//   x, y as in softmax_forward.cuh, without a mask.
//
// Layout: x, y [rows, COLS] row-major; pairs [rows, blocks] 8 bytes each, zeros.
// Threads: as in resident.cuh. Pairs are parts of a row: the largest logit, the sum of weights.
#include "resident.cuh"
#include "softmax_logits.cuh"

using Rows = Stages<1>;
static_assert(Rows::kBytes <= SHARED_BYTES, "the plan's size");

struct MergedParts {
  float scale;

  static __device__ __forceinline__ Pair nothing() { return {negative_infinity(), 0.0f}; }

  template <int kCount>
  __device__ __forceinline__ Pair operator()(const Pair (&of)[kCount],
                                             const Counts<kCount>&) const {
    float top = of[0].first;
#pragma unroll
    for (int i = 1; i < kCount; ++i) top = fmaxf(top, of[i].first);
    const float base = base_of(top);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += of[i].second * weight(of[i].first, base, scale);
    const Part all = merged_lanes<32>(Part{top, sum}, scale);
    return {all.top, all.sum};
  }
};

__device__ __forceinline__ Word logits_of(const Rows& rows, const RowCursor& at,
                                          const OwnWords& own, int i) {
  Word word = rows.word(at, 0, own.word(i));
  if (SCALE_SIGN == 0) forget_finite(word);
  if (!kEven) hide_outside<kHidden>(word, own.column(i), own.count);
  return word;
}

__device__ __forceinline__ Pair part_of(const Rows& rows, const RowCursor& at, float scale) {
  const OwnWords own = rows.own_words(at);
  Word words[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    words[i] = own.owns(i) ? logits_of(rows, at, own, i) : filled(kHidden);
  }
  Part part = {negative_infinity(), 0.0f};
  add_words(part, words, scale);
  const Part all = merged_lanes<kTogether>(part, scale);
  return {all.top, all.sum};
}

__device__ __forceinline__ void write_row(const Rows& rows, const RowCursor& at, const Pair& total,
                                          float scale, X* y) {
  const OwnWords own = rows.own_words(at);
  const Weights weights(base_of(total.first), scale);
  const float inverse = fast_reciprocal(total.second) * weights.rest;
  const bool regular = total.second > 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!own.owns(i)) continue;
    Word word = softmax_of(logits_of(rows, at, own, i), weights, inverse);
    if (!regular) word = without_softmax(own.column(i), Keys{own.count, nullptr});
    own.store_word(y + rows.offset(at), i, word);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    softmax_forward_resident(const X* __restrict__ x, X* __restrict__ y, unsigned long long* pairs,
                             const Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  const X* const from[1] = {x};
  const Rows rows(memory, from, pairs, p.rows);
  __syncthreads();

  const int task = static_cast<int>(threadIdx.x) / 32 - kWarps;
  const MergedParts merge = {p.scale};
  if (task == 0) {
    rows.fetch(nullptr, nullptr);
  } else if (task == 1) {
    rows.tell_blocks(merge);
  } else if (task > 1) {
    rows.collect(task - 2, merge, [](int, const Pair& all) { return all; });
  } else {
    const int group = static_cast<int>(threadIdx.x) / kRowThreads;
    RowCursor in, out;
    in.advance(rows.rows, group);
    out.advance(rows.rows, group);
    for (int k = group; k < rows.rows + kGroups * kLag; k += kGroups) {
      if (k < rows.rows) {
        rows.wait_for_row(in);
        rows.tell(in, part_of(rows, in, p.scale));
        in.advance(rows.rows, kGroups);
      }
      if (k >= kGroups * kLag) {
        write_row(rows, out, rows.wait_for_statistics(out), p.scale, y);
        rows.release(out);
        out.advance(rows.rows, kGroups);
      }
    }
  }
}
