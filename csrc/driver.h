// The CUDA driver: its functions, and the context of each device.
#ifndef SHARDOPS_CSRC_DRIVER_H_
#define SHARDOPS_CSRC_DRIVER_H_

#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "cuda_abi.h"
#include "errors.h"

namespace shardops {

constexpr int kMaxDevices = 64;

// Loaded on first use and kept until the process ends.
class Driver {
 public:
  static Driver& Get();

  // Which libcuda to load; empty: the linker's. False where one is loaded already.
  bool SetPath(const std::string& path);

  // Everything below may be called only after a Load that succeeded, by any thread.
  ffi::Error Load();
  const cu::Functions& functions() const { return functions_; }

  // The primary context of a device, which is the one XLA uses. It is never released.
  ffi::ErrorOr<cu::Context> ContextOf(int ordinal);

  // The device's name, as nvidia-smi shows it.
  ffi::ErrorOr<std::string> NameOf(int ordinal);

  // "cuLaunchKernel failed with CUDA_ERROR_INVALID_VALUE{ending}"
  ffi::Error Error(const char* op, const char* call, cu::Result result,
                   const std::string& ending = ".") const;

 private:
  ffi::Error FindFunctions(const std::string& path);

  std::mutex mutex_;
  std::string path_;
  std::atomic<bool> loaded_{false};
  cu::Functions functions_ = {};
  std::array<std::atomic<cu::Context>, kMaxDevices> contexts_ = {};
};

// Makes a context current as long as it lives: XLA's worker threads need not have any.
class ContextScope {
 public:
  explicit ContextScope(cu::Context context)
      : result_(Driver::Get().functions().CtxPushCurrent(context)) {}
  ~ContextScope() {
    cu::Context popped;
    if (result_ == cu::Result::kSuccess) Driver::Get().functions().CtxPopCurrent(&popped);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  cu::Result result() const { return result_; }

 private:
  const cu::Result result_;
};

// While it lives, what this thread does may not end captures of streams.
class RelaxedCapture {
 public:
  RelaxedCapture() { Exchange(); }
  ~RelaxedCapture() { Exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void Exchange() { Driver::Get().functions().ThreadExchangeStreamCaptureMode(&mode_); }
  cu::CaptureMode mode_ = cu::CaptureMode::kRelaxed;
};

}  // namespace shardops

#endif  // SHARDOPS_CSRC_DRIVER_H_
