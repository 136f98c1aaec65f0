// What one GEMM is: the attributes of the custom call, and the arguments of a query.
#ifndef SHARDOPS_CSRC_GEMM_PROBLEM_H_
#define SHARDOPS_CSRC_GEMM_PROBLEM_H_

#include <cstdint>
#include <string>

#include "cuda_abi.h"
#include "errors.h"

namespace shardops {

constexpr char kGemmOp[] = "shardops_gemm";

// What one scale of an 8-bit operand covers, and how the scales lie (C order; L = ceil(k / 128),
// rows: m of lhs, n of rhs).
enum class ScaleMode : int64_t {
  kNone,      // none: 1
  kTensor,    // float32 []
  kVec128,    // float32 [L, rows]: 128 elements of a row; rows a multiple of 4
  kBlock128,  // float32 [ceil(rows / 128), L rounded up to 4]: 128 x 128 elements; not of both
  kVec32,     // E8M0 [ceil(rows / 128), L, 32, 4, 4]: 32 elements of a row; that of row r, block c
              // is at [r / 128, c / 4, r % 32, r / 32 % 4, c % 4]
};

struct GemmProblem {
  int64_t m, n, k, batch;
  int64_t transa, transb;       // lhs is stored [k, m]; rhs is stored [n, k]
  int64_t lda, ldb;             // elements between rows as stored; 0: dense
  int64_t stride_a, stride_b;   // elements between batches; -1: dense
  int64_t type, type_b;         // cudaDataType of lhs and of rhs; -1: as lhs
  int64_t out_type, bias_type;  // of out, add and aux; of bias, -1: as out
  int64_t scale_a, scale_b;     // ScaleMode of lhs and of rhs, whose values are stored * scale
  int64_t fast_accum;           // 8-bit operands: 1 to add up in the tensor cores' short format
  int64_t compute;              // cublasComputeType
  int64_t add, bias, gelu, aux, relu;  // 1 where the epilogue has it
  int64_t sm_count;                    // multiprocessors to use; 0: all
  int64_t align;                       // bytes, of every address; XLA promises 16
  int64_t workspace_bytes;             // the most that the algorithm may use
  int64_t reductions;                  // how parts of a split k may be summed: of lt::Reduction
  int64_t algo_version;  // cublasLtGetVersion() of the library that made algo; 0: no algo
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
    {"type_b", &GemmProblem::type_b, -1, -1, 255},
    {"out_type", &GemmProblem::out_type, kRequired, 0, 255},
    {"bias_type", &GemmProblem::bias_type, -1, -1, 255},
    {"scale_a", &GemmProblem::scale_a, 0, 0, int64_t(ScaleMode::kVec32)},
    {"scale_b", &GemmProblem::scale_b, 0, 0, int64_t(ScaleMode::kVec32)},
    {"fast_accum", &GemmProblem::fast_accum, 0, 0, 1},
    {"compute", &GemmProblem::compute, int64_t(lt::Compute::kF32), 0, 255},
    {"add", &GemmProblem::add, 0, 0, 1},
    {"bias", &GemmProblem::bias, 0, 0, 1},
    {"gelu", &GemmProblem::gelu, 0, 0, 1},
    {"aux", &GemmProblem::aux, 0, 0, 1},
    {"relu", &GemmProblem::relu, 0, 0, 1},
    {"sm_count", &GemmProblem::sm_count, 0, 0, 1 << 16},
    {"align", &GemmProblem::align, 16, 1, 256},
    {"workspace_bytes", &GemmProblem::workspace_bytes, 0, 0, int64_t{1} << 40},
    {"reductions", &GemmProblem::reductions, int64_t(lt::Reduction::kComputeType), 0, 7},
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

// Bytes of the scales of an operand with so many rows.
size_t ScaleBytes(ScaleMode mode, int64_t rows, int64_t k);

GemmProblem DefaultGemmProblem();  // required members are 0

ffi::ErrorOr<GemmProblem> DecodeGemmProblem(ffi::Dictionary attributes);

// Fills in what was left to default and refuses what the library would misread.
ffi::Error CompleteGemmProblem(GemmProblem& problem);

std::string Describe(const GemmProblem& problem);

}  // namespace shardops

#endif  // SHARDOPS_CSRC_GEMM_PROBLEM_H_
