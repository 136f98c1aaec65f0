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
#include "norm_parameters.cuh"
#include "quantize_parameters.cuh"
#include "quantize_vector.cuh"
#include "row_operands.cuh"
#include "row_scales.cuh"

constexpr int kStages = STAGES;
constexpr bool kAmax = AMAX;
static_assert(kStages >= 2, "a row is fetched while another is worked on");

struct Buffers {
  alignas(16) uint4 words[kStages][kCount][kThreads];
  RowSums::Buffers sums;
};
static_assert(sizeof(Buffers) <= SHARED_BYTES, "the plan's size");
static_assert(!HAS_ADD, "rows with a residual go by norm_quantized.cuh");

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) norm_quantized_rows(
    const X* __restrict__ x, const Gamma* __restrict__ gamma,
    BETA_PARAMETER GIVEN_PARAMETER RESULT_PARAMETERS MEAN_PARAMETER float* __restrict__ rstd_out,
    long long rows, long long rows_of_entry, float epsilon) {
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
    if (row < rows) Words{shared.words[stage]}.fetch(part, x + row * kCols, aligned);
    end_group_of_words();
  };
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) fetch(first + s * stride + in_block, s);
  Parameter<Gamma, true> scale(part, gamma);
  Parameter<Beta, false, HAS_BETA> shift(part, beta);
  RowSums row_sums(shared.sums, part, rank);
  const bool alone = rows_of_entry == rows;  // all rows are one entry
  float factor_of_entry = kScales == kTensor && alone ? reciprocal(given[0]) : 1.0f;
  unsigned seen = kAmax ? seen_so_far(amax) : 0;
  float largest = 0.0f;

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
      const Vector<X, kLength> word = Words{shared.words[stage]}.at(part, i, active);
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
      if (LAYER) mean_out[row] = mean;
      rstd_out[row] = rstd;
    }

    const long long entry = alone || !active ? 0 : row / rows_of_entry;
    if (kScales == kTensor && !alone) factor_of_entry = reciprocal(given[entry]);
    if (kAmax && !alone) seen = seen_so_far(amax + entry);
    unsigned char* to = data + row * kCols + part.first;
    const auto write = [&](int i, float factor) {
      if (active && part.owns(i)) write_fp8(to + i * kGroup * kLength, y[i], factor, aligned_data);
    };
    float of_row = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scale.forget(i);
      shift.forget(i);
#pragma unroll
      for (int j = 0; j < kLength; ++j) {
        y[i][j] = normalised(y[i][j], mean, rstd, scale.at(i, j), shift.at(i, j));
        if (!part.owns(i)) y[i][j] = 0.0f;
        if (kAmax) of_row = larger_magnitude(of_row, y[i][j]);
      }
      if constexpr (kScales == kTensor) write(i, factor_of_entry);
    }
    if constexpr (kScales != kTensor) {
      constexpr long long kScalesOfRow = (kCols + kBlock - 1) / kBlock;
      float factors[kCount];
      scale_blocks(y, part, scales + row * kScalesOfRow, active, factors);
#pragma unroll
      for (int i = 0; i < kCount; ++i) write(i, factors[i]);
    }
    if (kAmax && active) largest = larger_magnitude(largest, of_row);
    if (kAmax && !alone) {
      constexpr int kLanes = kGroup < 32 ? kGroup : 32;
      const int key = largest_of_lanes<1, kLanes>(magnitude_key(of_row));
      if (active && threadIdx.x % kLanes == 0) report(amax + entry, seen, key);
    }
  }
  if (kAmax && alone) {
    const int key = largest_of_lanes<1, 32>(magnitude_key(largest));
    if (part.thread % 32 == 0) report(amax, seen, key);
  }
}
