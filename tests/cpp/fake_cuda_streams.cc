// The rest of the stand-in for libcuda.so.1: memory, streams and events, whose clock is the tests'.
//
// FAKE_CUDA_FREE_BYTES: the memory that is said to be free; default 1 GiB.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cuda_abi.h"
#include "fake_cuda.h"

namespace {

enum : uint32_t {
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidContext = 201,
  kCaptureUnsupported = 900,
};
cu::Result Code(uint32_t code) { return static_cast<cu::Result>(code); }
constexpr cu::Result kOk = cu::Result::kSuccess;

struct FakeEvent {
  double at = -1;
};

std::atomic<double> clock_now{0};
std::atomic<int64_t> live{0};
thread_local cu::CaptureMode mode = static_cast<cu::CaptureMode>(0);

// What may not be called while a stream is captured, unless the thread says that it knows.
bool Unsafe() { return fake_cuda_any_capture() && mode != cu::CaptureMode::kRelaxed; }

size_t FreeBytes() {
  const char* given = std::getenv("FAKE_CUDA_FREE_BYTES");
  return given ? std::strtoull(given, nullptr, 10) : size_t{1} << 30;
}

}  // namespace

extern "C" {

void fake_cuda_spend(double microseconds) {
  double before = clock_now;
  while (!clock_now.compare_exchange_weak(before, before + microseconds)) {
  }
}
int64_t fake_cuda_live() { return live; }

cu::Result cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (fake_cuda_current_device() < 0) return Code(kInvalidContext);
  *free = FreeBytes();
  *total = size_t{1} << 31;
  return kOk;
}

cu::Result cuMemAlloc_v2(cu::Pointer* to, size_t bytes) {
  if (Unsafe()) return Code(kCaptureUnsupported);
  if (fake_cuda_current_device() < 0) return Code(kInvalidContext);
  if (bytes == 0) return Code(kInvalidValue);
  if (bytes > FreeBytes() / 4) return Code(kOutOfMemory);
  ++live;
  *to = reinterpret_cast<cu::Pointer>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  return kOk;
}

cu::Result cuMemFree_v2(cu::Pointer p) {
  if (Unsafe()) return Code(kCaptureUnsupported);
  --live;
  std::free(reinterpret_cast<void*>(p));
  return kOk;
}

cu::Result cuMemcpyHtoDAsync_v2(cu::Pointer to, const void* from, size_t bytes, cu::Stream) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return kOk;
}

cu::Result cuMemcpyDtoDAsync_v2(cu::Pointer to, cu::Pointer from, size_t bytes, cu::Stream) {
  if (from < to + bytes && to < from + bytes) return Code(kInvalidValue);  // they overlap
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  return kOk;
}

cu::Result cuStreamCreate(cu::Stream* stream, unsigned flags) {
  if (flags != static_cast<unsigned>(cu::StreamFlags::kNonBlocking)) return Code(kInvalidValue);
  ++live;
  *stream = reinterpret_cast<cu::Stream>(new int(fake_cuda_current_device()));
  return kOk;
}

cu::Result cuStreamSynchronize(cu::Stream) { return Unsafe() ? Code(kCaptureUnsupported) : kOk; }

cu::Result cuStreamDestroy_v2(cu::Stream stream) {
  --live;
  delete reinterpret_cast<int*>(stream);
  return kOk;
}

cu::Result cuEventCreate(cu::Event* event, unsigned) {
  ++live;
  *event = reinterpret_cast<cu::Event>(new FakeEvent);
  return kOk;
}

cu::Result cuEventRecord(cu::Event event, cu::Stream) {
  reinterpret_cast<FakeEvent*>(event)->at = clock_now;
  return kOk;
}

cu::Result cuEventSynchronize(cu::Event) { return Unsafe() ? Code(kCaptureUnsupported) : kOk; }

cu::Result cuEventElapsedTime(float* milliseconds, cu::Event from, cu::Event to) {
  const double start = reinterpret_cast<FakeEvent*>(from)->at;
  const double stop = reinterpret_cast<FakeEvent*>(to)->at;
  if (start < 0 || stop < 0) return Code(kInvalidValue);
  *milliseconds = static_cast<float>((stop - start) / 1000);
  return kOk;
}

cu::Result cuEventDestroy_v2(cu::Event event) {
  --live;
  delete reinterpret_cast<FakeEvent*>(event);
  return kOk;
}

cu::Result cuThreadExchangeStreamCaptureMode(cu::CaptureMode* exchanged) {
  std::swap(*exchanged, mode);
  return kOk;
}

}  // extern "C"

// The names are the driver's, the types those in cuda_abi.h.
#define SAME_TYPE(name, member) \
  static_assert(std::is_same_v<decltype(&name), decltype(cu::Functions::member)>)
SAME_TYPE(cuMemGetInfo_v2, MemGetInfo);
SAME_TYPE(cuMemAlloc_v2, MemAlloc);
SAME_TYPE(cuMemFree_v2, MemFree);
SAME_TYPE(cuMemcpyHtoDAsync_v2, MemcpyHtoDAsync);
SAME_TYPE(cuMemcpyDtoDAsync_v2, MemcpyDtoDAsync);
SAME_TYPE(cuStreamCreate, StreamCreate);
SAME_TYPE(cuStreamSynchronize, StreamSynchronize);
SAME_TYPE(cuStreamDestroy_v2, StreamDestroy);
SAME_TYPE(cuEventCreate, EventCreate);
SAME_TYPE(cuEventRecord, EventRecord);
SAME_TYPE(cuEventSynchronize, EventSynchronize);
SAME_TYPE(cuEventElapsedTime, EventElapsedTime);
SAME_TYPE(cuEventDestroy_v2, EventDestroy);
SAME_TYPE(cuThreadExchangeStreamCaptureMode, ThreadExchangeStreamCaptureMode);
