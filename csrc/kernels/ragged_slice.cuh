// The part of a ragged row (ragged.cuh) that one thread has in registers: whole words, and one of
// the row's edges.
//
// Words lie over all threads of the row, word t + i · THREADS_PER_ROW with thread t; the last
// threads, which have the fewest words, have an edge each.
#pragma once
#include "ragged.cuh"

constexpr int kGroup = THREADS_PER_ROW;
constexpr int kCount = (kMostWords + kGroup - 1) / kGroup;  // words of a thread
constexpr int kStep = kGroup * kLength;                     // columns between them
static_assert(kGroup >= 2 * kLength, "an edge a thread");
static_assert(kGroup > 32 ? kGroup % 32 == 0 : (kGroup & (kGroup - 1)) == 0, "warps or parts");

// 16 bytes from any element on.
template <typename T>
__device__ __forceinline__ Vector<T, 16 / sizeof(T)> load_anywhere(const T* from) {
  constexpr int kWord = 16 / static_cast<int>(sizeof(T));
  const int past = place_in_word<kWord>(from);
  const T* const word = from - past;
  const auto low = load<true, false, kWord>(word);
  const auto high = load<true, false, kWord>(past > 0 ? word + kWord : word);
  unsigned both[8];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    both[w] = low.words[w];
    both[w + 4] = high.words[w];
  }
  const int bytes = past * static_cast<int>(sizeof(T));
#pragma unroll
  for (int w = 0; w < 6; ++w) both[w] = bytes & 8 ? both[w + 2] : both[w];
#pragma unroll
  for (int w = 0; w < 5; ++w) both[w] = bytes & 4 ? both[w + 1] : both[w];
  Vector<T, kWord> to;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    to.words[w] = sizeof(T) == 4 ? both[w] : __funnelshift_r(both[w], both[w + 1], bytes % 4 * 8);
  }
  return to;
}

class RaggedSlice {
 public:
  // `shift`: elements between the start of a word and the row.
  __device__ __forceinline__ explicit RaggedSlice(int shift) {
    const WholeWords whole(shift);
    before_ = whole.before;
    words_ = whole.words;
    to_edge_ = whole.edge_column(kGroup - 1 - thread()) - whole.before - thread() * kLength;
    // Or they are computed again, from a pointer, wherever they are used.
    forget_origin(before_);
    forget_origin(words_);
    forget_origin(to_edge_);
  }

  __device__ __forceinline__ bool owns(int i) const {
    return (i + 1) * kGroup <= kLeastWords || i * kGroup + thread() < words();
  }
  __device__ __forceinline__ bool has_edge() const { return kGroup - 1 - thread() < edges(); }
  // Of the first word; the others follow kStep apart.
  __device__ __forceinline__ int column() const { return before() + thread() * kLength; }
  // From there to the edge.
  __device__ __forceinline__ int to_edge() const { return static_cast<int>(to_edge_); }

  // Parameters lie with their columns turned: the first whole word is in front, what is before it
  // comes last. Then their whole words are words too.
  template <typename T>
  __device__ __forceinline__ const T* word_of(const T* turned, int i) const {
    return turned + (i * kGroup + thread()) * kLength;
  }
  template <typename T>
  __device__ __forceinline__ const T* edge_of(const T* turned) const {
    const int at = thread() * kLength + to_edge();
    return turned + (at < 0 ? at + kCols : at);
  }
  // Of a parameter that is turned: the column of its element `at`, and where its whole words end.
  __device__ __forceinline__ int turned_column(int at) const {
    const int column = at + before();
    return column < kCols ? column : column - kCols;
  }
  __device__ __forceinline__ int end_of_words() const { return words() * kLength; }

  // Elements of a row that a warp of its threads owns.
  __device__ __forceinline__ int elements_of(int warp) const {
    int owned = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int left = words() - i * kGroup - warp * 32;
      owned += left < 0 ? 0 : left < 32 ? left : 32;
    }
    return owned * kLength + (warp == (kGroup - 1) / 32 ? edges() : 0);
  }

 private:
  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int before() const { return static_cast<int>(before_); }
  __device__ __forceinline__ int words() const { return static_cast<int>(words_); }
  __device__ __forceinline__ int edges() const { return kCols - words() * kLength; }

  unsigned before_, words_, to_edge_;
};

// A parameter on its way to where it lies turned, on 16 bytes, by all threads of a block of kBlock:
// 16 bytes of it a turn and thread, and in the end what is beside its whole words.
template <int kBlock, typename T>
struct Turning {
  static constexpr int kPiece = 16 / static_cast<int>(sizeof(T));  // elements
  static constexpr int kTurns = (kMostWords * kLength / kPiece + kBlock - 1) / kBlock;
  using Piece = Vector<T, kPiece>;

  const RaggedSlice& slice;
  const T* __restrict__ from;
  T* to;

  __device__ __forceinline__ Piece load(int turn) const {
    const int at = place(turn);
    return at < end() ? load_anywhere(from + slice.turned_column(at)) : Piece{};
  }
  __device__ __forceinline__ void store(int turn, const Piece& piece) const {
    const int at = place(turn);
    if (at < end()) ::store<true, false, kPiece>(to + at, piece);
  }
  __device__ __forceinline__ void copy_rest() const {
    const int at = end() + thread();
    if (at < kCols) to[at] = from[slice.turned_column(at)];
  }

 private:
  static __device__ __forceinline__ int thread() {
    return static_cast<int>(threadIdx.y * kGroup + threadIdx.x);
  }
  static __device__ __forceinline__ int place(int turn) {
    return (turn * kBlock + thread()) * kPiece;
  }
  __device__ __forceinline__ int end() const { return slice.end_of_words() / kPiece * kPiece; }
};

// What a thread has of a row, packed.
template <typename T>
struct RaggedPart {
  Vector<T, kLength> words[kCount];
  Vector<T, 1> edge;

  // `from`: the thread's first word. What it does not own is zero.
  __device__ __forceinline__ void load(const RaggedSlice& slice, const T* from, bool active) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      words[i] = {};
      if (active && slice.owns(i)) {
        words[i] = ::load<true, true, kLength>(from + i * kStep);
      }
    }
    edge = {};
    if (active && slice.has_edge()) edge = ::load<true, true, 1>(from + slice.to_edge());
  }

  __device__ __forceinline__ void store(const RaggedSlice& slice, T* to) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (slice.owns(i)) ::store<true, true, kLength>(to + i * kStep, words[i]);
    }
    if (slice.has_edge()) ::store<true, true, 1>(to + slice.to_edge(), edge);
  }
};
