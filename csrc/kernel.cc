#include "kernel.h"

#include <cstring>
#include <unordered_map>

namespace shardops {
namespace {

constexpr char kOp[] = "shardops_launch";
constexpr int64_t kMaxGrid = 0x7fffffff;
constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kMaxCluster = 16;
constexpr int64_t kPortableCluster = 8;
constexpr int64_t kMaxSharedBytes = 1 << 20;  // above any device's; the driver knows each one's
constexpr int64_t kMaxScalarBytes = 4096;

int64_t Product(const LaunchSpec::Dims& d) { return d[0] * d[1] * d[2]; }

std::string Text(const LaunchSpec::Dims& d) {
  return "(" + std::to_string(d[0]) + ", " + std::to_string(d[1]) + ", " + std::to_string(d[2]) +
         ")";
}

ffi::Error CheckDims(const char* name, const LaunchSpec::Dims& dims, const LaunchSpec::Dims& most) {
  for (int i = 0; i < 3; ++i) {
    if (dims[i] < 1 || dims[i] > most[i]) {
      return InvalidAttribute(kOp, name, Text(dims), "(1, 1, 1) to " + Text(most));
    }
  }
  return ffi::Error::Success();
}

}  // namespace

LaunchCounters launch_counters;

// ------------------------------------------------------------------------------------- cubins

Cubin& Cubin::Of(const std::string& content) {
  static std::mutex* mutex = new std::mutex;
  static auto* cubins = new std::unordered_map<std::string, Cubin*>;
  std::lock_guard<std::mutex> lock(*mutex);
  Cubin*& cubin = (*cubins)[content];
  if (!cubin) cubin = new Cubin(content);
  return *cubin;
}

ffi::ErrorOr<LoadedKernel*> Cubin::Find(const std::string& name) {
  Driver& driver = Driver::Get();
  if (ffi::Error error = driver.Load(); error.failure()) return ffi::Unexpected(error);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!library_) {
    cu::Result r = driver.functions().LibraryLoadData(&library_, content_.data(), nullptr, nullptr,
                                                      0, nullptr, nullptr, 0);
    if (r != cu::Result::kSuccess) {
      library_ = nullptr;
      return ffi::Unexpected(driver.Error(
          kOp, "cuLibraryLoadData", r,
          " for the cubin of kernel " + Quoted(name) +
              ". It was compiled for another GPU or is damaged: clear the kernel cache."));
    }
    launch_counters.cubins_loaded++;
  }
  std::unique_ptr<LoadedKernel>& loaded = kernels_[name];
  if (!loaded) {
    cu::Kernel kernel = nullptr;
    cu::Result r = driver.functions().LibraryGetKernel(&kernel, library_, name.c_str());
    if (r != cu::Result::kSuccess) {
      return ffi::Unexpected(driver.Error(kOp, "cuLibraryGetKernel", r,
                                          ": the cubin has no kernel " + Quoted(name) + "."));
    }
    loaded = std::make_unique<LoadedKernel>(kernel);
  }
  return loaded.get();
}

