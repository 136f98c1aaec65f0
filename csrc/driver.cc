#include "driver.h"

#include "dynamic_library.h"

namespace shardops {

Driver& Driver::Get() {
  static Driver* driver = new Driver;  // outlives every thread that may still launch at exit
  return *driver;
}

bool Driver::SetPath(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex_);
  path_ = path;
  return !loaded_;
}

ffi::Error Driver::Load() {
  if (loaded_.load(std::memory_order_acquire)) return ffi::Error::Success();
  std::lock_guard<std::mutex> lock(mutex_);
  if (loaded_) return ffi::Error::Success();
  if (ffi::Error error = FindFunctions(path_.empty() ? "libcuda.so.1" : path_); error.failure()) {
    return error;
  }
  if (cu::Result r = functions_.Init(0); r != cu::Result::kSuccess) {
    return Error("cuda", "cuInit", r, ". Check that nvidia-smi lists a GPU.");
  }
  loaded_.store(true, std::memory_order_release);
  return ffi::Error::Success();
}

ffi::Error Driver::FindFunctions(const std::string& path) {
  std::string why, missing;
  const DynamicLibrary library = DynamicLibrary::Open({path}, why);
  if (!library) {
    return Failed("cuda", "the driver library could not be loaded (" + why +
                              "). Install the NVIDIA driver, 525 or newer.");
  }
  cu::Functions& f = functions_;
  library.Find("cuInit", f.Init, missing);
  library.Find("cuGetErrorName", f.GetErrorName, missing);
  library.Find("cuDriverGetVersion", f.DriverGetVersion, missing);
  library.Find("cuDeviceGet", f.DeviceGet, missing);
  library.Find("cuDeviceGetName", f.DeviceGetName, missing);
  library.Find("cuDevicePrimaryCtxRetain", f.DevicePrimaryCtxRetain, missing);
  library.Find("cuCtxPushCurrent_v2", f.CtxPushCurrent, missing);
  library.Find("cuCtxPopCurrent_v2", f.CtxPopCurrent, missing);
  library.Find("cuLibraryLoadData", f.LibraryLoadData, missing);
  library.Find("cuLibraryGetKernel", f.LibraryGetKernel, missing);
  library.Find("cuKernelGetFunction", f.KernelGetFunction, missing);
  library.Find("cuKernelSetAttribute", f.KernelSetAttribute, missing);
  library.Find("cuLaunchKernelEx", f.LaunchKernelEx, missing);
  library.Find("cuMemsetD8Async", f.MemsetD8Async, missing);
  library.Find("cuMemGetInfo_v2", f.MemGetInfo, missing);
  library.Find("cuMemAlloc_v2", f.MemAlloc, missing);
  library.Find("cuMemFree_v2", f.MemFree, missing);
  library.Find("cuMemcpyHtoDAsync_v2", f.MemcpyHtoDAsync, missing);
  library.Find("cuMemcpyDtoDAsync_v2", f.MemcpyDtoDAsync, missing);
  library.Find("cuStreamCreate", f.StreamCreate, missing);
  library.Find("cuStreamSynchronize", f.StreamSynchronize, missing);
  library.Find("cuStreamDestroy_v2", f.StreamDestroy, missing);
  library.Find("cuEventCreate", f.EventCreate, missing);
  library.Find("cuEventRecord", f.EventRecord, missing);
  library.Find("cuEventSynchronize", f.EventSynchronize, missing);
  library.Find("cuEventElapsedTime", f.EventElapsedTime, missing);
  library.Find("cuEventDestroy_v2", f.EventDestroy, missing);
  library.Find("cuThreadExchangeStreamCaptureMode", f.ThreadExchangeStreamCaptureMode, missing);
  if (missing.empty()) return ffi::Error::Success();
  return Failed("cuda", "the driver library " + path + " lacks " + missing +
                            ". Install the NVIDIA driver, 525 or newer.");
}

ffi::ErrorOr<cu::Context> Driver::ContextOf(int ordinal) {
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    return ffi::Unexpected(Invalid("cuda", "device ordinal is " + std::to_string(ordinal) +
                                               "; expected 0 to " +
                                               std::to_string(kMaxDevices - 1) + "."));
  }
  if (cu::Context made = contexts_[ordinal].load(std::memory_order_acquire)) return made;
  std::lock_guard<std::mutex> lock(mutex_);
  if (cu::Context made = contexts_[ordinal].load(std::memory_order_acquire)) return made;
  const std::string ending = " for device " + std::to_string(ordinal) + ".";
  cu::Device device = 0;
  if (cu::Result r = functions_.DeviceGet(&device, ordinal); r != cu::Result::kSuccess) {
    return ffi::Unexpected(Error("cuda", "cuDeviceGet", r, ending));
  }
  cu::Context context = nullptr;
  if (cu::Result r = functions_.DevicePrimaryCtxRetain(&context, device);
      r != cu::Result::kSuccess) {
    return ffi::Unexpected(Error("cuda", "cuDevicePrimaryCtxRetain", r, ending));
  }
  contexts_[ordinal].store(context, std::memory_order_release);
  return context;
}

ffi::ErrorOr<std::string> Driver::NameOf(int ordinal) {
  cu::Device device = 0;
  char name[256] = {};
  cu::Result r = functions_.DeviceGet(&device, ordinal);
  if (r == cu::Result::kSuccess) r = functions_.DeviceGetName(name, sizeof(name), device);
  if (r == cu::Result::kSuccess) return std::string(name);
  return ffi::Unexpected(
      Error("cuda", "cuDeviceGetName", r, " for device " + std::to_string(ordinal) + "."));
}

ffi::Error Driver::Error(const char* op, const char* call, cu::Result result,
                         const std::string& ending) const {
  const char* name = nullptr;
  functions_.GetErrorName(result, &name);
  const std::string code = name ? name : "error " + std::to_string(static_cast<uint32_t>(result));
  return Failed(op, std::string(call) + " failed with " + code + ending);
}

}  // namespace shardops
