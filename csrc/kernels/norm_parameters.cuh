// Parameters of a norm, forward, which not every launch has: as quantize_parameters.cuh.
//
// Order: BETA, ADD, y, H, MEAN.
#pragma once
#include "norm_values.cuh"

#if HAS_BETA
#define BETA_PARAMETER const Beta* __restrict__ beta,
#else
#define BETA_PARAMETER
[[maybe_unused]] constexpr const Beta* beta = nullptr;
#endif

#if HAS_ADD
#define ADD_PARAMETER const X* __restrict__ add,
#define H_PARAMETER X* __restrict__ h,
#else
#define ADD_PARAMETER
#define H_PARAMETER
[[maybe_unused]] constexpr const X* add = nullptr;
[[maybe_unused]] constexpr X* h = nullptr;
#endif

#if LAYER
#define MEAN_PARAMETER float* __restrict__ mean_out,
#else
#define MEAN_PARAMETER
[[maybe_unused]] constexpr float* mean_out = nullptr;
#endif
