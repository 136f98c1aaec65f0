// Problems and operands for the tests of GemmPlan.
#ifndef SHARDOPS_TESTS_CPP_GEMM_OPERANDS_H_
#define SHARDOPS_TESTS_CPP_GEMM_OPERANDS_H_

#include <cstdint>
#include <cstdlib>

#include "gemm_plan.h"

namespace shardops {

// Heap memory at an address that is 16 modulo 32: as aligned as XLA promises, no more.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : raw_(std::malloc(bytes + 64)) {
    const auto start = (reinterpret_cast<uintptr_t>(raw_) + 31) / 32 * 32 + 16;
    data = reinterpret_cast<void*>(start);
  }
  ~Buffer() { std::free(raw_); }
  Buffer(const Buffer&) = delete;
  float* floats() const { return static_cast<float*>(data); }

  void* data;

 private:
  void* raw_;
};

inline GemmProblem Problem(int64_t m, int64_t n, int64_t k) {
  GemmProblem p = DefaultGemmProblem();
  p.m = m, p.n = n, p.k = k;
  return p;
}

}  // namespace shardops

#endif  // SHARDOPS_TESTS_CPP_GEMM_OPERANDS_H_
