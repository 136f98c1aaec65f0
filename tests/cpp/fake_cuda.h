// What the tests may ask of the stand-in for the CUDA driver.
#ifndef SHARDOPS_TESTS_CPP_FAKE_CUDA_H_
#define SHARDOPS_TESTS_CPP_FAKE_CUDA_H_

#include <cstdint>

extern "C" {

// Between true and false the calling thread captures: whatever may not be captured fails.
void fake_cuda_capture(bool on);

// True while any thread captures.
bool fake_cuda_any_capture();

// True in a thread that captures.
bool fake_cuda_capturing();

// The device of the calling thread's current context; -1: none.
int fake_cuda_current_device();

// The streams' clock: whatever runs on one spends its time.
void fake_cuda_spend(double microseconds);

// Made and not yet released: blocks of memory, streams, events.
int64_t fake_cuda_live();

struct FakeCudaCounters {
  int64_t libraries, kernels, memsets, launches, early_launches, resident_launches;
};
FakeCudaCounters fake_cuda_counters();
}

#endif  // SHARDOPS_TESTS_CPP_FAKE_CUDA_H_
