// The FFI handlers, by stage. module.cc hands them to Python.
#ifndef SHARDOPS_CSRC_HANDLERS_H_
#define SHARDOPS_CSRC_HANDLERS_H_

#include <vector>

#include "errors.h"
#include "gemm_plan.h"
#include "kernel.h"

namespace shardops {

XLA_FFI_DECLARE_HANDLER_SYMBOL(LaunchInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(LaunchInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(LaunchExecute);

XLA_FFI_DECLARE_HANDLER_SYMBOL(GemmInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GemmInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GemmExecute);

// What the execute handlers do, on a stream and device of the caller's choice.
ffi::Error ExecuteLaunch(cu::Stream stream, int32_t device, Kernel* kernel, ffi::RemainingArgs args,
                         ffi::RemainingRets rets);
ffi::Error ExecuteGemm(cu::Stream stream, int32_t device, GemmPlan* plan, ffi::RemainingArgs args,
                       ffi::RemainingRets rets);

}  // namespace shardops

#endif  // SHARDOPS_CSRC_HANDLERS_H_
