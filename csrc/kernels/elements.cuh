// Element types, and rows of them between memory and registers.
//
// Layout: a thread holds Vector<T, n>, n consecutive elements of a row. A row is cut into
// kVectors vectors; thread t of the row's kThreads owns vectors t, t + kThreads, t + 2·kThreads,
// ... so neighbouring threads touch neighbouring addresses.
//
// Alignment: a vector moves as words of up to 16 bytes. Launches whose plan says so (`align`) have
// every pointer on 16 bytes: those of other arrays are those of copies (csrc/aligned_copies.h).
// Kernels of other launches find out by themselves, and a branch, the same for the whole grid,
// picks words or single elements.
#pragma once
#include "ptx.cuh"

struct BFloat16 {
  unsigned short bits;
};
struct Float16 {
  unsigned short bits;
};

// Type codes of the launch plan (shardops/kernels/norm.py).
template <int kCode>
struct ElementOf;
template <>
struct ElementOf<0> {
  using Type = float;
};
template <>
struct ElementOf<1> {
  using Type = BFloat16;
};
template <>
struct ElementOf<2> {
  using Type = Float16;
};

// kLength elements as memory holds them, packed into 32-bit registers. Held as single elements the
// compiler gives each 16-bit one a register of its own, twice as many.
template <typename T, int kLength>
struct Vector {
  static constexpr int kBytes = sizeof(T) * kLength;
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  unsigned words[kWords];

  __device__ __forceinline__ float at(int i) const { return element(i, T{}); }

  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int w = 0; w < kWords; ++w) forget_origin(words[w]);
  }

 private:
  __device__ __forceinline__ float element(int i, float) const { return __uint_as_float(words[i]); }
  __device__ __forceinline__ float element(int i, BFloat16) const {
    return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
  }
  __device__ __forceinline__ float element(int i, Float16) const {
    return float_from_f16(static_cast<unsigned short>(i % 2 ? words[i / 2] >> 16 : words[i / 2]));
  }
};

__device__ __forceinline__ unsigned rounded_pair(float low, float high, BFloat16) {
  return bf16x2_from_floats(low, high);
}
__device__ __forceinline__ unsigned rounded_pair(float low, float high, Float16) {
  return f16x2_from_floats(low, high);
}

template <typename T, int kLength>
__device__ __forceinline__ Vector<T, kLength> rounded(const float (&from)[kLength]) {
  Vector<T, kLength> to;
#pragma unroll
  for (int w = 0; w < to.kWords; ++w) {
    if constexpr (sizeof(T) == 4) {
      to.words[w] = __float_as_uint(from[w]);
    } else if constexpr (kLength == 1) {
      to.words[w] = rounded_pair(from[0], 0.0f, T{});
    } else {
      to.words[w] = rounded_pair(from[2 * w], from[2 * w + 1], T{});
    }
  }
  return to;
}

// Bytes past the last place where a vector may start.
template <int kLength, typename T>
__device__ __forceinline__ unsigned misplaced_bytes(const T* pointer) {
  constexpr int kBytes = Vector<T, kLength>::kBytes;
  return reinterpret_cast<unsigned long long>(pointer) % (kBytes < 16 ? kBytes : 16);
}
// Never so where the launch has all pointers on 16 bytes. But the compiler does not know that, and
// neither moves loads from behind such a branch to before it nor keeps what they read so long.
template <int kLength, typename T>
__device__ __forceinline__ bool is_misplaced(const T* pointer) {
  return misplaced_bytes<kLength>(pointer) != 0;
}
template <int kLength, typename... Pointers>
__device__ __forceinline__ bool is_aligned(const Pointers*... pointers) {
  return (misplaced_bytes<kLength>(pointers) | ...) == 0;  // no branch, as && would be
}

// kStream: the data is not read again soon, so it should leave the caches first.
template <bool kStream, typename Word>
__device__ __forceinline__ Word load_word(const void* from, int i) {
  const Word* word = static_cast<const Word*>(from) + i;
  return kStream ? __ldcs(word) : *word;
}
template <bool kStream, typename Word>
__device__ __forceinline__ void store_word(void* to, int i, Word value) {
  Word* word = static_cast<Word*>(to) + i;
  if constexpr (kStream) {
    __stcs(word, value);
  } else {
    *word = value;
  }
}

