// A matrix product on the host, as cuBLASLt describes one.
#ifndef SHARDOPS_TESTS_CPP_FAKE_MATMUL_H_
#define SHARDOPS_TESTS_CPP_FAKE_MATMUL_H_

#include <atomic>
#include <cstdint>

#include "cuda_abi.h"

struct FakeDesc {
  lt::Compute compute;
  int32_t transa = 0, transb = 0, sm_count = 0;
  uint32_t epilogue = uint32_t(lt::Epilogue::kNone);
  void *bias = nullptr, *aux = nullptr, *a_scale = nullptr, *b_scale = nullptr;
  lt::Scale a_mode = lt::Scale::kTensor, b_mode = lt::Scale::kTensor;
  int32_t bias_type = -1;
  int8_t fast = 0;
  int64_t aux_ld = 0, aux_stride = 0;
  std::atomic<int> users{0};  // detects a descriptor that is changed while it is in use
};
struct FakeLayout {
  lt::Type type;
  uint64_t rows, cols;
  int64_t ld;
  int32_t batch = 1;
  int64_t stride = 0;
};
// Says why on stderr.
lt::Status Bad(const char* why);

// What the documentation allows on a GPU of compute capability FAKE_CUBLASLT_SM (default 90), less
// what FAKE_CUBLASLT_REFUSES names.
lt::Status Supported(const FakeDesc& d, const FakeLayout& a, const FakeLayout& b,
                     const FakeLayout& c, const FakeLayout& o);

// O = epilogue(alpha op(A) op(B) + beta C), in double precision until it is stored.
void Compute(const FakeDesc& d, double alpha, const void* A, const FakeLayout& a, const void* B,
             const FakeLayout& b, double beta, const void* C, const FakeLayout& c, void* O,
             const FakeLayout& o);

#endif  // SHARDOPS_TESTS_CPP_FAKE_MATMUL_H_
