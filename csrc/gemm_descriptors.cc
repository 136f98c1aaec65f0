// What of a GemmPlan the library is told once: descriptors, layouts and the preference.
#include <numeric>

#include "gemm_plan.h"

namespace shardops {
namespace {

constexpr int kReadyDescs = 8;  // as many threads may launch before one must make its own

lt::Scale LibraryScale(int64_t mode) {
  switch (static_cast<ScaleMode>(mode)) {
    case ScaleMode::kVec128:
      return lt::Scale::kVec128;
    case ScaleMode::kBlock128:
      return lt::Scale::kBlock128x128;
    case ScaleMode::kVec32:
      return lt::Scale::kVec32;
    default:
      return lt::Scale::kTensor;
  }
}

}  // namespace

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
      MakeLayout(rhs_, p_.type_b, p_.transb ? n : k, p_.transb ? k : n, p_.ldb, p_.stride_b);
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
                            (p_.relu ? uint32_t(lt::Epilogue::kRelu) : 0) +
                            (p_.aux ? uint32_t(lt::Epilogue::kAux) : 0);
  // The heuristic reads off an address whether there is one and how it is aligned.
  void* aligned = reinterpret_cast<void*>(uintptr_t{4096});
  set(lt::DescAttr::kTransA, p_.transb ? lt::Op::kT : lt::Op::kN);
  set(lt::DescAttr::kTransB, p_.transa ? lt::Op::kT : lt::Op::kN);
  if (epilogue) set(lt::DescAttr::kEpilogue, epilogue);
  if (p_.bias) {
    set(lt::DescAttr::kBiasPointer, aligned);
    if (p_.bias_type != p_.out_type) {
      set(lt::DescAttr::kBiasType, static_cast<lt::Type>(p_.bias_type));
    }
  }
  // Of our rhs and lhs, which are the library's A and B.
  if (p_.scale_b) set(lt::DescAttr::kAScalePointer, aligned);
  if (p_.scale_a) set(lt::DescAttr::kBScalePointer, aligned);
  if (const lt::Scale scale = LibraryScale(p_.scale_b); scale != lt::Scale::kTensor) {
    set(lt::DescAttr::kAScaleMode, scale);
  }
  if (const lt::Scale scale = LibraryScale(p_.scale_a); scale != lt::Scale::kTensor) {
    set(lt::DescAttr::kBScaleMode, scale);
  }
  if (p_.fast_accum) set(lt::DescAttr::kFastAccum, int8_t{1});
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
  prefer(lt::PrefAttr::kReductionMask, static_cast<uint32_t>(p_.reductions));
  prefer(lt::PrefAttr::kMinAlignA, alignment(p_.stride_b * in));
  prefer(lt::PrefAttr::kMinAlignB, alignment(p_.stride_a * in));
  prefer(lt::PrefAttr::kMinAlignC, alignment(p_.m * p_.n * out));
  prefer(lt::PrefAttr::kMinAlignD, alignment(p_.m * p_.n * out));
  return s;
}

}  // namespace shardops
