// In the place of group_ptx.cuh.
#pragma once

struct BFloat16;
struct Float16;
constexpr int kPieceBytes = 16;
constexpr int kGroupThreads = 128;
constexpr int kGroupCols = 128;
namespace host {
// What the lanes of each warp tell each other, in two buffers in turn as those of shuffles.
struct Told {
  Shared row;
  unsigned a[4], b[2];
};
static std::vector<Told> told[2];

// Tells the warp's other lanes, and returns what all of them told: from lane 0 on.
inline const Told* tell(const Told& mine) {
  std::vector<Told>& buffer = told[me().shuffles++ % 2];
  buffer.resize(fibers.size());
  buffer[current] = mine;
  stop_at(kAtWarp);
  return &buffer[current / 32 * 32];
}
inline unsigned half_of(unsigned word, int i) { return word >> 16 * i & 0xffff; }
inline float value_of(unsigned bits, BFloat16*) { return __uint_as_float(bits << 16); }
inline float value_of(unsigned bits, Float16*) { return float_from_f16(bits); }
}  // namespace host

inline void copy_piece(Shared to, const void* from, bool there) {
  static const uint4 zeros = {};
  host::must(to % 16 == 0 && reinterpret_cast<unsigned long>(from) % 16 == 0);
  host::on_the_way.push_back({host::mine(to), there ? from : &zeros, kPieceBytes, nullptr});
}
inline void wait_for_pieces() { host::land(); }
inline void arrive_with_pieces(Shared barrier) {
  host::on_the_way.push_back({nullptr, nullptr, 0, &host::barrier_at(barrier), true});
}
template <bool kTurned>
void load_fragments(unsigned (&to)[4], Shared row) {
  host::must(row % 16 == 0);
  const host::Told* all = host::tell({row});
  const int lane = static_cast<int>(host::current % 32), own = lane / 4, pair = lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    unsigned short two[2];
    for (int j = 0; j < 2; ++j) {
      const int line = kTurned ? pair + j : own, at = kTurned ? own : pair + j;
      std::memcpy(&two[j], host::mine(all[8 * i + line].row) + 2 * at, 2);
    }
    to[i] = two[0] | static_cast<unsigned>(two[1]) << 16;
  }
}
inline unsigned long long described(Shared at, int beside) {
  host::must(at % 16 == 0 && beside % 16 == 0);
  return at | static_cast<unsigned long long>(beside) << 32;
}
template <int kTurned, typename X>
void multiply_group(float (&sums)[64], const unsigned (&a)[4], unsigned long long b, int more, X) {
  const host::Told* all = host::tell({0, {a[0], a[1], a[2], a[3]}});
  const Shared first = static_cast<Shared>(b);
  const unsigned beside = b >> 32;
  const int lane = static_cast<int>(host::current % 32);
  X* const of = nullptr;
  for (int i = 0; i < 64; ++i) {
    if (!more) sums[i] = 0.0f;
    const int col = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      Shared at =
          kTurned ? first + col / 64 * beside + k * 128 + col % 64 * 2 : first + col * 128 + k * 2;
      at ^= (at >> 7 & 7) << 4;  // the order of pieces in a line
      unsigned short right;
      std::memcpy(&right, host::mine(at), 2);
      const unsigned left = all[lane / 4 * 4 + k % 8 / 2].a[i / 2 % 2 + k / 8 * 2];
      sums[i] += host::value_of(host::half_of(left, k % 2), of) * host::value_of(right, of);
    }
  }
}
template <typename X>
void multiply_fragments(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, X) {
  const host::Told* all = host::tell({0, {a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int lane = static_cast<int>(host::current % 32);
  X* const of = nullptr;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, col = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const unsigned x = all[row * 4 + k % 8 / 2].a[i / 2 + k / 8 * 2];
      const unsigned y = all[col * 4 + k % 8 / 2].b[k / 8];
      sums[i] +=
          host::value_of(host::half_of(x, k % 2), of) * host::value_of(host::half_of(y, k % 2), of);
    }
  }
}
inline void group_begins() {}
inline void group_ends(float (&)[64]) {}
inline void store_fragments(Shared row, const unsigned (&from)[4]) {
  const host::Told* all = host::tell({row});
  const int lane = static_cast<int>(host::current % 32);
  for (int i = 0; i < 4; ++i) {
    std::memcpy(host::mine(all[8 * i + lane / 4].row) + lane % 4 * 4, &from[i], 4);
  }
}