template <bool kAligned, bool kStream, int kLength, typename T>
__device__ __forceinline__ Vector<T, kLength> load(const T* from) {
  Vector<T, kLength> to;
  constexpr int kBytes = Vector<T, kLength>::kBytes;
  if constexpr (kBytes == 2) {
    to.words[0] = load_word<kStream, unsigned short>(from, 0);
  } else if constexpr (kAligned && kBytes >= 16) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 word = load_word<kStream, uint4>(from, i);
      to.words[4 * i] = word.x;
      to.words[4 * i + 1] = word.y;
      to.words[4 * i + 2] = word.z;
      to.words[4 * i + 3] = word.w;
    }
  } else if constexpr (kAligned && kBytes == 8) {
    const uint2 word = load_word<kStream, uint2>(from, 0);
    to.words[0] = word.x;
    to.words[1] = word.y;
  } else if constexpr (kAligned || sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < to.kWords; ++i) to.words[i] = load_word<kStream, unsigned>(from, i);
  } else {
#pragma unroll
    for (int i = 0; i < to.kWords; ++i) {
      const unsigned low = load_word<kStream, unsigned short>(from, 2 * i);
      const unsigned high = load_word<kStream, unsigned short>(from, 2 * i + 1);
      to.words[i] = low | high << 16;
    }
  }
  return to;
}

template <bool kAligned, bool kStream, int kLength, typename T>
__device__ __forceinline__ void store(T* to, const Vector<T, kLength>& from) {
  constexpr int kBytes = Vector<T, kLength>::kBytes;
  if constexpr (kBytes == 2) {
    store_word<kStream>(to, 0, static_cast<unsigned short>(from.words[0]));
  } else if constexpr (kAligned && kBytes >= 16) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      store_word<kStream>(to, i,
                          make_uint4(from.words[4 * i], from.words[4 * i + 1],
                                     from.words[4 * i + 2], from.words[4 * i + 3]));
    }
  } else if constexpr (kAligned && kBytes == 8) {
    store_word<kStream>(to, 0, make_uint2(from.words[0], from.words[1]));
  } else if constexpr (kAligned || sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < from.kWords; ++i) store_word<kStream>(to, i, from.words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < from.kWords; ++i) {
      store_word<kStream>(to, 2 * i, static_cast<unsigned short>(from.words[i]));
      store_word<kStream>(to, 2 * i + 1, static_cast<unsigned short>(from.words[i] >> 16));
    }
  }
}

template <typename T>
__device__ __forceinline__ float element(const T& value) {
  return load<true, false, 1>(&value).at(0);
}
template <bool kStream, typename T>
__device__ __forceinline__ void set_element(T* to, float value) {
  const float one[1] = {value};
  store<true, kStream, 1>(to, rounded<T>(one));
}

// The part of a row that one thread owns, all of it in registers.
template <int kVectors, int kThreads, int kLength>
struct RowSlice {
  static constexpr int kCount = (kVectors + kThreads - 1) / kThreads;
  static constexpr bool kExact = kCount * kThreads == kVectors;

  static __device__ __forceinline__ int column(int i) {
    return (i * kThreads + static_cast<int>(threadIdx.x)) * kLength;
  }
  static __device__ __forceinline__ bool owns(int i) {
    return kExact || i * kThreads + static_cast<int>(threadIdx.x) < kVectors;
  }

  // Vectors past the row's end, and those of an inactive row, are zero. One address a thread: the
  // others are constants away.
  template <bool kStream, typename T>
  static __device__ __forceinline__ void load_all(Vector<T, kLength> (&to)[kCount], const T* row,
                                                  bool active) {
    const T* const own = row + column(0);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (active && owns(i)) {
        to[i] = load<true, kStream, kLength>(own + i * kThreads * kLength);
      } else {
        to[i] = Vector<T, kLength>{};
      }
    }
  }

  template <bool kStream, typename T>
  static __device__ __forceinline__ void store_all(T* row, const Vector<T, kLength> (&from)[kCount],
                                                   bool active) {
    if (!active) return;
    T* const own = row + column(0);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (owns(i)) store<true, kStream, kLength>(own + i * kThreads * kLength, from[i]);
    }
  }
};
