// A product of a short contraction: the result is what moves (sm_90a).
//
//   out[m, n] = sum_k lhs[m, k] rhs[k, n],  k <= DEPTH
//
// Layout: lhs [m, k], or [k, m] with LHS_TURNED; rhs [k, n], or [n, k] with RHS_TURNED; out [m, n].
// Lines begin at multiples of 16 bytes.
// Threads: a block goes along strips of 64 GROUPS rows, 128 columns at a time. GROUPS groups of
// four warps have 64 rows each, whose lhs they hold in registers; four more warps bring columns of
// rhs into STAGES places. Nothing but these places ties the warps of different groups together, so
// that some write while others multiply: what leaves does not pause.
#include "arrivals.cuh"
#include "elements.cuh"
#include "group_ptx.cuh"

using X = ElementOf<X_TYPE>::Type;

constexpr int kPiece = kPieceBytes / 2;  // elements
constexpr int kWriters = 4 * GROUPS;     // warps
constexpr int kThreads = 32 * kWriters + kGroupThreads;
constexpr int kRows = 64 * GROUPS, kCols = kGroupCols;
constexpr int kSteps = DEPTH / 16;
constexpr int kLine = 128;  // bytes of a line of rhs in its place
constexpr int kStageBytes = DEPTH * kCols * 2;
constexpr int kControl = 1024;  // for barriers; a multiple of it, so that places begin at such
// Of each writer. Lines are 16 bytes longer than their elements: those of an 8 x 8 matrix lie in
// different banks.
constexpr int kResultPitch = 2 * kCols + kPieceBytes;
constexpr int kOwnBytes = 16 * kResultPitch;
static_assert(DEPTH <= 64 && (!RHS_TURNED || DEPTH == 64), "a line of rhs, whole ones turned");
static_assert(2 * STAGES * kBarrierBytes <= kControl, "barriers");
static_assert(kControl + STAGES * kStageBytes + kWriters * kOwnBytes <= SHARED_BYTES, "the plan");

struct Shape {
  int m, n, k;
  int lhs_pitch, rhs_pitch;  // elements from line to line
};

// The tiles of a block, each beside the one before it.
struct Tiles {
  int across, begin, end;

  __device__ __forceinline__ Tiles(const Shape& s) : across((s.n + kCols - 1) / kCols) {
    const long long all = static_cast<long long>((s.m + kRows - 1) / kRows) * across;
    begin = static_cast<int>(all * blockIdx.x / gridDim.x);
    end = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
  }
  __device__ __forceinline__ int row(int tile) const { return tile / across * kRows; }
  __device__ __forceinline__ int col(int tile) const { return tile % across * kCols; }
};

// Places for columns of rhs, used in turn.
struct Ring {
  Shared there, left, data;  // barriers: a place is filled; all writers have left it

  __device__ __forceinline__ explicit Ring(Shared shared)
      : there(shared), left(shared + STAGES * kBarrierBytes), data(shared + kControl) {}
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(there + i * kBarrierBytes, kGroupThreads);
      barrier_init(left + i * kBarrierBytes, kWriters * kWarpArrivals);
    }
    barriers_visible();
  }
  static __device__ __forceinline__ Shared of(Shared barriers, int turn) {
    return barriers + turn % STAGES * kBarrierBytes;
  }
  __device__ __forceinline__ Shared place(int turn) const {
    return data + turn % STAGES * kStageBytes;
  }
};

// In lines as `described` wants them: [columns / 64, DEPTH] of them, turned a line a column.
__device__ __forceinline__ void load_rhs(Shared to, const X* rhs, int col, const Shape& s,
                                         int thread) {
  constexpr int kLines = RHS_TURNED ? kCols : DEPTH, kBlocks = kStageBytes / kLine / kLines;
  constexpr int kPieces = kLine / kPieceBytes, kStep = kGroupThreads / kPieces;
  const int first = thread / kPieces, piece = thread % kPieces;
  const int lines = RHS_TURNED ? s.n - col : s.k;
  rhs += RHS_TURNED ? static_cast<long long>(col) * s.rhs_pitch : col;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int at = b * (kLine / 2) + piece * kPiece;
    const bool along = at < (RHS_TURNED ? s.k : s.n - col);
#pragma unroll
    for (int i = 0; i < kLines / kStep; ++i) {
      const int line = first + i * kStep;
      const bool is_there = along && line < lines;
      const long long from = static_cast<long long>(line) * s.rhs_pitch + at;
      copy_piece(to + (b * kLines + line) * kLine + ((piece ^ line) & 7) * kPieceBytes,
                 rhs + (is_there ? from : 0), is_there);
    }
  }
}

