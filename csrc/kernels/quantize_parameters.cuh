// Parameters of a kernel that quantises which not every launch has: lists of them for its
// declaration, and their names where there are none.
//
// Order: GIVEN, RESULTS; of norms (norm_parameters.cuh): BETA, ADD, GIVEN, RESULTS, H, MEAN.
#pragma once
#include "quantize_scales.cuh"

#if SCALES == 0 && (ROWS || COLUMNS)
#define GIVEN_PARAMETER const float* __restrict__ given,
#else
#define GIVEN_PARAMETER
[[maybe_unused]] constexpr const float* given = nullptr;
#endif

#if !ROWS
#define ROW_PARAMETERS
[[maybe_unused]] constexpr unsigned char* data = nullptr;
#elif SCALES
#define ROW_PARAMETERS unsigned char* __restrict__ data, Scale* __restrict__ scales,
#else
#define ROW_PARAMETERS unsigned char* __restrict__ data,
#endif
#if !COLUMNS
#define COLUMN_PARAMETERS
[[maybe_unused]] constexpr unsigned char* turned = nullptr;
#elif SCALES
#define COLUMN_PARAMETERS unsigned char* __restrict__ turned, Scale* __restrict__ turned_scales,
#else
#define COLUMN_PARAMETERS unsigned char* __restrict__ turned,
#endif
#if !ROWS || !SCALES
[[maybe_unused]] constexpr Scale* scales = nullptr;
#endif
#if !COLUMNS || !SCALES
[[maybe_unused]] constexpr Scale* turned_scales = nullptr;
#endif

#if AMAX
#define AMAX_PARAMETER unsigned* __restrict__ amax,
#else
#define AMAX_PARAMETER
[[maybe_unused]] constexpr unsigned* amax = nullptr;
#endif
#define RESULT_PARAMETERS ROW_PARAMETERS COLUMN_PARAMETERS AMAX_PARAMETER
