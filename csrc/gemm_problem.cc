#include "gemm_problem.h"

#include <cstring>

namespace shardops {
namespace {

constexpr GemmType kTypes[] = {
    {lt::Type::kF32, 4, ffi::F32, "float32"},
    {lt::Type::kF16, 2, ffi::F16, "float16"},
    {lt::Type::kBF16, 2, ffi::BF16, "bfloat16"},
};

// The auxiliary output's leading dimension and batch stride must be multiples of it: cuBLASLt.
constexpr int64_t kAuxMultiple = 8;

ffi::Error CheckRanges(const GemmProblem& p) {
  for (const GemmField& f : kGemmFields) {
    if (p.*f.member < f.low || p.*f.member > f.high) {
      return InvalidAttribute(kGemmOp, f.name, p.*f.member,
                              std::to_string(f.low) + " to " + std::to_string(f.high));
    }
  }
  for (auto [name, code] : {std::pair{"type", p.type}, std::pair{"out_type", p.out_type}}) {
    if (!FindGemmType(code)) return InvalidAttribute(kGemmOp, name, code, "0, 2 or 14");
  }
  if (p.compute != int64_t(lt::Compute::kF32) && p.compute != int64_t(lt::Compute::kF32FastTF32)) {
    return InvalidAttribute(kGemmOp, "compute", p.compute, "68 or 77");
  }
  return ffi::Error::Success();
}

}  // namespace

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