__device__ __forceinline__ void bring(const Ring& ring, const Tiles& tiles, const X* rhs,
                                      const Shape& s) {
  const int thread = static_cast<int>(threadIdx.x) - 32 * kWriters;
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    const int turn = tile - tiles.begin;
    if (turn >= STAGES) barrier_wait(Ring::of(ring.left, turn), (turn / STAGES - 1) & 1);
    load_rhs(ring.place(turn), rhs, tiles.col(tile), s, thread);
    arrive_with_pieces(Ring::of(ring.there, turn));
  }
}

// A warp's 16 rows of lhs, as fragments; they come through the warp's own shared memory.
struct Rows {
  static constexpr int kLines = LHS_TURNED ? DEPTH : 16, kElements = LHS_TURNED ? 16 : DEPTH;
  static constexpr int kPitch = 2 * kElements + kPieceBytes;
  static_assert(kLines * kPitch <= kOwnBytes, "lines of lhs");
  unsigned fragments[kSteps][4];

  __device__ __forceinline__ void load(Shared own, const X* lhs, int row, const Shape& s,
                                       int lane) {
    constexpr int kPieces = kElements / kPiece, kStep = 32 / kPieces;
    const int first = lane / kPieces, at = lane % kPieces * kPiece;
    const int lines = LHS_TURNED ? s.k : s.m - row, elements = LHS_TURNED ? s.m - row : s.k;
    const long long begin = LHS_TURNED ? row : static_cast<long long>(row) * s.lhs_pitch;
#pragma unroll
    for (int i = 0; i < kLines / kStep; ++i) {
      const int line = first + i * kStep;
      const bool is_there = line < lines && at < elements;
      const long long from = begin + static_cast<long long>(line) * s.lhs_pitch + at;
      copy_piece(own + line * kPitch + 2 * at, lhs + (is_there ? from : 0), is_there);
    }
    wait_for_pieces();
    __syncwarp();
    // Among the four 8 x 8 matrices rows come first, then the contraction.
    const int line = LHS_TURNED ? lane / 16 * 8 + lane % 8 : lane % 16;
    const int half = LHS_TURNED ? lane / 8 % 2 : lane / 16;
    const Shared mine = own + line * kPitch + half * kPieceBytes;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      load_fragments<LHS_TURNED>(fragments[k], mine + k * (LHS_TURNED ? 16 * kPitch : 32));
    }
    __syncwarp();
  }
};

__device__ __forceinline__ void multiply(float (&sums)[64], const Rows& rows, Shared rhs) {
  publish_to_copies();  // the tensor cores read as copies do
  group_begins();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const Shared at = rhs + k * (RHS_TURNED ? 32 : 16 * kLine);
    multiply_group<!RHS_TURNED>(sums, rows.fragments[k], described(at, DEPTH * kLine), k > 0, X{});
  }
  group_ends(sums);
}

// The warp's 16 rows of a tile, through its own shared memory: whole lines of the caches leave, and
// as the last of their data, which is a twentieth faster than without.
__device__ __forceinline__ void write(const float (&sums)[64], Shared own, X* out, int row, int col,
                                      const Shape& s, int lane) {
  const Shared to = own + lane % 16 * kResultPitch + lane / 16 * kPieceBytes;
#pragma unroll
  for (int j = 0; j < kCols / 16; ++j) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = rounded_pair(sums[8 * j + 2 * i], sums[8 * j + 2 * i + 1], X{});
    }
    store_fragments(to + 32 * j, words);
  }
  __syncwarp();
  const int first = row + lane / 16, at = col + lane % 16 * kPiece;
  const Shared from = own + lane / 16 * kResultPitch + lane % 16 * kPieceBytes;
  X* const line = out + static_cast<long long>(first) * s.n + at;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    Vector<X, kPiece> piece;
    load_words<4>(from + 2 * i * kResultPitch, piece.words);
    if (at < s.n && first + 2 * i < s.m) {
      store<true, true>(line + static_cast<long long>(2 * i) * s.n, piece);
    }
  }
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gemm_flat(const X* __restrict__ lhs, const X* __restrict__ rhs, X* __restrict__ out,
              Shape shape) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring ring(shared_address(shared));
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  const Tiles tiles(shape);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp >= kWriters) {
    bring(ring, tiles, rhs, shape);
    return;
  }
  const Shared own = ring.data + STAGES * kStageBytes + warp * kOwnBytes;
  Rows rows;
  int held = -1;
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    const int turn = tile - tiles.begin, row = tiles.row(tile) + warp * 16;
    if (row != held) rows.load(own, lhs, row, shape, lane);
    held = row;
    barrier_wait(Ring::of(ring.there, turn), turn / STAGES & 1);
    float sums[64];
    multiply(sums, rows, ring.place(turn));
    warp_arrives(Ring::of(ring.left, turn));
    write(sums, own, out, row, tiles.col(tile), shape, lane);
  }
}
