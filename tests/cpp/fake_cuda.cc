// A stand-in for libcuda.so.1 with two devices whose memory is the host's and whose streams run at
// once. A "cubin" is "FAKE:" and the names of kernels, which are the host functions below. It is
// strict: what the driver's documentation forbids is an error here.
#include "fake_cuda.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda_abi.h"

namespace {

enum : uint32_t {
  kInvalidValue = 1,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNotFound = 500,
  kCaptureUnsupported = 900,
};
cu::Result Code(uint32_t code) { return static_cast<cu::Result>(code); }
constexpr cu::Result kOk = cu::Result::kSuccess;
constexpr int kDevices = 2;

std::atomic<int64_t> libraries{0}, kernels{0}, memsets{0}, launches{0};
std::atomic<int64_t> early_launches{0}, resident_launches{0};
thread_local std::vector<int> current;  // stack of devices
thread_local bool capturing = false;
std::atomic<int> captures{0};  // threads that capture, each for all threads

template <class T>
T Read(void** parameters, int i) {
  T value;
  std::memcpy(&value, parameters[i], sizeof(T));
  return value;
}

// axpy(x, y, out, a, n): out += a x + y, so that the test sees whether out was zeroed.
void Axpy(const cu::LaunchConfig&, void** p) {
  const auto *x = Read<const float*>(p, 0), *y = Read<const float*>(p, 1);
  auto* out = Read<float*>(p, 2);
  const auto a = Read<float>(p, 3);
  for (int64_t i = 0; i < Read<int32_t>(p, 4); ++i) out[i] += a * x[i] + y[i];
}

// words: as axpy, of arrays that start on 16 bytes; others it leaves alone.
void Words(const cu::LaunchConfig& c, void** p) {
  for (int i = 0; i < 3; ++i) {
    if (Read<uintptr_t>(p, i) % 16) return;
  }
  Axpy(c, p);
}

// meet: as words, once another thread's launch has begun, or none has for a tenth of a second. So
// threads that may launch at once do, and what they copied before is there by then.
void Meet(const cu::LaunchConfig& c, void** p) {
  static std::mutex together;
  static std::condition_variable met;
  static int64_t begun = 0;
  {
    std::unique_lock<std::mutex> lock(together);
    const int64_t own = ++begun;
    met.notify_all();
    met.wait_for(lock, std::chrono::milliseconds(100), [&] { return begun > own; });
  }
  Words(c, p);
}

// shape(out): the launch as int32[10]: grid, block, cluster, dynamic shared memory.
void Shape(const cu::LaunchConfig& c, void** p) {
  auto* out = Read<int32_t*>(p, 0);
  unsigned cluster[3] = {1, 1, 1};
  for (unsigned i = 0; i < c.attribute_count; ++i) {
    if (c.attributes[i].id != cu::LaunchAttributeId::kClusterDimension) continue;
    const auto& xyz = c.attributes[i].value.cluster;
    cluster[0] = xyz.x, cluster[1] = xyz.y, cluster[2] = xyz.z;
  }
  const unsigned values[10] = {c.grid_x,  c.grid_y,   c.grid_z,   c.block_x,  c.block_y,
                               c.block_z, cluster[0], cluster[1], cluster[2], c.shared_bytes};
  for (int i = 0; i < 10; ++i) out[i] = static_cast<int32_t>(values[i]);
}

// three(a, b, c, out): scalars of 1, 8 and 2 bytes, which lie unaligned when packed.
void Three(const cu::LaunchConfig&, void** p) {
  *Read<double*>(p, 0) = Read<int8_t>(p, 1) + Read<double>(p, 2) + Read<int16_t>(p, 3);
}

using HostFunction = void (*)(const cu::LaunchConfig&, void**);
const std::map<std::string, HostFunction>& HostFunctions() {
  static const auto* functions = new std::map<std::string, HostFunction>{
      {"axpy", &Axpy}, {"words", &Words}, {"meet", &Meet}, {"shape", &Shape}, {"three", &Three}};
  return *functions;
}

struct FakeLibrary {
  std::string names;
};
struct FakeFunction;
struct FakeKernel {
  HostFunction run;
  int shared_limit[kDevices] = {48 << 10, 48 << 10};
  bool large_cluster[kDevices] = {};
  FakeFunction* on[kDevices] = {};
};
struct FakeFunction {
  FakeKernel* kernel;
  int device;
};
std::mutex mutex;  // of every FakeKernel

template <class Real, class Fake>
Real Cast(Fake* fake) {
  return reinterpret_cast<Real>(fake);
}

}  // namespace

