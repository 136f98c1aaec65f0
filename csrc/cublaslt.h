// cuBLASLt: its functions, and a handle on each device.
#ifndef SHARDOPS_CSRC_CUBLASLT_H_
#define SHARDOPS_CSRC_CUBLASLT_H_

#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "cuda_abi.h"
#include "driver.h"
#include "errors.h"

namespace shardops {

// Loaded on first use and kept, with its handles, until the process ends: other threads may be
// launching with them.
class CublasLt {
 public:
  static CublasLt& Get();

  // Which libcublasLt to load; empty: the one in the process, else the linker's. False where one
  // is loaded already.
  bool SetPath(const std::string& path);

  // Everything below may be called only after a Load that succeeded, by any thread.
  ffi::Error Load();
  const lt::Functions& functions() const { return functions_; }
  int64_t version() const { return version_; }

  // Made on first use, with the device's context current, outside stream capture.
  ffi::ErrorOr<lt::Handle> HandleOn(int ordinal);

 private:
  ffi::Error FindFunctions();

  std::mutex mutex_;
  std::string path_;
  std::atomic<bool> loaded_{false};
  int64_t version_ = 0;
  lt::Functions functions_ = {};
  std::array<std::atomic<lt::Handle>, kMaxDevices> handles_ = {};
};

}  // namespace shardops

#endif  // SHARDOPS_CSRC_CUBLASLT_H_
