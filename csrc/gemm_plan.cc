#include "gemm_plan.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace shardops {
namespace {

constexpr int kReadyDescs = 8;  // as many threads may launch before one must make its own

}  // namespace

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
  const GemmType *in = FindGemmType(p_.type), *out = FindGemmType(p_.out_type);
  auto matrix = [&](const char* name, void* GemmBuffers::* member, const GemmType* type,
                    int64_t rows, int64_t cols, int64_t ld, int64_t stride) {
    const int64_t elements = (p_.batch - 1) * stride + (rows - 1) * ld + cols;
    return GemmSlot{name, member, type->bytes * static_cast<size_t>(elements), type};
  };
  auto result = [&](const char* name, void* GemmBuffers::* member) {
    return matrix(name, member, out, p_.m, p_.n, p_.n, p_.m * p_.n);
  };
  operands_ = {matrix("lhs", &GemmBuffers::lhs, in, p_.transa ? p_.k : p_.m,
                      p_.transa ? p_.m : p_.k, p_.lda, p_.stride_a),
               matrix("rhs", &GemmBuffers::rhs, in, p_.transb ? p_.n : p_.k,
                      p_.transb ? p_.k : p_.n, p_.ldb, p_.stride_b)};
  if (p_.bias) {
    operands_.push_back({"bias", &GemmBuffers::bias, out->bytes * static_cast<size_t>(p_.n), out});
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
  const Choice& choice = *choices_[ordinal].load(std::memory_order_acquire);
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

// --------------------------------------------------------------------------------- descriptors

ffi::Error GemmPlan::NeedDescriptors() {
  if (!made_) made_ = MakeDescriptors();
  return *made_;
}

ffi::Error GemmPlan::MakeDescriptors() {
  auto desc = MakeDesc();
  if (!desc.has_value()) return desc.error();
  desc_ = *desc;
  for (int i = 0; HasPointers() && i < kReadyDescs; ++i) {
    auto ready = MakeDesc();
    if (!ready.has_value()) return ready.error();
    Give(*ready);
  }
  const int64_t m = p_.m, n = p_.n, k = p_.k;
  lt::Status s =
      MakeLayout(rhs_, p_.type, p_.transb ? n : k, p_.transb ? k : n, p_.ldb, p_.stride_b);
  if (s == lt::Status::kSuccess) {
    s = MakeLayout(lhs_, p_.type, p_.transa ? k : m, p_.transa ? m : k, p_.lda, p_.stride_a);
  }
  if (s == lt::Status::kSuccess) s = MakeLayout(out_, p_.out_type, m, n, n, m * n);
  if (s == lt::Status::kSuccess) s = MakePreference();
  if (s == lt::Status::kSuccess) return ffi::Error::Success();
  return Unsupported(kGemmOp, std::string("cuBLASLt refused a layout (") + blas().GetStatusName(s) +
                                  ") of " + Describe(p_) + ".");
}

ffi::ErrorOr<lt::Desc> GemmPlan::MakeDesc() const {
  lt::Desc d = nullptr;
  lt::Status s = blas().MatmulDescCreate(&d, static_cast<lt::Compute>(p_.compute), lt::Type::kF32);
  auto set = [&](lt::DescAttr attr, auto value) {
    if (s == lt::Status::kSuccess)
      s = blas().MatmulDescSetAttribute(d, attr, &value, sizeof(value));
  };
  const uint32_t epilogue = (p_.bias ? uint32_t(lt::Epilogue::kBias) : 0) +
                            (p_.gelu ? uint32_t(lt::Epilogue::kGelu) : 0) +
                            (p_.aux ? uint32_t(lt::Epilogue::kAux) : 0);
  // The heuristic reads off an address whether there is one and how it is aligned.
  void* aligned = reinterpret_cast<void*>(uintptr_t{4096});
  set(lt::DescAttr::kTransA, p_.transb ? lt::Op::kT : lt::Op::kN);
  set(lt::DescAttr::kTransB, p_.transa ? lt::Op::kT : lt::Op::kN);
  if (epilogue) set(lt::DescAttr::kEpilogue, epilogue);
  if (p_.bias) set(lt::DescAttr::kBiasPointer, aligned);
  if (p_.aux) {
    set(lt::DescAttr::kAuxPointer, aligned);
    set(lt::DescAttr::kAuxLd, p_.n);
    if (p_.batch > 1) set(lt::DescAttr::kAuxBatchStride, p_.m * p_.n);
  }
  if (p_.sm_count) set(lt::DescAttr::kSmCount, static_cast<int32_t>(p_.sm_count));
  if (s == lt::Status::kSuccess) return d;
  if (d) blas().MatmulDescDestroy(d);
  return ffi::Unexpected(Unsupported(
      kGemmOp, "cuBLASLt " + std::to_string(CublasLt::Get().version()) + " refused an attribute (" +
                   blas().GetStatusName(s) + ") of " + Describe(p_) + "."));
}

// Row-major [rows, cols] is column-major [cols, rows] with the same leading dimension.
lt::Status GemmPlan::MakeLayout(lt::Layout& layout, int64_t type, int64_t rows, int64_t cols,
                                int64_t ld, int64_t stride) const {
  lt::Status s = blas().MatrixLayoutCreate(&layout, static_cast<lt::Type>(type), cols, rows, ld);
  if (p_.batch == 1 || s != lt::Status::kSuccess) return s;
  const int32_t batch = static_cast<int32_t>(p_.batch);
  s = blas().MatrixLayoutSetAttribute(layout, lt::LayoutAttr::kBatchCount, &batch, sizeof(batch));
  if (s != lt::Status::kSuccess) return s;
  return blas().MatrixLayoutSetAttribute(layout, lt::LayoutAttr::kBatchStride, &stride,
                                         sizeof(stride));
}

lt::Status GemmPlan::MakePreference() {
  lt::Status s = blas().MatmulPreferenceCreate(&preference_);
  auto prefer = [&](lt::PrefAttr attr, auto value) {
    if (s == lt::Status::kSuccess) {
      s = blas().MatmulPreferenceSetAttribute(preference_, attr, &value, sizeof(value));
    }
  };
  // An odd batch stride leaves the second matrix less aligned than the first.
  const int64_t in = FindGemmType(p_.type)->bytes, out = FindGemmType(p_.out_type)->bytes;
  auto alignment = [&](int64_t stride_bytes) {
    return static_cast<uint32_t>(p_.batch > 1 ? std::gcd(p_.align, stride_bytes) : p_.align);
  };
  prefer(lt::PrefAttr::kMaxWorkspace, static_cast<uint64_t>(p_.workspace_bytes));
  prefer(lt::PrefAttr::kMinAlignA, alignment(p_.stride_b * in));
  prefer(lt::PrefAttr::kMinAlignB, alignment(p_.stride_a * in));
  prefer(lt::PrefAttr::kMinAlignC, alignment(p_.m * p_.n * out));
  prefer(lt::PrefAttr::kMinAlignD, alignment(p_.m * p_.n * out));
  return s;
}

}  // namespace shardops
