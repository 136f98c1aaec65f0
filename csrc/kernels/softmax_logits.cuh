// The mathematics of the forward kernels.
//
// With v = sign(scale) · x, so that the largest v has the largest logit,
//   y = exp(scale · (x - x_top)) / sum = 2^((v / 2 - top / 2) · (2 log2(e) |scale|)) / sum.
// The difference is taken before the product: it is exact where it matters, and infinite only where
// v is, for halves cannot overflow. A hidden key has v = -inf and weight 0. Where the sum is not
// positive, either no key is seen and y is 0, or what is seen has no softmax and is NaN, as
// jax.nn.softmax has it: NaN, +inf, -inf alone; hidden keys are 0 there too.
#pragma once
#include "lanes.cuh"
#include "softmax_hiding.cuh"

// SCALE_SIGN -1, 0, 1. A scale of 0 leaves 0 of a finite logit and NaN of others (see
// forget_finite).
constexpr unsigned kHidden = infinity_bits(SCALE_SIGN >= 0, X{});

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }

__device__ __forceinline__ float signed_logit(float x) { return SCALE_SIGN < 0 ? -x : x; }

// The part (top, sum) of a row: the largest v, and the sum of weights relative to `base_of(top)`.
struct Part {
  float top;
  float sum;
};

// Nothing is seen yet where top is -inf: any finite base gives the weight 0.
__device__ __forceinline__ float base_of(float top) {
  return top == negative_infinity() ? 0.0f : top;
}

__device__ __forceinline__ float weight(float v, float base, float scale) {
  return exp2_flushed(fmaf(v, 0.5f, -0.5f * base) * scale);
}

// Weights of many logits relative to one base by one fma each, 2^(v · factor - offset), if their
// sum, or each of them, is multiplied by `rest`: it makes up for the rounding of the offset. The
// factor is bounded, so that the offset is: from 2^30 on, logits that differ at all differ by 64 or
// more.
struct Weights {
  float factor, offset, rest;

  __device__ __forceinline__ Weights(float base, float scale) {
    factor = fminf(0.5f * scale, fast_reciprocal(fabsf(base) * 0x1p-30f));
    offset = base * factor;
    rest = exp2_flushed(-fmaf(base, factor, -offset));
  }
  __device__ __forceinline__ float of(float v) const {
    return exp2_flushed(fmaf(v, factor, -offset));
  }
};

// What a zero scale leaves of a logit.
__device__ __forceinline__ void forget_finite(Word& word) {
  float zeros[kLength];
#pragma unroll
  for (int j = 0; j < kLength; ++j) zeros[j] = word.at(j) * 0.0f;
  word = rounded<X>(zeros);
}

// A word's logits, hidden ones -inf (or, where scale < 0, inf). `mask`: its columns' bytes.
__device__ __forceinline__ void hide(Word& word, int column, const Keys& keys,
                                     const MaskBytes& mask) {
  if (SCALE_SIGN == 0) forget_finite(word);
  if (!kEven || CAUSAL) hide_outside<kHidden>(word, column, keys.count);
  if (MASK == 1) hide_masked<kHidden>(word, mask);
}

// The largest v of words; that of none is -inf.
template <int kWords>
__device__ __forceinline__ float top_of(const Word (&words)[kWords]) {
  float top = negative_infinity();
  if constexpr (sizeof(X) == 4) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
#pragma unroll
      for (int j = 0; j < kLength; ++j) top = fmaxf(top, signed_logit(words[i].at(j)));
    }
  } else {  // two at a time, before they are unpacked
    unsigned pair = kHidden;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
#pragma unroll
      for (int w = 0; w < words[i].kWords; ++w) {
        pair = extreme_pair<(SCALE_SIGN >= 0)>(pair, words[i].words[w], X{});
      }
    }
    const Vector<X, 2> both = {pair};
    top = fmaxf(fmaxf(top, signed_logit(both.at(0))), signed_logit(both.at(1)));
  }
  return top;
}

// Adds words to the part of a row that a thread has seen before.
template <int kWords>
__device__ __forceinline__ void add_words(Part& part, const Word (&words)[kWords], float scale) {
  const float top = fmaxf(part.top, top_of(words));
  const Weights weights(base_of(top), scale);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
#pragma unroll
    for (int j = 0; j < kLength; ++j) sum += weights.of(signed_logit(words[i].at(j)));
  }
  part.sum = part.sum * weight(part.top, base_of(top), scale) + sum * weights.rest;
  part.top = top;
}

// A word's softmax. `inverse`: weights.rest / the row's sum, which is positive.
__device__ __forceinline__ Word softmax_of(const Word& word, const Weights& weights,
                                           float inverse) {
  float result[kLength];
#pragma unroll
  for (int j = 0; j < kLength; ++j) {
    result[j] = weights.of(signed_logit(word.at(j))) * inverse;
  }
  return rounded<X>(result);
}

// A word of a row that has no softmax.
__device__ __forceinline__ Word without_softmax(int column, const Keys& keys) {
  float result[kLength];
#pragma unroll
  for (int j = 0; j < kLength; ++j) {
    result[j] = is_seen(keys, column + j) ? not_a_number() : 0.0f;
  }
  return rounded<X>(result);
}

// ---- over threads ------------------------------------------------------------------------------

template <int kWidth>
__device__ __forceinline__ float max_lanes(float value) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

template <int kWidth>
__device__ __forceinline__ Part merged_lanes(const Part& part, float scale) {
  const float top = max_lanes<kWidth>(part.top);
  const float sum = part.sum * weight(part.top, base_of(top), scale);
  return {top, sum_lanes<kWidth>(sum)};
}

// Parts that lie in memory, one after the other, merged by each warp by itself.
template <int kCount>
__device__ __forceinline__ Part merged_parts(const float* parts, float scale, int count = kCount) {
  if constexpr (kCount <= 4) {
    float top = parts[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) {
      if (i < count) top = fmaxf(top, parts[2 * i]);
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) sum += parts[2 * i + 1] * weight(parts[2 * i], base_of(top), scale);
    }
    return {top, sum};
  } else {
    Part mine = {negative_infinity(), 0.0f};
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const float top = fmaxf(mine.top, parts[2 * i]);
      mine.sum = mine.sum * weight(mine.top, base_of(top), scale) +
                 parts[2 * i + 1] * weight(parts[2 * i], base_of(top), scale);
      mine.top = top;
    }
    return merged_lanes<32>(mine, scale);
  }
}
