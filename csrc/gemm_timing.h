// How long each algorithm of a GEMM takes on a device.
#ifndef SHARDOPS_CSRC_GEMM_TIMING_H_
#define SHARDOPS_CSRC_GEMM_TIMING_H_

#include <vector>

#include "gemm_plan.h"

namespace shardops {

// Microseconds of a launch of each candidate; infinity where it fails. On a stream and memory of
// its own, both released at the end. Other work on the device makes the times longer, and is not
// waited for. ResourceExhausted where the operands and results take more than half of the memory
// that is free. Harmless to streams that other threads capture.
ffi::ErrorOr<std::vector<float>> TimeGemm(GemmPlan& plan, int ordinal,
                                          const std::vector<lt::HeuristicResult>& candidates);

}  // namespace shardops

#endif  // SHARDOPS_CSRC_GEMM_TIMING_H_