ffi::ErrorOr<cu::Function> LoadedKernel::OnDevice(int ordinal, int64_t shared_bytes,
                                                  bool large_cluster) {
  Driver& driver = Driver::Get();
  auto context = driver.ContextOf(ordinal);
  if (!context.has_value()) return ffi::Unexpected(context.error());
  ContextScope scope(*context);
  const std::string where = " on device " + std::to_string(ordinal);
  if (scope.result() != cu::Result::kSuccess) {
    return ffi::Unexpected(driver.Error(kOp, "cuCtxPushCurrent", scope.result(), where + "."));
  }
  cu::Device device = 0;
  if (cu::Result r = driver.functions().DeviceGet(&device, ordinal); r != cu::Result::kSuccess) {
    return ffi::Unexpected(driver.Error(kOp, "cuDeviceGet", r, where + "."));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto raise = [&](cu::FunctionAttribute attribute, int64_t value) {
    return driver.functions().KernelSetAttribute(attribute, static_cast<int>(value), kernel_,
                                                 device);
  };
  Limits& limits = limits_[ordinal];
  // Limits belong to the kernel, not to the call: never lower what another call has asked for.
  if (shared_bytes > limits.shared_bytes) {
    cu::Result r = raise(cu::FunctionAttribute::kMaxDynamicSharedBytes, shared_bytes);
    if (r != cu::Result::kSuccess) {
      return ffi::Unexpected(driver.Error(kOp, "cuKernelSetAttribute", r,
                                          where + ": attribute 'shared_bytes' is " +
                                              std::to_string(shared_bytes) +
                                              "; expected no more than the device has."));
    }
    limits.shared_bytes = shared_bytes;
  }
  if (large_cluster && !limits.large_cluster) {
    cu::Result r = raise(cu::FunctionAttribute::kNonPortableClusterSizeAllowed, 1);
    if (r != cu::Result::kSuccess) {
      return ffi::Unexpected(
          driver.Error(kOp, "cuKernelSetAttribute", r,
                       where + ": it has no clusters of more than 8 blocks; use smaller ones."));
    }
    limits.large_cluster = true;
  }
  // Loads the code into this context now. Left to the first launch it would fall into a capture.
  cu::Function function = nullptr;
  cu::Result r = driver.functions().KernelGetFunction(&function, kernel_);
  if (r != cu::Result::kSuccess) {
    return ffi::Unexpected(driver.Error(kOp, "cuKernelGetFunction", r, where + "."));
  }
  return function;
}

// -------------------------------------------------------------------------------------- calls

ffi::TypeId Kernel::id = {};
ffi::TypeInfo Kernel::info = ffi::MakeTypeInfo<Kernel>();

Kernel::Kernel(const LaunchSpec& spec, Cubin& cubin) : spec_(spec), cubin_(cubin) {
  spec_.cubin.clear();
}

ffi::ErrorOr<std::unique_ptr<Kernel>> Kernel::Make(const LaunchSpec& spec) {
  if (spec.cubin.empty()) {
    return ffi::Unexpected(
        InvalidAttribute(kOp, "cubin", "empty", "the code of kernel " + Quoted(spec.name)));
  }
  auto kernel = std::unique_ptr<Kernel>(new Kernel(spec, Cubin::Of(spec.cubin)));
  if (ffi::Error error = kernel->Check(); error.failure()) return ffi::Unexpected(error);
  const uint8_t* from = spec.scalars.data();
  for (int64_t size : spec.sizes) {
    kernel->offsets_.push_back(kernel->scalars_.size());
    kernel->scalars_.resize(kernel->scalars_.size() +
                            (size + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
    std::memcpy(&kernel->scalars_[kernel->offsets_.back()], from, size);
    from += size;
  }
  if (Driver::Get().Load().success()) {
    if (auto found = kernel->cubin_.Find(spec.name); !found.has_value()) {
      return ffi::Unexpected(found.error());
    }
  }
  return ffi::ErrorOr<std::unique_ptr<Kernel>>(std::move(kernel));
}

ffi::Error Kernel::Check() const {
  if (spec_.name.empty()) return InvalidAttribute(kOp, "name", "empty", "a kernel of the cubin");
  for (ffi::Error error : {
           CheckDims("grid", spec_.grid, {kMaxGrid, 65535, 65535}),
           CheckDims("block", spec_.block, {kMaxThreads, kMaxThreads, 64}),
           CheckDims("cluster", spec_.cluster, {kMaxCluster, kMaxCluster, kMaxCluster}),
       }) {
    if (error.failure()) return error;
  }
  if (Product(spec_.block) > kMaxThreads) {
    return InvalidAttribute(kOp, "block", Text(spec_.block),
                            "no more than " + std::to_string(kMaxThreads) + " threads in all");
  }
  if (Product(spec_.cluster) > kMaxCluster) {
    return InvalidAttribute(kOp, "cluster", Text(spec_.cluster),
                            "no more than " + std::to_string(kMaxCluster) + " blocks in all");
  }
  for (int i = 0; i < 3; ++i) {
    if (spec_.grid[i] % spec_.cluster[i]) {
      return InvalidAttribute(kOp, "grid", Text(spec_.grid),
                              "a multiple of the cluster " + Text(spec_.cluster));
    }
  }
  if (spec_.shared_bytes < 0 || spec_.shared_bytes > kMaxSharedBytes) {
    return InvalidAttribute(kOp, "shared_bytes", spec_.shared_bytes,
                            "0 to " + std::to_string(kMaxSharedBytes));
  }
  for (auto [name, value] :
       {std::pair{"early", spec_.early}, std::pair{"resident", spec_.resident}}) {
    if (value != 0 && value != 1) return InvalidAttribute(kOp, name, value, "0 or 1");
  }
  if (spec_.align < 1) return InvalidAttribute(kOp, "align", spec_.align, "1 or more");
  int64_t total = 0;
  for (int64_t size : spec_.sizes) {
    if (size < 1 || size > kMaxScalarBytes) {
      return InvalidAttribute(kOp, "sizes", size, "1 to " + std::to_string(kMaxScalarBytes));
    }
    total += size;
  }
  if (total != static_cast<int64_t>(spec_.scalars.size())) {
    return InvalidAttribute(kOp, "scalars", std::to_string(spec_.scalars.size()) + " bytes long",
                            std::to_string(total) + " bytes, the sum of attribute 'sizes'");
  }
  return ffi::Error::Success();
}

std::string Kernel::Describe() const {
  return " for kernel " + Quoted(spec_.name) + ", grid " + Text(spec_.grid) + ", block " +
         Text(spec_.block) + ", cluster " + Text(spec_.cluster) + ", " +
         std::to_string(spec_.shared_bytes) + " bytes of shared memory.";
}

ffi::Error Kernel::Prepare(int ordinal) {
  if (ordinal >= 0 && ordinal < kMaxDevices &&
      functions_[ordinal].load(std::memory_order_acquire)) {
    return ffi::Error::Success();
  }
  auto loaded = cubin_.Find(spec_.name);
  if (!loaded.has_value()) return loaded.error();
  auto function =
      (*loaded)->OnDevice(ordinal, spec_.shared_bytes, Product(spec_.cluster) > kPortableCluster);
  if (!function.has_value()) return function.error();
  functions_[ordinal].store(*function, std::memory_order_release);
  return ffi::Error::Success();
}

ffi::Error Kernel::Launch(int ordinal, cu::Stream stream, const std::vector<Region>& operands,
                          const std::vector<Region>& results) {
  if (ffi::Error error = Prepare(ordinal); error.failure()) return error;
  auto context = Driver::Get().ContextOf(ordinal);
  if (!context.has_value()) return context.error();
  ContextScope scope(*context);
  if (scope.result() != cu::Result::kSuccess) {
    return Driver::Get().Error(kOp, "cuCtxPushCurrent", scope.result(), Describe());
  }
  std::vector<Region> arrays = operands;
  arrays.insert(arrays.end(), results.begin(), results.end());
  const auto together = copies_.Together(spec_.align, arrays);
  ffi::Error error = copies_.Replace(ordinal, stream, spec_.align, operands.size(), arrays);
  if (error.success()) error = LaunchOn(ordinal, stream, arrays, operands.size());
  return error.success() ? AlignedCopies::Return(stream, arrays, results) : error;
}

ffi::Error Kernel::LaunchOn(int ordinal, cu::Stream stream, std::vector<Region>& arrays,
                            size_t operands) {
  Driver& driver = Driver::Get();
  const int64_t results = arrays.size() - operands;
  for (int64_t index : spec_.zeroed) {
    if (index < 0 || index >= results) {
      return InvalidAttribute(kOp, "zeroed", index,
                              "the index of one of " + std::to_string(results) + " results");
    }
    const Region& r = arrays[operands + index];
    if (r.bytes == 0) continue;
    cu::Result result =
        driver.functions().MemsetD8Async(reinterpret_cast<cu::Pointer>(r.data), 0, r.bytes, stream);
    if (result != cu::Result::kSuccess) {
      return driver.Error(kOp, "cuMemsetD8Async", result, Describe());
    }
  }
  // The driver copies each parameter from where its entry points.
  std::vector<void*> parameters;
  parameters.reserve(arrays.size() + offsets_.size());
  for (Region& array : arrays) parameters.push_back(&array.data);
  for (size_t offset : offsets_) parameters.push_back(&scalars_[offset]);

  auto dim = [](int64_t d) { return static_cast<unsigned>(d); };
  cu::LaunchAttribute attributes[3] = {};
  unsigned attribute_count = 0;
  auto value_of = [&](cu::LaunchAttributeId id) -> auto& {
    cu::LaunchAttribute& a = attributes[attribute_count++];
    a.id = id;
    return a.value;
  };
  if (Product(spec_.cluster) > 1) {
    value_of(cu::LaunchAttributeId::kClusterDimension).cluster = {
        dim(spec_.cluster[0]), dim(spec_.cluster[1]), dim(spec_.cluster[2])};
  }
  if (spec_.early) value_of(cu::LaunchAttributeId::kProgrammaticStreamSerialization).allowed = 1;
  if (spec_.resident) value_of(cu::LaunchAttributeId::kCooperative).cooperative = 1;
  cu::LaunchConfig config = {};
  config.grid_x = dim(spec_.grid[0]);
  config.grid_y = dim(spec_.grid[1]);
  config.grid_z = dim(spec_.grid[2]);
  config.block_x = dim(spec_.block[0]);
  config.block_y = dim(spec_.block[1]);
  config.block_z = dim(spec_.block[2]);
  config.shared_bytes = static_cast<unsigned>(spec_.shared_bytes);
  config.stream = stream;
  config.attributes = attributes;
  config.attribute_count = attribute_count;
  cu::Result result = driver.functions().LaunchKernelEx(
      &config, functions_[ordinal].load(std::memory_order_acquire), parameters.data(), nullptr);
  if (result != cu::Result::kSuccess) {
    const char* fewer = " All blocks run at once: SHARDOPS_SM_MARGIN makes them fewer.";
    return driver.Error(kOp, "cuLaunchKernelEx", result,
                        Describe() + (spec_.resident ? fewer : ""));
  }
  launch_counters.launched.fetch_add(1, std::memory_order_relaxed);
  return ffi::Error::Success();
}

}  // namespace shardops
