// A small product: what surrounds it takes longer than it does, so it is one launch and one wait
// for memory (sm_90 and newer).
//
//   out[m, n] = sum_k lhs[m, k] rhs[k, n]
//
// Layout: lhs [m, k], or [k, m] with LHS_TURNED; rhs [k, n], or [n, k] with RHS_TURNED; out [m, n].
// Lines begin at multiples of 16 bytes.
// Threads: a block makes a tile of the result, a warp a quarter of it. All that the tile needs of
// both operands is asked for at once, and multiplied by chunks of the contraction as they come.
#include "elements.cuh"
#include "group_ptx.cuh"

using X = ElementOf<X_TYPE>::Type;

constexpr int kThreads = 128;
constexpr int kTile = 32;                // rows and columns
constexpr int kChunk = 64;               // of the contraction
constexpr int kPiece = kPieceBytes / 2;  // elements
constexpr int kControl = 128;            // bytes for barriers
static_assert(MOST_CHUNKS * kBarrierBytes <= kControl, "barriers");

struct Shape {
  int m, n, k;
  int lhs_pitch, rhs_pitch;  // elements from line to line
};

// The part of an operand that a tile needs, in shared memory. With kAlong its lines run along the
// contraction, else across it. They are 16 bytes longer than their elements: those of an 8 x 8
// matrix lie in different banks.
template <bool kAlong>
struct Part {
  Shared data;
  int pitch;  // bytes

  __device__ __forceinline__ Part(Shared at, int chunks)
      : data(at), pitch((kAlong ? chunks * kChunk : kTile) * 2 + kPieceBytes) {}
  __device__ __forceinline__ Shared end(int chunks) const {
    return data + (kAlong ? kTile : chunks * kChunk) * pitch;
  }

  // `from`: the operand at the tile's first row or column, of which there are `left` more.
  __device__ __forceinline__ void load(const X* from, int from_pitch, int chunk, int left,
                                       int depth) const {
    constexpr int kPieces = (kAlong ? kChunk : kTile) / kPiece, kStep = kThreads / kPieces;
    constexpr int kLines = kAlong ? kTile : kChunk;
    const int begin = chunk * kChunk, piece = threadIdx.x % kPieces * kPiece;
    const int at = piece + (kAlong ? begin : 0);
    const int lines = kAlong ? left : depth, elements = kAlong ? depth : left;
#pragma unroll
    for (int i = 0; i < kLines / kStep; ++i) {
      const int line = threadIdx.x / kPieces + i * kStep + (kAlong ? 0 : begin);
      const bool is_there = line < lines && at < elements;
      const long long source = static_cast<long long>(line) * from_pitch + at;
      copy_piece(data + line * pitch + 2 * at, from + (is_there ? source : 0), is_there);
    }
  }

  // 16 rows or columns from `first` on by 16 elements of the contraction from `begin` on, as four
  // 8 x 8 matrices; with kDeepLast those further along the contraction are the last two.
  template <bool kDeepLast>
  __device__ __forceinline__ void fragments(unsigned (&to)[4], int first, int begin,
                                            int lane) const {
    const int late = lane / 16 * 8, odd = lane / 8 % 2 * 8;
    const int side = lane % 8 * kAlong + first + (kDeepLast ? odd : late);
    const int deep = lane % 8 * !kAlong + begin + (kDeepLast ? late : odd);
    const Shared from = data + (kAlong ? side * pitch + 2 * deep : deep * pitch + 2 * side);
    load_fragments<!kAlong>(to, from);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    gemm_small(const X* __restrict__ lhs, const X* __restrict__ rhs, X* __restrict__ out,
               Shape shape) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int row = blockIdx.y * kTile, col = blockIdx.x * kTile;
  const int chunks = (shape.k + kChunk - 1) / kChunk;
  const Shared barriers = shared_address(shared);
  const Part<!LHS_TURNED> rows(barriers + kControl, chunks);
  const Part<RHS_TURNED> cols(rows.end(chunks), chunks);
  if (threadIdx.x == 0) {
    for (int c = 0; c < chunks; ++c) barrier_init(barriers + c * kBarrierBytes, kThreads);
    barriers_visible();
  }
  __syncthreads();
  wait_for_launches_before();
  lhs += LHS_TURNED ? row : static_cast<long long>(row) * shape.lhs_pitch;
  rhs += RHS_TURNED ? static_cast<long long>(col) * shape.rhs_pitch : col;
  for (int c = 0; c < chunks; ++c) {
    rows.load(lhs, shape.lhs_pitch, c, shape.m - row, shape.k);
    cols.load(rhs, shape.rhs_pitch, c, shape.n - col, shape.k);
    arrive_with_pieces(barriers + c * kBarrierBytes);
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int below = warp / 2 * 16, beside = warp % 2 * 16;
  float sums[2][4] = {};
  for (int c = 0; c < chunks; ++c) {
    barrier_wait(barriers + c * kBarrierBytes, 0);
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      unsigned a[4], b[4];
      rows.template fragments<true>(a, below, c * kChunk + k, lane);
      cols.template fragments<false>(b, beside, c * kChunk + k, lane);
      multiply_fragments(sums[0], a, b[0], b[1], X{});
      multiply_fragments(sums[1], a, b[2], b[3], X{});
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = row + below + lane / 4 + i / 2 * 8, at = col + beside + i % 2 * 8 + lane % 4 * 2;
    const float* two = &sums[i % 2][i / 2 * 2];
    if (r >= shape.m || at >= shape.n) continue;
    reinterpret_cast<unsigned*>(out)[(static_cast<long long>(r) * shape.n + at) / 2] =
        rounded_pair(two[0], two[1], X{});
  }
}
