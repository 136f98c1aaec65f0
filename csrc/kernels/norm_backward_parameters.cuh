// Parameters of a norm, backward, which not every launch has: as norm_parameters.cuh.
//
// Order: MEAN, rstd, DH, dx; where the launch sums up by itself: dgamma, DBETA.
#pragma once
#include "norm_values.cuh"

#if LAYER
#define MEAN_PARAMETER const float* __restrict__ mean,
#else
#define MEAN_PARAMETER
[[maybe_unused]] constexpr const float* mean = nullptr;
#endif

#if HAS_ADD
#define DH_PARAMETER const X* __restrict__ dh,
#else
#define DH_PARAMETER
[[maybe_unused]] constexpr const X* dh = nullptr;
#endif

#if HAS_BETA
#define DBETA_PARAMETER float* __restrict__ dbeta,
#else
#define DBETA_PARAMETER
#endif
