// Copies of arrays that do not lie where a kernel wants them. XLA's own lie on 128 bytes; one that
// another library made and lent it need not.
#ifndef SHARDOPS_CSRC_ALIGNED_COPIES_H_
#define SHARDOPS_CSRC_ALIGNED_COPIES_H_

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_abi.h"
#include "errors.h"

namespace shardops {

struct Region {
  void* data;
  size_t bytes;
};

// The copies of one custom call, which stay for its next executions: those on a device follow each
// other on one stream, each enqueued whole before the next one (`Together`), and a CUDA graph that
// holds one needs them as long as the call lives.
class AlignedCopies {
 public:
  AlignedCopies() = default;
  ~AlignedCopies();
  AlignedCopies(const AlignedCopies&) = delete;
  AlignedCopies& operator=(const AlignedCopies&) = delete;

  // Held from `Replace` to `Return`, so that no other thread's execution comes between them; holds
  // nothing where no array has to be copied.
  std::unique_lock<std::mutex> Together(int64_t align, const std::vector<Region>& arrays);

  // Memory in the place of each array that is not at a multiple of `align`; into that of the first
  // `operands` goes what they hold. The device's context is current.
  ffi::Error Replace(int ordinal, cu::Stream stream, int64_t align, size_t operands,
                     std::vector<Region>& arrays);

  // From the memory that `Replace` put there to the results' own, after the launch.
  static ffi::Error Return(cu::Stream stream, const std::vector<Region>& replaced,
                           const std::vector<Region>& results);

 private:
  ffi::ErrorOr<void*> Memory(int ordinal, size_t array, size_t bytes);

  std::mutex mutex_;
  std::map<std::pair<int, size_t>, Region> owned_;  // by device and the array's place in the call
};

}  // namespace shardops

#endif  // SHARDOPS_CSRC_ALIGNED_COPIES_H_
