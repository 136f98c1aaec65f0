// One launch of a JIT-compiled kernel, and the process-wide cache of the code it comes from.
#ifndef SHARDOPS_CSRC_KERNEL_H_
#define SHARDOPS_CSRC_KERNEL_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "aligned_copies.h"
#include "cuda_abi.h"
#include "driver.h"
#include "errors.h"

namespace shardops {

// What the custom call's attributes say.
struct LaunchSpec {
  using Dims = std::array<int64_t, 3>;

  std::string cubin, name;
  Dims grid{1, 1, 1}, block{1, 1, 1}, cluster{1, 1, 1};
  int64_t shared_bytes = 0;
  int64_t early = 0;             // 1: see launch.cc
  int64_t align = 1;             // of every address that the kernel is given
  int64_t resident = 0;          // 1: see launch.cc
  std::vector<uint8_t> scalars;  // packed
  std::vector<int64_t> sizes;    // of each scalar, in bytes
  std::vector<int64_t> zeroed;   // indices of results
};

// A kernel of a loaded cubin. Many custom calls share one.
class LoadedKernel {
 public:
  explicit LoadedKernel(cu::Kernel kernel) : kernel_(kernel) {}

  // Loads the kernel into the device's context and raises its limits to what is asked.
  ffi::ErrorOr<cu::Function> OnDevice(int ordinal, int64_t shared_bytes, bool large_cluster);

 private:
  struct Limits {
    int64_t shared_bytes = 48 << 10;  // what every kernel may use unasked
    bool large_cluster = false;
  };

  const cu::Kernel kernel_;
  std::mutex mutex_;
  std::array<Limits, kMaxDevices> limits_;
};

// A cubin. There is one for each distinct content, and it stays until the process ends: launches
// and CUDA graphs that use it may outlive the executable that brought it.
class Cubin {
 public:
  static Cubin& Of(const std::string& content);

  ffi::ErrorOr<LoadedKernel*> Find(const std::string& name);

 private:
  explicit Cubin(const std::string& content) : content_(content) {}

  const std::string content_;
  std::mutex mutex_;
  cu::Library library_ = nullptr;
  std::map<std::string, std::unique_ptr<LoadedKernel>> kernels_;
};

// The state of one custom call, shared by its executions on all devices and threads.
class Kernel {
 public:
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  // Checks the attributes. Loads the cubin too where there is a driver: a machine without one can
  // compile for a GPU.
  static ffi::ErrorOr<std::unique_ptr<Kernel>> Make(const LaunchSpec& spec);

  // Does what may not happen while a stream is captured. Later calls cost one atomic load.
  ffi::Error Prepare(int ordinal);

  // Parameters: operands, results, scalars. Arrays that do not lie on `align` are copied.
  ffi::Error Launch(int ordinal, cu::Stream stream, const std::vector<Region>& operands,
                    const std::vector<Region>& results);

 private:
  Kernel(const LaunchSpec& spec, Cubin& cubin);
  ffi::Error Check() const;
  std::string Describe() const;
  ffi::Error LaunchOn(int ordinal, cu::Stream stream, std::vector<Region>& arrays, size_t operands);

  LaunchSpec spec_;  // without its cubin
  Cubin& cubin_;
  std::vector<std::max_align_t> scalars_;  // each at an aligned address of its own
  std::vector<size_t> offsets_;            // of the scalars, in elements of scalars_
  std::array<std::atomic<cu::Function>, kMaxDevices> functions_ = {};
  AlignedCopies copies_;
};

// For the tests: how often each thing happened in this process.
struct LaunchCounters {
  std::atomic<int64_t> cubins_loaded{0}, launched{0};
};
extern LaunchCounters launch_counters;

}  // namespace shardops

#endif  // SHARDOPS_CSRC_KERNEL_H_
