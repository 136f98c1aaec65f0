// Scales of 8-bit operands, at every place of every mode.
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "check.h"
#include "gemm_operands.h"

namespace shardops {
namespace {

constexpr int64_t kM = 132, kN = 144, kK = 640;

// log2 of the scale of an element: those of neighbouring blocks differ.
int Exponent(ScaleMode mode, int64_t row, int64_t k) {
  switch (mode) {
    case ScaleMode::kNone:
      return 0;
    case ScaleMode::kTensor:
      return 3;
    case ScaleMode::kVec128:
      return int((row + 3 * (k / 128)) % 5);
    case ScaleMode::kBlock128:
      return int((row / 128 + 2 * (k / 128)) % 7);
    case ScaleMode::kVec32:
      return int((row + 3 * (k / 32)) % 5);
  }
  return 0;
}

// As csrc/gemm_problem.h says they lie.
void Fill(Buffer& buffer, ScaleMode mode, int64_t rows) {
  constexpr int64_t kBlocks = kK / 128, kBlocks4 = 8;
  auto* bytes = static_cast<uint8_t*>(buffer.data);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < kK; k += 32) {
      const int e = Exponent(mode, row, k);
      const float f = std::ldexp(1.0f, e);
      if (mode == ScaleMode::kTensor) buffer.floats()[0] = f;
      if (mode == ScaleMode::kVec128) buffer.floats()[k / 128 * rows + row] = f;
      if (mode == ScaleMode::kBlock128) buffer.floats()[row / 128 * kBlocks4 + k / 128] = f;
      if (mode != ScaleMode::kVec32) continue;
      const int64_t tile = row / 128 * kBlocks + k / 128;
      bytes[(tile * 32 + row % 32) * 16 + row / 32 % 4 * 4 + k / 32 % 4] =
          static_cast<uint8_t>(127 + e);
    }
  }
}

// Ones times scales that are powers of two: exact sums, and others where a scale is misread.
void Compare(ScaleMode mode_a, ScaleMode mode_b) {
  GemmProblem p = Problem(kM, kN, kK);
  p.type = int64_t(lt::Type::kF8E5M2), p.type_b = int64_t(lt::Type::kF8E4M3), p.transb = 1;
  p.scale_a = int64_t(mode_a), p.scale_b = int64_t(mode_b);
  auto plan = GemmPlan::Make(p);
  CHECK(plan.has_value(), Message(plan));
  if (!plan.has_value()) return;
  Buffer lhs(kM * kK), rhs(kN * kK), out(4 * kM * kN);
  Buffer scale_a(ScaleBytes(mode_a, kM, kK)), scale_b(ScaleBytes(mode_b, kN, kK));
  std::memset(lhs.data, 0x3c, kM * kK);  // 1 in E5M2
  std::memset(rhs.data, 0x38, kN * kK);  // 1 in E4M3
  Fill(scale_a, mode_a, kM);
  Fill(scale_b, mode_b, kN);
  GemmBuffers b;
  b.lhs = lhs.data, b.rhs = rhs.data, b.out = out.data;
  b.scale_a = scale_a.data, b.scale_b = scale_b.data;
  ffi::Error error = (*plan)->Launch(0, nullptr, b);
  CHECK(error.success(), Message(error));
  int64_t wrong = 0;
  for (int64_t i = 0; i < kM; ++i) {
    for (int64_t j = 0; j < kN; ++j) {
      double want = 0;
      for (int64_t k = 0; k < kK; k += 32) {
        want += 32 * std::ldexp(1.0, Exponent(mode_a, i, k) + Exponent(mode_b, j, k));
      }
      wrong += out.floats()[i * kN + j] != want;
    }
  }
  CHECK(wrong == 0, std::to_string(wrong) + " elements differ of " + Describe(p));
  const size_t slots = 2 + (mode_a != ScaleMode::kNone) + (mode_b != ScaleMode::kNone);
  CHECK((*plan)->operands().size() == slots);
}

// What a GPU has no algorithm for is said by the query.
void TestRefused() {
  GemmProblem p = Problem(128, 128, 128);
  p.type = int64_t(lt::Type::kF8E4M3), p.transb = 1;
  p.scale_a = p.scale_b = int64_t(ScaleMode::kVec32);
  const auto found = (*GemmPlan::Make(p))->Candidates(0, 1);
  CHECK(!found.has_value() && found.error().errc() == ffi::ErrorCode::kUnimplemented);
}

}  // namespace
}  // namespace shardops

int main() {
  using shardops::ScaleMode;
  shardops::Compare(ScaleMode::kNone, ScaleMode::kTensor);
  shardops::Compare(ScaleMode::kTensor, ScaleMode::kTensor);
  shardops::Compare(ScaleMode::kVec128, ScaleMode::kBlock128);
  shardops::Compare(ScaleMode::kBlock128, ScaleMode::kVec128);
  shardops::Compare(ScaleMode::kVec128, ScaleMode::kVec128);
  shardops::TestRefused();
  setenv("FAKE_CUBLASLT_SM", "100", 1);
  shardops::Compare(ScaleMode::kVec32, ScaleMode::kVec32);
  return Summary("gemm_scales_test");
}
