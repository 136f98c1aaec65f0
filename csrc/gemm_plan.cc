#include "gemm_plan.h"

#include <algorithm>
#include <cstring>

namespace shardops {

GemmCounters gemm_counters;
ffi::TypeId GemmPlan::id = {};
ffi::TypeInfo GemmPlan::info = ffi::MakeTypeInfo<GemmPlan>();

ffi::ErrorOr<std::unique_ptr<GemmPlan>> GemmPlan::Make(GemmProblem problem) {
  if (ffi::Error e = CompleteGemmProblem(problem); e.failure()) return ffi::Unexpected(e);
  auto plan = std::unique_ptr<GemmPlan>(new GemmPlan(problem));
  plan->ListSlots();
  return ffi::ErrorOr<std::unique_ptr<GemmPlan>>(std::move(plan));
}

GemmPlan::~GemmPlan() {
  for (lt::Desc d : free_) blas().MatmulDescDestroy(d);
  if (desc_) blas().MatmulDescDestroy(desc_);
  for (lt::Layout l : {rhs_, lhs_, out_}) {
    if (l) blas().MatrixLayoutDestroy(l);
  }
  if (preference_) blas().MatmulPreferenceDestroy(preference_);
}

void GemmPlan::ListSlots() {
  const GemmType *out = FindGemmType(p_.out_type), *bias = FindGemmType(p_.bias_type);
  auto matrix = [&](const char* name, void* GemmBuffers::* member, const GemmType* type,
                    int64_t rows, int64_t cols, int64_t ld, int64_t stride) {
    const int64_t elements = (p_.batch - 1) * stride + (rows - 1) * ld + cols;
    return GemmSlot{name, member, type->bytes * static_cast<size_t>(elements), type};
  };
  auto result = [&](const char* name, void* GemmBuffers::* member) {
    return matrix(name, member, out, p_.m, p_.n, p_.n, p_.m * p_.n);
  };
  auto scales = [&](const char* name, void* GemmBuffers::* member, int64_t scale, int64_t rows) {
    const auto mode = static_cast<ScaleMode>(scale);
    if (mode == ScaleMode::kNone) return;
    const GemmType* type =
        mode == ScaleMode::kVec32 ? nullptr : FindGemmType(int64_t(lt::Type::kF32));
    operands_.push_back({name, member, ScaleBytes(mode, rows, p_.k), type});
  };
  operands_ = {matrix("lhs", &GemmBuffers::lhs, FindGemmType(p_.type), p_.transa ? p_.k : p_.m,
                      p_.transa ? p_.m : p_.k, p_.lda, p_.stride_a),
               matrix("rhs", &GemmBuffers::rhs, FindGemmType(p_.type_b), p_.transb ? p_.n : p_.k,
                      p_.transb ? p_.k : p_.n, p_.ldb, p_.stride_b)};
  scales("scale_a", &GemmBuffers::scale_a, p_.scale_a, p_.m);
  scales("scale_b", &GemmBuffers::scale_b, p_.scale_b, p_.n);
  if (p_.bias) {
    operands_.push_back(
        {"bias", &GemmBuffers::bias, bias->bytes * static_cast<size_t>(p_.n), bias});
  }
  if (p_.add) operands_.push_back(result("add", &GemmBuffers::add));
  results_ = {result("out", &GemmBuffers::out)};
  if (p_.aux) results_.push_back(result("aux", &GemmBuffers::aux));
  if (p_.workspace_bytes) {
    results_.push_back({"workspace", &GemmBuffers::workspace,
                        static_cast<size_t>(p_.workspace_bytes) + kWorkspaceAlign, nullptr});
  }
}

// ---------------------------------------------------------------------------------- algorithms

ffi::ErrorOr<std::vector<lt::HeuristicResult>> GemmPlan::AskHeuristic(lt::Handle handle,
                                                                      int max) const {
  std::vector<lt::HeuristicResult> found(max);
  int count = 0;
  lt::Status s = blas().MatmulAlgoGetHeuristic(handle, desc_, rhs_, lhs_, out_, out_, preference_,
                                               max, found.data(), &count);
  if (s == lt::Status::kSuccess) {
    found.resize(count);
    found.erase(std::remove_if(found.begin(), found.end(),
                               [](auto& r) { return r.state != lt::Status::kSuccess; }),
                found.end());
    if (found.empty()) s = lt::Status::kNotSupported;
  }
  if (s == lt::Status::kSuccess) return found;
  return ffi::Unexpected(Unsupported(
      kGemmOp, "cuBLASLt " + std::to_string(CublasLt::Get().version()) + " has no algorithm (" +
                   blas().GetStatusName(s) + ") for " + Describe(p_) + "."));
}

ffi::ErrorOr<std::vector<lt::HeuristicResult>> GemmPlan::Candidates(int ordinal, int max) {
  if (ffi::Error e = CublasLt::Get().Load(); e.failure()) return ffi::Unexpected(e);
  auto handle = CublasLt::Get().HandleOn(ordinal);
  if (!handle.has_value()) return ffi::Unexpected(handle.error());
  std::lock_guard<std::mutex> lock(mutex_);
  if (ffi::Error e = NeedDescriptors(); e.failure()) return ffi::Unexpected(e);
  ContextScope scope(*Driver::Get().ContextOf(ordinal));
  return AskHeuristic(*handle, max);
}

bool GemmPlan::Accepts(lt::Handle handle) const {
  if (p_.algo_version != CublasLt::Get().version()) return false;
  lt::Algo algo;
  std::memcpy(&algo, p_.algo, sizeof(algo));
  lt::HeuristicResult r = {};
  return blas().MatmulAlgoCheck(handle, desc_, rhs_, lhs_, out_, out_, &algo, &r) ==
             lt::Status::kSuccess &&
         r.workspace_bytes <= static_cast<size_t>(p_.workspace_bytes);
}

ffi::Error GemmPlan::Prepare(int ordinal) {
  if (ordinal >= 0 && ordinal < kMaxDevices && choices_[ordinal].load(std::memory_order_acquire)) {
    return ffi::Error::Success();
  }
  if (ffi::Error e = CublasLt::Get().Load(); e.failure()) return e;
  auto handle = CublasLt::Get().HandleOn(ordinal);
  if (!handle.has_value()) return handle.error();
  std::lock_guard<std::mutex> lock(mutex_);
  if (choices_[ordinal].load(std::memory_order_acquire)) return ffi::Error::Success();
  if (ffi::Error e = NeedDescriptors(); e.failure()) return e;
  ContextScope scope(*Driver::Get().ContextOf(ordinal));
  Choice choice{*handle, {}};
  if (p_.algo_version != 0 && Accepts(*handle)) {
    std::memcpy(&choice.algo, p_.algo, sizeof(choice.algo));
  } else {
    if (p_.algo_version != 0) gemm_counters.algo_refused++;
    auto found = AskHeuristic(*handle, 1);
    if (!found.has_value()) return found.error();
    choice.algo = found->front().algo;
  }
  settled_.push_back(choice);
  choices_[ordinal].store(&settled_.back(), std::memory_order_release);
  gemm_counters.settled++;
  return ffi::Error::Success();
}

// ------------------------------------------------------------------------------------ launches

ffi::Error GemmPlan::Launch(int ordinal, cu::Stream stream, const GemmBuffers& buffers) {
  if (ffi::Error e = Prepare(ordinal); e.failure()) return e;
  auto context = Driver::Get().ContextOf(ordinal);
  if (!context.has_value()) return context.error();
  ContextScope scope(*context);
  if (scope.result() != cu::Result::kSuccess) {
    return Driver::Get().Error(kGemmOp, "cuCtxPushCurrent", scope.result());
  }
  return Run(*choices_[ordinal].load(std::memory_order_acquire), stream, buffers);
}

ffi::Error GemmPlan::LaunchWith(const lt::Algo& algo, int ordinal, cu::Stream stream,
                                const GemmBuffers& buffers) {
  auto handle = CublasLt::Get().HandleOn(ordinal);
  if (!handle.has_value()) return handle.error();
  return Run({*handle, algo}, stream, buffers);
}

ffi::Error GemmPlan::Run(const Choice& choice, cu::Stream stream, const GemmBuffers& buffers) {
  if (!HasPointers()) return Matmul(choice, desc_, buffers, stream);
  auto desc = Take();
  if (!desc.has_value()) return desc.error();
  ffi::Error error = Matmul(choice, *desc, buffers, stream);
  Give(*desc);
  return error;
}

ffi::Error GemmPlan::Matmul(const Choice& choice, lt::Desc desc, const GemmBuffers& b,
                            cu::Stream stream) const {
  lt::Status s = lt::Status::kSuccess;
  auto point = [&](lt::DescAttr attr, void* address) {
    if (s == lt::Status::kSuccess) {
      s = blas().MatmulDescSetAttribute(desc, attr, &address, sizeof(address));
    }
  };
  if (p_.scale_b) point(lt::DescAttr::kAScalePointer, b.scale_b);
  if (p_.scale_a) point(lt::DescAttr::kBScalePointer, b.scale_a);
  if (p_.bias) point(lt::DescAttr::kBiasPointer, b.bias);
  if (p_.aux) point(lt::DescAttr::kAuxPointer, b.aux);
  const float alpha = 1.0f, beta = p_.add ? 1.0f : 0.0f;
  const uintptr_t workspace = (reinterpret_cast<uintptr_t>(b.workspace) + kWorkspaceAlign - 1) /
                              kWorkspaceAlign * kWorkspaceAlign;
  if (s == lt::Status::kSuccess) {
    s = blas().Matmul(choice.handle, desc, &alpha, b.rhs, rhs_, b.lhs, lhs_, &beta,
                      p_.add ? b.add : b.out, out_, b.out, out_, &choice.algo,
                      reinterpret_cast<void*>(workspace), static_cast<size_t>(p_.workspace_bytes),
                      stream);
  }
  if (s != lt::Status::kSuccess) {
    return Failed(kGemmOp, std::string("cublasLtMatmul failed with ") + blas().GetStatusName(s) +
                               " for " + Describe(p_) + ".");
  }
  gemm_counters.launched.fetch_add(1, std::memory_order_relaxed);
  return ffi::Error::Success();
}

ffi::ErrorOr<lt::Desc> GemmPlan::Take() {
  {
    std::lock_guard<std::mutex> lock(free_mutex_);
    if (!free_.empty()) {
      lt::Desc desc = free_.back();
      free_.pop_back();
      return desc;
    }
  }
  return MakeDesc();  // more calls in flight than ever before
}

void GemmPlan::Give(lt::Desc desc) {
  std::lock_guard<std::mutex> lock(free_mutex_);
  free_.push_back(desc);
}

}  // namespace shardops
