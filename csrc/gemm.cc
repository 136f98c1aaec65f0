// shardops_gemm: a GEMM on one device through cuBLASLt.
//
//   out[b,i,j] = f( sum_k op(lhs)[b,i,k] op(rhs)[b,k,j] + add[b,i,j] + bias[j] )
//
// i < m, j < n; f is the identity, tanh-GELU or ReLU, aux is GELU's argument. Every matrix is
// row-major:
//   lhs [m,k], or [k,m] with transa     rhs [k,n], or [n,k] with transb     out, add, aux [m,n]
// lhs and rhs may have a leading dimension and a batch stride; the others are dense. Operands of 8
// bits may have scales, and on sm_90 must be [m,k] and [n,k].
//
// Attributes: gemm_problem.h. Operands: lhs, rhs, [scale_a], [scale_b], [bias], [add]. Results:
// out, [aux], [workspace]. Those in brackets are there where the attributes say so; the workspace
// is uint8[workspace_bytes + 256].
//
// Stages. instantiate checks the attributes and needs no device. initialize runs on each device
// before each execution, outside stream capture: the first one makes what a captured stream may
// not make, the library's handle, and settles the algorithm. execute only launches.
#include "handlers.h"

namespace shardops {
namespace {

ffi::ErrorOr<std::unique_ptr<GemmPlan>> Instantiate(ffi::Dictionary attributes) {
  auto problem = DecodeGemmProblem(attributes);
  if (!problem.has_value()) return ffi::Unexpected(problem.error());
  gemm_counters.instantiated++;
  return GemmPlan::Make(*problem);
}

ffi::Error Initialize(int32_t device, GemmPlan* plan, ffi::RemainingArgs, ffi::RemainingRets,
                      ffi::Dictionary) {
  return plan->Prepare(device);
}

ffi::Error Execute(cu::Stream stream, int32_t device, GemmPlan* plan, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Dictionary) {
  return ExecuteGemm(stream, device, plan, args, rets);
}

ffi::Error Fill(const GemmSlot& slot, const ffi::AnyBuffer& buffer, int64_t align,
                GemmBuffers& buffers) {
  if (slot.type && buffer.element_type() != slot.type->xla) {
    return Invalid(kGemmOp, std::string(slot.name) + " is of another dtype; expected " +
                                slot.type->name + ".");
  }
  if (buffer.size_bytes() < slot.bytes) {
    return Invalid(kGemmOp, std::string(slot.name) + " is " + std::to_string(buffer.size_bytes()) +
                                " bytes long; expected at least " + std::to_string(slot.bytes) +
                                ".");
  }
  const auto address = reinterpret_cast<uintptr_t>(buffer.untyped_data());
  if (address % static_cast<uintptr_t>(align)) {
    return Invalid(kGemmOp, std::string(slot.name) + " is at an address that is " +
                                std::to_string(address % align) + " modulo " +
                                std::to_string(align) + "; expected 0. Pass a smaller 'align'.");
  }
  buffers.*slot.member = buffer.untyped_data();
  return ffi::Error::Success();
}

std::string Names(const std::vector<GemmSlot>& slots) {
  std::string s;
  for (const GemmSlot& slot : slots) s += (s.empty() ? "" : ", ") + std::string(slot.name);
  return s;
}

}  // namespace

ffi::Error ExecuteGemm(cu::Stream stream, int32_t device, GemmPlan* plan, ffi::RemainingArgs args,
                       ffi::RemainingRets rets) {
  const std::vector<GemmSlot>&operands = plan->operands(), &results = plan->results();
  if (args.size() != operands.size() || rets.size() != results.size()) {
    return Invalid(kGemmOp, "the call has " + std::to_string(args.size()) + " operands and " +
                                std::to_string(rets.size()) + " results; expected operands (" +
                                Names(operands) + ") and results (" + Names(results) + ").");
  }
  const int64_t align = plan->problem().align;
  GemmBuffers buffers;
  for (size_t i = 0; i < operands.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    if (ffi::Error e = Fill(operands[i], *buffer, align, buffers); e.failure()) return e;
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    if (ffi::Error e = Fill(results[i], **buffer, align, buffers); e.failure()) return e;
  }
  return plan->Launch(device, stream, buffers);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(GemmInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(GemmInitialize, Initialize,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<GemmPlan>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(GemmExecute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cu::Stream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<GemmPlan>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace shardops