extern "C" {

void fake_cuda_capture(bool on) {
  captures += static_cast<int>(on) - static_cast<int>(capturing);
  capturing = on;
}
bool fake_cuda_any_capture() { return captures > 0; }
bool fake_cuda_capturing() { return capturing; }
int fake_cuda_current_device() { return current.empty() ? -1 : current.back(); }
FakeCudaCounters fake_cuda_counters() {
  return {libraries, kernels, memsets, launches, early_launches, resident_launches};
}

cu::Result cuInit(unsigned flags) { return flags == 0 ? kOk : Code(kInvalidValue); }

cu::Result cuGetErrorName(cu::Result result, const char** name) {
  static const std::map<uint32_t, const char*> names = {
      {0, "CUDA_SUCCESS"},
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kNotFound, "CUDA_ERROR_NOT_FOUND"},
      {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
  };
  auto found = names.find(static_cast<uint32_t>(result));
  *name = found == names.end() ? nullptr : found->second;
  return *name ? kOk : Code(kInvalidValue);
}

cu::Result cuDriverGetVersion(int* version) {
  *version = 13000;
  return kOk;
}

cu::Result cuDeviceGet(cu::Device* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < kDevices ? kOk : Code(kInvalidDevice);
}

cu::Result cuDeviceGetName(char* name, int bytes, cu::Device device) {
  if (device < 0 || device >= kDevices) return Code(kInvalidDevice);
  std::snprintf(name, static_cast<size_t>(bytes), "Fake GPU");
  return kOk;
}

cu::Result cuDevicePrimaryCtxRetain(cu::Context* context, cu::Device device) {
  if (capturing) return Code(kCaptureUnsupported);
  *context = reinterpret_cast<cu::Context>(static_cast<uintptr_t>(device) + 1);
  return kOk;
}

cu::Result cuCtxPushCurrent_v2(cu::Context context) {
  if (!context) return Code(kInvalidContext);
  current.push_back(static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1);
  return kOk;
}

cu::Result cuCtxPopCurrent_v2(cu::Context* context) {
  if (current.empty()) return Code(kInvalidContext);
  *context = reinterpret_cast<cu::Context>(static_cast<uintptr_t>(current.back()) + 1);
  current.pop_back();
  return kOk;
}

cu::Result cuLibraryLoadData(cu::Library* library, const void* image, int*, void**, unsigned, int*,
                             void**, unsigned) {
  if (capturing) return Code(kCaptureUnsupported);
  const char* text = static_cast<const char*>(image);
  if (std::strncmp(text, "FAKE:", 5) != 0) return Code(kInvalidImage);
  ++libraries;
  *library = Cast<cu::Library>(new FakeLibrary{text});
  return kOk;
}

cu::Result cuLibraryGetKernel(cu::Kernel* kernel, cu::Library library, const char* name) {
  const FakeLibrary& from = *reinterpret_cast<FakeLibrary*>(library);
  auto found = HostFunctions().find(name);
  if (found == HostFunctions().end() || from.names.find(name) == std::string::npos) {
    return Code(kNotFound);
  }
  ++kernels;
  *kernel = Cast<cu::Kernel>(new FakeKernel{found->second});
  return kOk;
}

cu::Result cuKernelGetFunction(cu::Function* function, cu::Kernel kernel) {
  if (capturing) return Code(kCaptureUnsupported);
  if (current.empty()) return Code(kInvalidContext);
  auto* from = reinterpret_cast<FakeKernel*>(kernel);
  std::lock_guard<std::mutex> lock(mutex);
  FakeFunction*& on = from->on[current.back()];
  if (!on) on = new FakeFunction{from, current.back()};
  *function = Cast<cu::Function>(on);
  return kOk;
}

cu::Result cuKernelSetAttribute(cu::FunctionAttribute attribute, int value, cu::Kernel kernel,
                                cu::Device device) {
  if (capturing) return Code(kCaptureUnsupported);
  auto* of = reinterpret_cast<FakeKernel*>(kernel);
  std::lock_guard<std::mutex> lock(mutex);
  if (attribute == cu::FunctionAttribute::kNonPortableClusterSizeAllowed) {
    of->large_cluster[device] = value != 0;
    return kOk;
  }
  if (value > 227 << 10) return Code(kInvalidValue);
  of->shared_limit[device] = value;
  return kOk;
}

cu::Result cuLaunchKernelEx(const cu::LaunchConfig* config, cu::Function function,
                            void** parameters, void** extra) {
  const FakeFunction& f = *reinterpret_cast<FakeFunction*>(function);
  if (current.empty() || current.back() != f.device) return Code(kInvalidContext);
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const cu::LaunchAttribute& a = config->attributes[i];
    if (a.id == cu::LaunchAttributeId::kClusterDimension) {
      cluster = a.value.cluster.x * a.value.cluster.y * a.value.cluster.z;
    } else if (a.id == cu::LaunchAttributeId::kProgrammaticStreamSerialization) {
      early_launches += a.value.allowed;
    } else if (a.id == cu::LaunchAttributeId::kCooperative) {
      resident_launches += a.value.cooperative;
    } else {
      return Code(kInvalidValue);
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (config->shared_bytes > static_cast<unsigned>(f.kernel->shared_limit[f.device]) || extra ||
        (cluster > 8 && !f.kernel->large_cluster[f.device])) {
      return Code(kInvalidValue);
    }
  }
  ++launches;
  f.kernel->run(*config, parameters);
  return kOk;
}

cu::Result cuMemsetD8Async(cu::Pointer to, unsigned char value, size_t bytes, cu::Stream) {
  if (current.empty()) return Code(kInvalidContext);
  ++memsets;
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return kOk;
}

}  // extern "C"

// The names are the driver's, the types those in cuda_abi.h.
#define SAME_TYPE(name, member) \
  static_assert(std::is_same_v<decltype(&name), decltype(cu::Functions::member)>)
SAME_TYPE(cuInit, Init);
SAME_TYPE(cuGetErrorName, GetErrorName);
SAME_TYPE(cuDriverGetVersion, DriverGetVersion);
SAME_TYPE(cuDeviceGet, DeviceGet);
SAME_TYPE(cuDevicePrimaryCtxRetain, DevicePrimaryCtxRetain);
SAME_TYPE(cuCtxPushCurrent_v2, CtxPushCurrent);
SAME_TYPE(cuCtxPopCurrent_v2, CtxPopCurrent);
SAME_TYPE(cuLibraryLoadData, LibraryLoadData);
SAME_TYPE(cuLibraryGetKernel, LibraryGetKernel);
SAME_TYPE(cuKernelGetFunction, KernelGetFunction);
SAME_TYPE(cuKernelSetAttribute, KernelSetAttribute);
SAME_TYPE(cuLaunchKernelEx, LaunchKernelEx);
SAME_TYPE(cuMemsetD8Async, MemsetD8Async);
SAME_TYPE(cuDeviceGetName, DeviceGetName);
