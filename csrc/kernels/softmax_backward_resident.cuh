// Softmax, backward, rows that all blocks of a launch share (sm_90 and newer).
//
//   dy, y, dx as in softmax_backward.cuh, of rows that see all keys.
//
// Layout: dy, y, dx [rows, COLS] row-major; pairs [rows, blocks] 8 bytes each, zeros.
// Threads: as in resident.cuh. Pairs are (sum of y · dy, 0).
#include "resident.cuh"
#include "softmax_row.cuh"

using Rows = Stages<2>;
static_assert(Rows::kBytes <= SHARED_BYTES, "the plan's size");

struct Sum {
  static __device__ __forceinline__ Pair nothing() { return {0.0f, 0.0f}; }

  template <int kCount>
  __device__ __forceinline__ Pair operator()(const Pair (&of)[kCount],
                                             const Counts<kCount>&) const {
    float sum = of[0].first;
#pragma unroll
    for (int i = 1; i < kCount; ++i) sum += of[i].first;
    return {sum_lanes<32>(sum), 0.0f};
  }
};

__device__ __forceinline__ Pair sum_of(const Rows& rows, const RowCursor& at) {
  const OwnWords own = rows.own_words(at);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!own.owns(i)) continue;
    Word ys = rows.word(at, 0, own.word(i)), dys = rows.word(at, 1, own.word(i));
    own.hide(ys, i);
    own.hide(dys, i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += ys.at(j) * dys.at(j);
  }
  return {sum_lanes<kTogether>(sum), 0.0f};
}

__device__ __forceinline__ void write_row(const Rows& rows, const RowCursor& at, float sum,
                                          float scale, X* dx) {
  const OwnWords own = rows.own_words(at);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!own.owns(i)) continue;
    const Word ys = rows.word(at, 0, own.word(i)), dys = rows.word(at, 1, own.word(i));
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result[j] = scale * ys.at(j) * (dys.at(j) - sum);
    own.store_word(dx + rows.offset(at), i, rounded<X>(result));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    softmax_backward_resident(const X* __restrict__ dy, const X* __restrict__ y, X* __restrict__ dx,
                              unsigned long long* pairs, const Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  const X* const from[2] = {y, dy};
  const Rows rows(memory, from, pairs, p.rows);
  __syncthreads();

  const int task = static_cast<int>(threadIdx.x) / 32 - kWarps;
  if (task == 0) {
    rows.fetch(nullptr, nullptr);
  } else if (task == 1) {
    rows.tell_blocks(Sum{});
  } else if (task > 1) {
    rows.collect(task - 2, Sum{}, [](int, const Pair& all) { return all; });
  } else {
    const int group = static_cast<int>(threadIdx.x) / kRowThreads;
    RowCursor in, out;
    in.advance(rows.rows, group);
    out.advance(rows.rows, group);
    for (int k = group; k < rows.rows + kGroups * kLag; k += kGroups) {
      if (k < rows.rows) {
        rows.wait_for_row(in);
        rows.tell(in, sum_of(rows, in));
        in.advance(rows.rows, kGroups);
      }
      if (k >= kGroups * kLag) {
        write_row(rows, out, rows.wait_for_statistics(out).first, p.scale, dx);
        rows.release(out);
        out.advance(rows.rows, kGroups);
      }
    }
  }
}
