#include "cublaslt.h"

#include "dynamic_library.h"
#include "gemm_problem.h"

namespace shardops {

CublasLt& CublasLt::Get() {
  static CublasLt* library = new CublasLt;  // outlives every thread that may still launch at exit
  return *library;
}

bool CublasLt::SetPath(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex_);
  path_ = path;
  return !loaded_;
}

ffi::Error CublasLt::Load() {
  if (loaded_.load(std::memory_order_acquire)) return ffi::Error::Success();
  std::lock_guard<std::mutex> lock(mutex_);
  if (loaded_) return ffi::Error::Success();
  if (ffi::Error error = FindFunctions(); error.failure()) return error;
  version_ = static_cast<int64_t>(functions_.GetVersion());
  loaded_.store(true, std::memory_order_release);
  return ffi::Error::Success();
}

ffi::Error CublasLt::FindFunctions() {
  std::vector<std::string> names = {"libcublasLt.so.13", "libcublasLt.so.12"};
  if (!path_.empty()) names = {path_};
  std::string why, missing;
  const DynamicLibrary library = DynamicLibrary::Open(names, why);
  if (!library) {
    return Failed(kGemmOp, "cuBLASLt could not be loaded (" + why +
                               "). Install nvidia-cublas, or set CUDA_HOME.");
  }
  lt::Functions& f = functions_;
  library.Find("cublasLtGetVersion", f.GetVersion, missing);
  library.Find("cublasLtGetStatusName", f.GetStatusName, missing);
  library.Find("cublasLtCreate", f.Create, missing);
  library.Find("cublasLtMatmulDescCreate", f.MatmulDescCreate, missing);
  library.Find("cublasLtMatmulDescDestroy", f.MatmulDescDestroy, missing);
  library.Find("cublasLtMatmulDescSetAttribute", f.MatmulDescSetAttribute, missing);
  library.Find("cublasLtMatrixLayoutCreate", f.MatrixLayoutCreate, missing);
  library.Find("cublasLtMatrixLayoutDestroy", f.MatrixLayoutDestroy, missing);
  library.Find("cublasLtMatrixLayoutSetAttribute", f.MatrixLayoutSetAttribute, missing);
  library.Find("cublasLtMatmulPreferenceCreate", f.MatmulPreferenceCreate, missing);
  library.Find("cublasLtMatmulPreferenceDestroy", f.MatmulPreferenceDestroy, missing);
  library.Find("cublasLtMatmulPreferenceSetAttribute", f.MatmulPreferenceSetAttribute, missing);
  library.Find("cublasLtMatmulAlgoGetHeuristic", f.MatmulAlgoGetHeuristic, missing);
  library.Find("cublasLtMatmulAlgoCheck", f.MatmulAlgoCheck, missing);
  library.Find("cublasLtMatmulAlgoConfigGetAttribute", f.MatmulAlgoConfigGetAttribute, missing);
  library.Find("cublasLtMatmul", f.Matmul, missing);
  if (missing.empty()) return ffi::Error::Success();
  return Failed(kGemmOp, "the cuBLASLt library lacks " + missing + ". Install version 12 or 13.");
}

ffi::ErrorOr<lt::Handle> CublasLt::HandleOn(int ordinal) {
  if (ordinal >= 0 && ordinal < kMaxDevices) {
    if (lt::Handle made = handles_[ordinal].load(std::memory_order_acquire)) return made;
  }
  Driver& driver = Driver::Get();
  if (ffi::Error error = driver.Load(); error.failure()) return ffi::Unexpected(error);
  auto context = driver.ContextOf(ordinal);
  if (!context.has_value()) return ffi::Unexpected(context.error());
  std::lock_guard<std::mutex> lock(mutex_);
  if (lt::Handle made = handles_[ordinal].load(std::memory_order_acquire)) return made;
  ContextScope scope(*context);
  if (scope.result() != cu::Result::kSuccess) {
    return ffi::Unexpected(driver.Error(kGemmOp, "cuCtxPushCurrent", scope.result()));
  }
  lt::Handle handle = nullptr;
  if (lt::Status s = functions_.Create(&handle); s != lt::Status::kSuccess) {
    return ffi::Unexpected(Failed(kGemmOp, std::string("cublasLtCreate failed with ") +
                                               functions_.GetStatusName(s) + " on device " +
                                               std::to_string(ordinal) + "."));
  }
  handles_[ordinal].store(handle, std::memory_order_release);
  return handle;
}

}  // namespace shardops
