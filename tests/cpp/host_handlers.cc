// Execute handlers for XLA:CPU: the same executions on host memory, device 0, no stream. Linked
// into a test build of the extension beside the real ones.
#include "handlers.h"

namespace shardops {
namespace {

ffi::Error HostLaunch(Kernel* kernel, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary) {
  return ExecuteLaunch(nullptr, 0, kernel, args, rets);
}

ffi::Error HostGemm(GemmPlan* plan, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary) {
  return ExecuteGemm(nullptr, 0, plan, args, rets);
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    LaunchHostExecute, HostLaunch,
    ffi::Ffi::Bind().Ctx<ffi::State<Kernel>>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    GemmHostExecute, HostGemm,
    ffi::Ffi::Bind().Ctx<ffi::State<GemmPlan>>().RemainingArgs().RemainingRets().Attrs());
#pragma GCC visibility pop

}  // namespace shardops
