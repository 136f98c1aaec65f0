// In the place of quantize_ptx.cuh. Blocks run one after the other, in the order of their numbers.
#pragma once

inline float flushed(float value) {
  const unsigned bits = __float_as_uint(value);
  return (bits & 0x7f800000u) == 0 ? __uint_as_float(bits & 0x80000000u) : value;
}
inline float flushed_product(float a, float b) { return flushed(flushed(a) * flushed(b)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }
inline float larger_magnitude(float magnitude, float value) {
  const float other = std::fabs(value);
  if (magnitude != magnitude || other != other) return __uint_as_float(0x7fffffffu);
  return magnitude > other ? magnitude : other;
}
inline unsigned larger_pair(unsigned a, unsigned b) {
  const auto larger_half = [](unsigned c, unsigned d) { return c > d ? c : d; };
  return larger_half(a & 0xffffu, b & 0xffffu) | larger_half(a >> 16, b >> 16) << 16;
}
inline void fetch_line(const void*) {}
inline float reciprocal(float value) { return 1.0f / value; }
template <typename T>
void advance(T*& place, long long by) {
  place += by;
}
inline void raise_to(unsigned* largest, unsigned value) {
  if (value > *largest) *largest = value;
}
inline void raise_shared(int* largest, int value) {
  if (value > *largest) *largest = value;
}
inline unsigned seen_so_far(const unsigned* largest) { return *largest; }
inline void fetch_word(uint4* to, const void* from) { std::memcpy(to, from, sizeof(*to)); }
inline void wait_for_words() {}
inline void end_group_of_words() {}
template <int kLeft>
void wait_for_groups() {}
