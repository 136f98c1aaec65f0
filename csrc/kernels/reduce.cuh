// Sums over the threads of a row, in an order fixed by the launch shape: the same bits every run.
//
// A row's threads are threadIdx.x in [0, kThreads); threadIdx.y tells the block's rows apart.
// kThreads <= 32: a power of two, all inside one warp, shuffles only.
// kThreads > 32: whole warps; one value a warp goes through shared memory. Two buffers used in turn
// make one barrier a reduction enough: whoever writes a buffer again has passed the barrier of the
// reduction between, which all threads reach only after they read the buffer.
#pragma once
#include "lanes.cuh"
#include "mean.cuh"

// So many warps' values are read one by one by every thread, which is less than the 5 shuffles of
// a tree; whole 16-byte words of them, hence the padding.
[[maybe_unused]] constexpr int kMaxSerialWarps = 16;
__device__ constexpr int padded(int warps) { return (warps + 3) / 4 * 4; }

template <int kThreads, int kRows, int kMaxSums>
struct RowSum {
  static constexpr int kWarps = kThreads > 32 ? kThreads / 32 : 1;
  struct Buffers {
    alignas(16) float values[2][kRows][kMaxSums][padded(kWarps)];
  };

  Buffers& buffers;
  int turn;

  __device__ explicit RowSum(Buffers& shared) : buffers(shared), turn(0) {}

  // Every thread of the block must call this, also those of rows past the end.
  template <int kSums>
  __device__ __forceinline__ void operator()(float (&sums)[kSums]) {
    static_assert(kSums <= kMaxSums, "more sums than the buffers hold");
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s] = sum_lanes<(kThreads < 32 ? kThreads : 32)>(sums[s]);
    if constexpr (kThreads > 32) {
      const int lane = threadIdx.x % 32;
      auto& mine = buffers.values[turn][threadIdx.y];
      turn ^= 1;
      if (lane == 0) {
#pragma unroll
        for (int s = 0; s < kSums; ++s) mine[s][threadIdx.x / 32] = sums[s];
      }
      __syncthreads();
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
        if constexpr (kWarps <= kMaxSerialWarps) {
          sums[s] = 0.0f;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) sums[s] += mine[s][w];
        } else {
          sums[s] = sum_lanes<32>(lane < kWarps ? mine[s][lane] : 0.0f);
        }
      }
    }
  }
};

// Mean and sum of squared distances from the mean, of a row held in registers, with one barrier:
// each warp centres its part on its own mean, and the parts are merged by
//   squares = sum_w (squares_w + count_w · (mean_w - mean)^2)     (Chan, Golub, LeVeque 1983)
// so nothing is lost to a difference of large sums.
template <int kThreads, int kRows, int kVectors, int kLength>
struct RowMoments {
  static constexpr int kWarps = kThreads > 32 ? kThreads / 32 : 1;
  static constexpr int kCols = kVectors * kLength;
  static_assert((kWarps - 1) * 32 < kVectors, "each warp owns a part");
  struct Buffers {
    alignas(16) float values[2][kRows][2][padded(kWarps)];
  };

  Buffers& buffers;
  int turn;

  __device__ explicit RowMoments(Buffers& shared) : buffers(shared), turn(0) {}

  // Elements of the row that a warp owns, and one of them as a share.
  static __device__ constexpr float count(int warp) {
    int vectors = 0;
    for (int first = warp * 32; first < kVectors; first += kThreads) {
      vectors += kVectors - first < 32 ? kVectors - first : 32;
    }
    return static_cast<float>(vectors * kLength);
  }
  static __device__ constexpr float share(int warp) { return 1.0f / count(warp); }

  // `sum` is the thread's own; `squares_about(m)` its sum of (value - m)^2. Every thread of the
  // block must call this.
  template <typename Squares>
  __device__ __forceinline__ void operator()(float sum, const Squares& squares_about, float& mean,
                                             float& squares) {
    sum = sum_lanes<(kThreads < 32 ? kThreads : 32)>(sum);
    if constexpr (kThreads <= 32) {
      mean = mean_of<kCols>(sum);
      squares = sum_lanes<kThreads>(squares_about(mean));
    } else {
      const int lane = threadIdx.x % 32;
      const int warp = threadIdx.x / 32;
      auto& shared = buffers.values[turn][threadIdx.y];
      turn ^= 1;
      squares = sum_lanes<32>(squares_about(mean_of(sum, count_of(warp), share_of(warp))));
      if (lane == 0) {
        shared[0][warp] = sum;
        shared[1][warp] = squares;
      }
      __syncthreads();
      if constexpr (kWarps <= kMaxSerialWarps) {
        sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += shared[0][w];
        mean = mean_of<kCols>(sum);
        squares = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          squares += squares_of_warp(shared, w, count(w), share(w), mean);
        }
      } else {
        const bool reads = lane < kWarps;
        mean = mean_of<kCols>(sum_lanes<32>(reads ? shared[0][lane] : 0.0f));
        const float own = count_of(lane);
        squares =
            sum_lanes<32>(reads ? squares_of_warp(shared, lane, own, share_of(lane), mean) : 0.0f);
      }
    }
  }

 private:
  // Warps before kFullWarps own as many vectors as the first, one may own a part of the last turn,
  // and the rest own a turn less: no division while a kernel runs.
  static constexpr int kLastTurn = kVectors % kThreads;
  static constexpr int kFullWarps = kLastTurn / 32;
  template <typename Of>
  static __device__ __forceinline__ float of_warp(int warp, const Of& of) {
    if constexpr (kLastTurn == 0) return of(0);
    const float last = kLastTurn % 32 != 0 && warp == kFullWarps ? of(kFullWarps) : of(kWarps - 1);
    return warp < kFullWarps ? of(0) : last;
  }
  static __device__ __forceinline__ float count_of(int warp) {
    return of_warp(warp, [](int w) { return count(w); });
  }
  static __device__ __forceinline__ float share_of(int warp) {
    return of_warp(warp, [](int w) { return share(w); });
  }

  static __device__ __forceinline__ float squares_of_warp(const float (&shared)[2][padded(kWarps)],
                                                          int warp, float owned, float share,
                                                          float mean) {
    const float distance = mean_of(shared[0][warp], owned, share) - mean;
    return shared[1][warp] + owned * distance * distance;
  }
};
