#include "aligned_copies.h"

#include "driver.h"

namespace shardops {
namespace {

constexpr char kOp[] = "shardops_launch";

const cu::Functions& cuda() { return Driver::Get().functions(); }

ffi::Error Copy(void* to, const void* from, size_t bytes, cu::Stream stream) {
  const cu::Result result = cuda().MemcpyDtoDAsync(
      reinterpret_cast<cu::Pointer>(to), reinterpret_cast<cu::Pointer>(from), bytes, stream);
  if (result == cu::Result::kSuccess) return ffi::Error::Success();
  return Driver::Get().Error(kOp, "cuMemcpyDtoDAsync", result);
}

bool IsOn(int64_t align, const Region& array) {
  const auto address = reinterpret_cast<uintptr_t>(array.data);
  return array.bytes == 0 || address % static_cast<uintptr_t>(align) == 0;
}

}  // namespace

AlignedCopies::~AlignedCopies() {
  for (const auto& [place, memory] : owned_) {
    auto context = Driver::Get().ContextOf(place.first);
    if (!context.has_value()) continue;
    ContextScope scope(*context);
    RelaxedCapture relaxed;
    cuda().MemFree(reinterpret_cast<cu::Pointer>(memory.data));  // waits for what uses it
  }
}

std::unique_lock<std::mutex> AlignedCopies::Together(int64_t align,
                                                     const std::vector<Region>& arrays) {
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  for (const Region& array : arrays) {
    if (IsOn(align, array)) continue;
    lock.lock();
    break;
  }
  return lock;
}

ffi::Error AlignedCopies::Replace(int ordinal, cu::Stream stream, int64_t align, size_t operands,
                                  std::vector<Region>& arrays) {
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (IsOn(align, arrays[i])) continue;
    auto memory = Memory(ordinal, i, arrays[i].bytes);
    if (!memory.has_value()) return memory.error();
    if (i < operands) {
      ffi::Error error = Copy(*memory, arrays[i].data, arrays[i].bytes, stream);
      if (error.failure()) return error;
    }
    arrays[i].data = *memory;
  }
  return ffi::Error::Success();
}

ffi::Error AlignedCopies::Return(cu::Stream stream, const std::vector<Region>& replaced,
                                 const std::vector<Region>& results) {
  const size_t operands = replaced.size() - results.size();
  for (size_t i = 0; i < results.size(); ++i) {
    void* const from = replaced[operands + i].data;
    if (from == results[i].data) continue;
    ffi::Error error = Copy(results[i].data, from, results[i].bytes, stream);
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

ffi::ErrorOr<void*> AlignedCopies::Memory(int ordinal, size_t array, size_t bytes) {
  Region& memory = owned_[{ordinal, array}];
  if (memory.data == nullptr) {  // an array of a call has one size
    RelaxedCapture relaxed;      // the stream may be captured
    cu::Pointer made = 0;
    const cu::Result result = cuda().MemAlloc(&made, bytes);
    if (result != cu::Result::kSuccess) {
      return ffi::Unexpected(Driver::Get().Error(
          kOp, "cuMemAlloc", result,
          ": array " + std::to_string(array) + " is not where its kernel can read it, and there " +
              "is no memory for " + std::to_string(bytes) +
              " bytes to copy it to. Copy the array, or so.use_kernels('')."));
    }
    memory = {reinterpret_cast<void*>(made), bytes};
  }
  return memory.data;
}

}  // namespace shardops
