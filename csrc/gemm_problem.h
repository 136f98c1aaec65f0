// What one GEMM is: the attributes of the custom call, and the arguments of a query.
#ifndef SHARDOPS_CSRC_GEMM_PROBLEM_H_
#define SHARDOPS_CSRC_GEMM_PROBLEM_H_

#include <cstdint>
#include <string>

#include "cuda_abi.h"
#include "errors.h"

namespace shardops {

constexpr char kGemmOp[] = "shardops_gemm";

struct GemmProblem {
  int64_t m, n, k, batch;
  int64_t transa, transb;        // lhs is stored [k, m]; rhs is stored [n, k]
  int64_t lda, ldb;              // elements between rows as stored; 0: dense
  int64_t stride_a, stride_b;    // elements between batches; -1: dense
  int64_t type, out_type;        // cudaDataType of both operands, and of out, add, bias and aux
  int64_t compute;               // cublasComputeType
  int64_t add, bias, gelu, aux;  // 1 where the epilogue has it
  int64_t sm_count;              // multiprocessors to use; 0: all
  int64_t align;                 // bytes, of every address; XLA promises 16
  int64_t workspace_bytes;       // the most that the algorithm may use
  int64_t algo_version;          // cublasLtGetVersion() of the library that made algo; 0: no algo
  uint8_t algo[sizeof(lt::Algo)];
};

struct GemmField {
  const char* name;
  int64_t GemmProblem::* member;
  int64_t fallback, low, high;
};

// Every int64 member. `algo` is the one attribute besides.
constexpr int64_t kRequired = INT64_MIN;
constexpr int64_t kInt32Max = 0x7fffffff;
constexpr GemmField kGemmFields[] = {
    {"m", &GemmProblem::m, kRequired, 1, kInt32Max},
    {"n", &GemmProblem::n, kRequired, 1, kInt32Max},
    {"k", &GemmProblem::k, kRequired, 1, kInt32Max},
    {"batch", &GemmProblem::batch, 1, 1, kInt32Max},
    {"transa", &GemmProblem::transa, 0, 0, 1},
    {"transb", &GemmProblem::transb, 0, 0, 1},
    {"lda", &GemmProblem::lda, 0, 0, int64_t{1} << 40},
    {"ldb", &GemmProblem::ldb, 0, 0, int64_t{1} << 40},
    {"stride_a", &GemmProblem::stride_a, -1, -1, int64_t{1} << 40},
    {"stride_b", &GemmProblem::stride_b, -1, -1, int64_t{1} << 40},
    {"type", &GemmProblem::type, kRequired, 0, 255},
    {"out_type", &GemmProblem::out_type, kRequired, 0, 255},
    {"compute", &GemmProblem::compute, int64_t(lt::Compute::kF32), 0, 255},
    {"add", &GemmProblem::add, 0, 0, 1},
    {"bias", &GemmProblem::bias, 0, 0, 1},
    {"gelu", &GemmProblem::gelu, 0, 0, 1},
    {"aux", &GemmProblem::aux, 0, 0, 1},
    {"sm_count", &GemmProblem::sm_count, 0, 0, 1 << 16},
    {"align", &GemmProblem::align, 16, 1, 256},
    {"workspace_bytes", &GemmProblem::workspace_bytes, 0, 0, int64_t{1} << 40},
    {"algo_version", &GemmProblem::algo_version, 0, 0, INT64_MAX},
};

struct GemmType {
  lt::Type type;
  size_t bytes;
  ffi::DataType xla;
  const char* name;
};

// Null where the library's code is none of the supported types.
const GemmType* FindGemmType(int64_t code);

GemmProblem DefaultGemmProblem();  // required members are 0

ffi::ErrorOr<GemmProblem> DecodeGemmProblem(ffi::Dictionary attributes);

// Fills in what was left to default and refuses what the library would misread.
ffi::Error CompleteGemmProblem(GemmProblem& problem);

std::string Describe(const GemmProblem& problem);

}  // namespace shardops

#endif  // SHARDOPS_CSRC_GEMM_PROBLEM_H_
