#include "gemm_problem.h"

#include <cstring>
#include <tuple>

namespace shardops {
namespace {

constexpr GemmType kTypes[] = {
    {lt::Type::kF32, 4, ffi::F32, "float32"},
    {lt::Type::kF16, 2, ffi::F16, "float16"},
    {lt::Type::kBF16, 2, ffi::BF16, "bfloat16"},
    {lt::Type::kF8E4M3, 1, ffi::F8E4M3FN, "float8_e4m3fn"},
    {lt::Type::kF8E5M2, 1, ffi::F8E5M2, "float8_e5m2"},
};

// The auxiliary output's leading dimension and batch stride must be multiples of it: cuBLASLt.
constexpr int64_t kAuxMultiple = 8;
// So must the rows of an operand with kVec128 be one of this.
constexpr int64_t kVec128Rows = 4;

ffi::Error CheckRanges(const GemmProblem& p) {
  for (const GemmField& f : kGemmFields) {
    if (p.*f.member < f.low || p.*f.member > f.high) {
      return InvalidAttribute(kGemmOp, f.name, p.*f.member,
                              std::to_string(f.low) + " to " + std::to_string(f.high));
    }
  }
  if (p.compute != int64_t(lt::Compute::kF32) && p.compute != int64_t(lt::Compute::kF32FastTF32)) {
    return InvalidAttribute(kGemmOp, "compute", p.compute, "68 or 77");
  }
  return ffi::Error::Success();
}

ffi::Error CheckTypes(const GemmProblem& p) {
  for (auto [name, code] : {std::pair{"type", p.type}, std::pair{"type_b", p.type_b}}) {
    if (!FindGemmType(code)) return InvalidAttribute(kGemmOp, name, code, "0, 2, 14, 28 or 29");
  }
  for (auto [name, code] :
       {std::pair{"out_type", p.out_type}, std::pair{"bias_type", p.bias_type}}) {
    const GemmType* type = FindGemmType(code);
    if (!type || type->bytes == 1) return InvalidAttribute(kGemmOp, name, code, "0, 2 or 14");
  }
  const bool narrow = FindGemmType(p.type)->bytes == 1;
  if (p.type_b != p.type && !(narrow && FindGemmType(p.type_b)->bytes == 1)) {
    return InvalidAttribute(kGemmOp, "type_b", p.type_b, "that of 'type', or both of 8 bits");
  }
  if (p.bias_type != p.out_type && !narrow) {
    return InvalidAttribute(kGemmOp, "bias_type", p.bias_type, "'out_type' without 8-bit operands");
  }
  if (p.fast_accum && !narrow) {
    return InvalidAttribute(kGemmOp, "fast_accum", p.fast_accum, "0 without 8-bit operands");
  }
  return ffi::Error::Success();
}

// Wrong scales are wrong values and no error of the library's.
ffi::Error CheckScales(const GemmProblem& p) {
  const auto a = static_cast<ScaleMode>(p.scale_a), b = static_cast<ScaleMode>(p.scale_b);
  auto blocks = [](ScaleMode s) { return s == ScaleMode::kVec128 || s == ScaleMode::kBlock128; };
  if ((p.scale_a || p.scale_b) && FindGemmType(p.type)->bytes != 1) {
    return Invalid(kGemmOp,
                   "attributes 'scale_a', 'scale_b' are set; expected 0 without 8-bit "
                   "operands.");
  }
  if (blocks(a) != blocks(b) || (a == ScaleMode::kVec32) != (b == ScaleMode::kVec32) ||
      (a == ScaleMode::kBlock128 && a == b)) {
    return InvalidAttribute(kGemmOp, "scale_b", p.scale_b,
                            "blocks of the same length as 'scale_a' (" + std::to_string(p.scale_a) +
                                "), and not both of 128 x 128");
  }
  if (a <= ScaleMode::kTensor) return ffi::Error::Success();
  if (p.batch > 1) return InvalidAttribute(kGemmOp, "batch", p.batch, "1 with scales of blocks");
  for (auto [name, mode, rows] : {std::tuple{"m", a, p.m}, std::tuple{"n", b, p.n}}) {
    if (mode == ScaleMode::kVec128 && rows % kVec128Rows) {
      return InvalidAttribute(kGemmOp, name, rows, "a multiple of 4 with scales of 128 elements");
    }
  }
  return ffi::Error::Success();
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

size_t ScaleBytes(ScaleMode mode, int64_t rows, int64_t k) {
  const int64_t blocks = CeilDiv(k, 128);
  switch (mode) {
    case ScaleMode::kNone:
      return 0;
    case ScaleMode::kTensor:
      return 4;
    case ScaleMode::kVec128:
      return static_cast<size_t>(4 * blocks * rows);
    case ScaleMode::kBlock128:
      return static_cast<size_t>(4 * CeilDiv(rows, 128) * CeilDiv(blocks, 4) * 4);
    case ScaleMode::kVec32:
      return static_cast<size_t>(512 * CeilDiv(rows, 128) * blocks);
  }
  return 0;
}

const GemmType* FindGemmType(int64_t code) {
  for (const GemmType& t : kTypes) {
    if (static_cast<int64_t>(t.type) == code) return &t;
  }
  return nullptr;
}

GemmProblem DefaultGemmProblem() {
  GemmProblem p = {};
  for (const GemmField& f : kGemmFields) p.*f.member = f.fallback == kRequired ? 0 : f.fallback;
  return p;
}

ffi::ErrorOr<GemmProblem> DecodeGemmProblem(ffi::Dictionary attributes) {
  GemmProblem p = DefaultGemmProblem();
  size_t known = 0;
  for (const GemmField& f : kGemmFields) {
    if (!attributes.contains(f.name)) {
      if (f.fallback != kRequired) continue;
      return ffi::Unexpected(InvalidAttribute(kGemmOp, f.name, "missing", "an int64"));
    }
    auto value = attributes.get<int64_t>(f.name);
    if (!value.has_value()) {
      return ffi::Unexpected(InvalidAttribute(kGemmOp, f.name, "of another type", "an int64"));
    }
    p.*f.member = *value;
    ++known;
  }
  if (attributes.contains("algo") != (p.algo_version != 0)) {
    return ffi::Unexpected(
        Invalid(kGemmOp,
                "one of attributes 'algo' and 'algo_version' is missing; expected both "
                "or neither."));
  }
  if (p.algo_version != 0) {
    auto algo = attributes.get<ffi::Span<const uint8_t>>("algo");
    if (!algo.has_value() || algo->size() != sizeof(p.algo)) {
      return ffi::Unexpected(InvalidAttribute(kGemmOp, "algo", "of another type", "uint8[64]"));
    }
    std::memcpy(p.algo, algo->begin(), sizeof(p.algo));
    ++known;
  }
  if (known != attributes.size()) {
    return ffi::Unexpected(
        Invalid(kGemmOp, "the number of attributes is " + std::to_string(attributes.size()) +
                             "; expected only the " + std::to_string(known) +
                             " that are known. Check their spelling in csrc/gemm_problem.h."));
  }
  return p;
}

ffi::Error CompleteGemmProblem(GemmProblem& p) {
  if (ffi::Error error = CheckRanges(p); error.failure()) return error;
  if (p.type_b < 0) p.type_b = p.type;
  if (p.bias_type < 0) p.bias_type = p.out_type;
  if (ffi::Error error = CheckTypes(p); error.failure()) return error;
  if (ffi::Error error = CheckScales(p); error.failure()) return error;
  struct Stored {
    const char* name;
    int64_t rows, cols, *ld, *stride;
  };
  for (const Stored& x :
       {Stored{"lda", p.transa ? p.k : p.m, p.transa ? p.m : p.k, &p.lda, &p.stride_a},
        Stored{"ldb", p.transb ? p.n : p.k, p.transb ? p.k : p.n, &p.ldb, &p.stride_b}}) {
    if (*x.ld == 0) *x.ld = x.cols;
    if (*x.ld < x.cols) {
      return InvalidAttribute(kGemmOp, x.name, *x.ld,
                              "at least the row length " + std::to_string(x.cols));
    }
    if (*x.stride < 0) *x.stride = x.rows * *x.ld;
  }
  if (p.relu && p.gelu) return InvalidAttribute(kGemmOp, "relu", p.relu, "0 with gelu");
  if (p.aux && !p.gelu) return InvalidAttribute(kGemmOp, "aux", p.aux, "0 without gelu");
  if (p.aux && (p.n % kAuxMultiple || (p.batch > 1 && p.m * p.n % kAuxMultiple))) {
    return InvalidAttribute(kGemmOp, "n", p.n, "a multiple of 8 with aux");
  }
  return ffi::Error::Success();
}

std::string Describe(const GemmProblem& p) {
  std::string s;
  for (const GemmField& f : kGemmFields) {
    s += std::string(s.empty() ? "" : " ") + f.name + "=" + std::to_string(p.*f.member);
  }
  return s;
}

}  // namespace shardops
