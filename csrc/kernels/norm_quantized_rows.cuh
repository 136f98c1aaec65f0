// LayerNorm and RMSNorm, forward, their values quantised along rows: rows of whole words of 16
// bytes, a few threads' numbers at a time.
//
//   h, mean, rstd as in norm_forward.cuh; y in float32 as in norm_values.cuh
//   data, scales, amax of y as in quantize_tiles.cuh
//
// Layout: as in norm_quantized.cuh.
// Threads: block (THREADS_PER_ROW, ROWS_PER_BLOCK), threadIdx.y picks the row; the grid strides
// over rows. Where a block or a cluster shares a row, it has one at a time (row_sums.cuh). A thread
// fetches its words of the rows to come into places of its own in shared memory, so nobody waits
// for another's; gamma and beta stay in registers, in float32 where OPEN.
#include "quantize_vector.cuh"
#include "row_operands.cuh"
#if SCALES
#include "row_scales.cuh"
#endif

constexpr int kStages = STAGES;
static_assert(kStages >= 2, "a row is fetched while another is worked on");

struct Buffers {
  alignas(16) uint4 words[kStages][1 + HAS_ADD][kCount][kThreads];
  RowSums::Buffers sums;
};
static_assert(sizeof(Buffers) <= SHARED_BYTES, "the plan's size");

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    norm_quantized_rows(const X* __restrict__ x, const Gamma* __restrict__ gamma,
#if HAS_BETA
                        const Beta* __restrict__ beta,
#endif
#if HAS_ADD
                        const X* __restrict__ add,
#endif
#if SCALES == 0
                        const float* __restrict__ given,
#endif
                        unsigned char* __restrict__ data,
#if SCALES
                        Scale* __restrict__ scales,
#endif
#if AMAX
                        unsigned* __restrict__ amax,
#endif
#if HAS_ADD
                        X* __restrict__ h,
#endif
#if LAYER
                        float* __restrict__ mean_out,
#endif
                        float* __restrict__ rstd_out, long long rows, long long rows_of_entry,
                        float epsilon) {
  extern __shared__ __align__(128) unsigned char memory[];
  Buffers& shared = *reinterpret_cast<Buffers*>(memory);
  const unsigned rank = kCluster == 1 ? 0 : cluster_rank();
  const Part part(rank);
  const bool aligned = is_aligned<kLength>(x);
  const bool aligned_data = reinterpret_cast<unsigned long long>(data) % kLength == 0;
  const long long stride = static_cast<long long>(gridDim.x / kCluster) * kRowsAtOnce;
  long long first = static_cast<long long>(blockIdx.x / kCluster) * kRowsAtOnce;
  const int in_block = kRowsAtOnce == 1 ? 0 : static_cast<int>(threadIdx.y);

  const auto fetch = [&](long long row, int stage) {
    if (row < rows) {
      Words{shared.words[stage][0]}.fetch(part, x + row * kCols, aligned);
#if HAS_ADD
      Words{shared.words[stage][1]}.fetch(part, add + row * kCols, is_aligned<kLength>(add));
#endif
    }
    end_group_of_words();
  };
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) fetch(first + s * stride + in_block, s);
  Parameter<Gamma, true> scale(part, gamma);
#if HAS_BETA
  Parameter<Beta, false> shift(part, beta);
#endif
  RowSums row_sums(shared.sums, part, rank);
  const bool alone = rows_of_entry == rows;  // all rows are one entry
#if SCALES == 0
  float factor_of_entry = alone ? reciprocal(given[0]) : 0.0f;
#endif
#if AMAX
  unsigned seen = seen_so_far(amax);
  float largest = 0.0f;
#endif

  int stage = 0;
  // The bound is the block's first row: all its threads make the same number of turns.
  for (; first < rows; first += stride) {
    const long long row = first + in_block;
    const bool active = kRowsAtOnce == 1 || row < rows;
    wait_for_groups<kStages - 1>();
    float y[kCount][kLength];
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Vector<X, kLength> word = Words{shared.words[stage][0]}.at(part, i, active);
#if HAS_ADD
      word = sum_of<kLength>(word, Words{shared.words[stage][1]}.at(part, i, active));
      if (active && part.owns(i)) {
        X* to = h + row * kCols + part.column(i);
        if (is_aligned<kLength>(h)) {
          store<true, true, kLength>(to, word);
        } else {
          store<false, true, kLength>(to, word);
        }
      }
#endif
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        y[i][j] = word.at(j);
        if (LAYER) sums[j % 2] += y[i][j];
      }
    }
    fetch(row + kStages * stride, stage);
    stage = stage == kStages - 1 ? 0 : stage + 1;

    const auto squares_about = [&](float centre) {
      float squares[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (!part.owns(i)) continue;  // (0 - centre)^2 must not count
#pragma unroll
        for (int j = 0; j < kLength; ++j) {
          const float centred = LAYER ? y[i][j] - centre : y[i][j];
          squares[j % 2] += centred * centred;
        }
      }
      return squares[0] + squares[1];
    };
    float mean, squares;
    row_sums(sums[0] + sums[1], squares_about, mean, squares);
    const float rstd = inverse_root(squares * (1.0f / kCols) + epsilon);
    if (active && threadIdx.x == 0 && rank == 0) {
#if LAYER
      mean_out[row] = mean;
#endif
      rstd_out[row] = rstd;
    }

#if SCALES == 0 || AMAX
    const long long entry = alone || !active ? 0 : row / rows_of_entry;
#endif
#if SCALES == 0
    if (!alone) factor_of_entry = reciprocal(given[entry]);
#endif
#if AMAX
    float of_row = 0.0f;
    if (!alone) seen = seen_so_far(amax + entry);
#endif
    unsigned char* to = data + row * kCols + part.first;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scale.forget(i);
#if HAS_BETA
      shift.forget(i);
#endif
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
#if HAS_BETA
        const float b = shift.at(i, j);
#else
        constexpr float b = 0.0f;
#endif
        y[i][j] = normalised(y[i][j], mean, rstd, scale.at(i, j), b);
        if (!part.owns(i)) y[i][j] = 0.0f;
#if AMAX
        of_row = larger_magnitude(of_row, y[i][j]);
#endif
      }
#if SCALES == 0
      if (active && part.owns(i)) {
        write_fp8(to + i * kGroup * kLength, y[i], factor_of_entry, aligned_data);
      }
#endif
    }
#if SCALES
    constexpr long long kScalesOfRow = (kCols + kBlock - 1) / kBlock;
    float factors[kCount];
    scale_blocks(y, part, scales + row * kScalesOfRow, active, factors);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (active && part.owns(i)) {
        write_fp8(to + i * kGroup * kLength, y[i], factors[i], aligned_data);
      }
    }
#endif
#if AMAX
    if (active) largest = larger_magnitude(largest, of_row);
    if (!alone) {
      constexpr int kLanes = kGroup < 32 ? kGroup : 32;
      const int key = largest_of_lanes<1, kLanes>(magnitude_key(of_row));
      if (active && threadIdx.x % kLanes == 0) report(amax + entry, seen, key);
    }
#endif
  }
#if AMAX
  if (alone) {
    const int key = largest_of_lanes<1, 32>(magnitude_key(largest));
    if (part.thread % 32 == 0) report(amax, seen, key);
  }
#endif
}
