// GemmPlan against a plain triple loop, on the stand-in libraries.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_cuda.h"
#include "gemm_operands.h"

namespace shardops {
namespace {

double Gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

// Runs a float32 problem on random operands and compares every element.
void Compare(GemmProblem p, int device = 0) {
  auto plan = GemmPlan::Make(p);
  CHECK(plan.has_value(), Message(plan));
  if (!plan.has_value()) return;
  p = (*plan)->problem();
  GemmBuffers b;
  std::vector<std::unique_ptr<Buffer>> owned;
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  for (const auto* slots : {&(*plan)->operands(), &(*plan)->results()}) {
    for (const GemmSlot& slot : *slots) {
      owned.push_back(std::make_unique<Buffer>(slot.bytes));
      b.*slot.member = owned.back()->data;
      for (size_t i = 0; slot.type && i < slot.bytes / 4; ++i)
        owned.back()->floats()[i] = normal(random);
    }
  }
  ffi::Error error = (*plan)->Launch(device, nullptr, b);
  CHECK(error.success(), Message(error));
  auto at = [](void* data, int64_t i) { return double{static_cast<float*>(data)[i]}; };
  double worst = 0;
  for (int64_t z = 0; z < p.batch; ++z) {
    for (int64_t i = 0; i < p.m; ++i) {
      for (int64_t j = 0; j < p.n; ++j) {
        double v = 0;
        for (int64_t q = 0; q < p.k; ++q) {
          v += at(b.lhs, z * p.stride_a + (p.transa ? q * p.lda + i : i * p.lda + q)) *
               at(b.rhs, z * p.stride_b + (p.transb ? j * p.ldb + q : q * p.ldb + j));
        }
        const int64_t here = (z * p.m + i) * p.n + j;
        if (p.add) v += at(b.add, here);
        if (p.bias) v += at(b.bias, j);
        if (p.aux) worst = std::max(worst, std::abs(at(b.aux, here) - v));
        const double want = p.gelu ? Gelu(v) : p.relu ? std::max(v, 0.0) : v;
        worst = std::max(worst, std::abs(at(b.out, here) - want));
      }
    }
  }
  CHECK(worst < 1e-4, "worst error " + std::to_string(worst) + " of " + Describe(p));
}

void TestValues() {
  const int64_t sizes[][3] = {{1, 1, 1}, {1, 7, 5}, {7, 1, 3}, {16, 24, 8}, {13, 11, 17}};
  for (auto [m, n, k] : sizes) {
    for (int flags = 0; flags < 32; ++flags) {
      GemmProblem p = Problem(m, n, k);
      p.transa = flags & 1, p.transb = flags >> 1 & 1, p.add = flags >> 2 & 1;
      p.bias = flags >> 3 & 1, p.gelu = flags >> 4 & 1;
      p.workspace_bytes = 1 << 20;
      Compare(p);
      p.batch = 3;
      Compare(p);
      p.gelu = 0, p.relu = 1;
      Compare(p);
    }
  }
  for (int64_t batch : {1, 4}) {
    for (int64_t bias : {0, 1}) {
      GemmProblem p = Problem(5, 16, 9);
      p.batch = batch, p.bias = bias, p.gelu = p.aux = 1;
      Compare(p, /*device=*/1);
    }
  }
}

void TestStrides() {
  GemmProblem p = Problem(6, 5, 4);
  p.batch = 3;
  p.lda = 3 * 4, p.stride_a = 4;  // lhs [m, batch, k]
  p.stride_b = 0;                 // one rhs for all
  Compare(p);
  p.ldb = 9, p.transa = 1, p.lda = 3 * 6, p.stride_a = 6;
  Compare(p);
}

void TestErrors() {
  auto message = [](auto change) {
    GemmProblem p = Problem(8, 8, 8);
    change(p);
    return Message(GemmPlan::Make(p));
  };
  struct Case {
    std::string got, want;
  };
  for (const Case& c : {
           Case{message([](auto& p) { p.m = 0; }), "'m' is 0; expected 1 to 2147483647."},
           Case{message([](auto& p) { p.transa = 2; }), "'transa' is 2; expected 0 to 1."},
           Case{message([](auto& p) { p.lda = 7; }), "'lda' is 7; expected at least the row"},
           Case{message([](auto& p) { p.type = 5; }), "'type' is 5; expected 0, 2, 14, 28 or 29."},
           Case{message([](auto& p) { p.out_type = 28; }), "'out_type' is 28; expected 0, 2 or 14"},
           Case{message([](auto& p) { p.type_b = 28; }), "'type_b' is 28; expected that of 'type'"},
           Case{message([](auto& p) { p.fast_accum = 1; }), "expected 0 without 8-bit operands."},
           Case{message([](auto& p) { p.bias_type = 14; }),
                "'bias_type' is 14; expected 'out_type'"},
           Case{message([](auto& p) { p.type = 28, p.scale_a = 1, p.scale_b = 2; }),
                "'scale_b' is 2; expected blocks of the same length as 'scale_a' (1)"},
           Case{message([](auto& p) { p.type = 28, p.scale_a = 2, p.scale_b = 4; }),
                "'scale_b' is 4; expected blocks"},
           Case{message([](auto& p) { p.type = 28, p.scale_a = p.scale_b = 3; }),
                "and not both of 128 x 128"},
           Case{message([](auto& p) { p.type = 28, p.scale_a = p.scale_b = 2, p.batch = 2; }),
                "'batch' is 2; expected 1 with scales of blocks"},
           Case{message([](auto& p) { p.type = 28, p.scale_a = p.scale_b = 2, p.m = 6; }),
                "'m' is 6; expected a multiple of 4"},
           Case{message([](auto& p) { p.compute = 1; }), "'compute' is 1; expected 68 or 77."},
           Case{message([](auto& p) { p.aux = 1; }), "'aux' is 1; expected 0 without gelu."},
           Case{message([](auto& p) { p.gelu = p.relu = 1; }), "'relu' is 1; expected 0 with gelu"},
           Case{message([](auto& p) { p.aux = p.gelu = 1, p.n = 9; }), "expected a multiple of 8"},
           Case{message([](auto& p) { p.align = 512; }), "'align' is 512; expected 1 to 256."},
       }) {
    CHECK(Contains(c.got, "shardops_gemm: attribute ") && Contains(c.got, c.want), c.got);
  }
  const std::string scaled = message([](auto& p) { p.scale_a = 1; });
  CHECK(Contains(scaled, "'scale_a', 'scale_b' are set; expected 0 without 8-bit"), scaled);
  auto plan = GemmPlan::Make(Problem(8, 8, 8));
  for (int device : {-1, 2, kMaxDevices}) {
    const std::string text = Message((*plan)->Prepare(device));
    CHECK(Contains(text, device == 2 ? "cuDeviceGet failed with CUDA_ERROR_INVALID_DEVICE"
                                     : "device ordinal is"),
          text);
  }
  setenv("FAKE_CUBLASLT_REFUSES", "all", 1);
  const auto found = (*plan)->Candidates(0, 1);
  CHECK(!found.has_value() && found.error().errc() == ffi::ErrorCode::kUnimplemented);
  CHECK(Contains(Message(found), "has no algorithm (CUBLAS_STATUS_NOT_SUPPORTED)"), Message(found));
  unsetenv("FAKE_CUBLASLT_REFUSES");
}

void TestAlgorithm() {
  GemmProblem p = Problem(8, 8, 8);
  p.workspace_bytes = 1 << 20;
  auto asked = GemmPlan::Make(p);
  auto found = (*asked)->Candidates(0, 8);
  CHECK(found.has_value() && found->size() == 3, Message(found));
  for (const lt::HeuristicResult& r : *found) {
    p.workspace_bytes = static_cast<int64_t>(r.workspace_bytes);
    p.algo_version = CublasLt::Get().version();
    std::memcpy(p.algo, &r.algo, sizeof(p.algo));
    const int64_t before = gemm_counters.algo_refused;
    Compare(p);
    CHECK(gemm_counters.algo_refused == before);
    p.algo_version += 1;  // another version's: the heuristic chooses instead
    Compare(p);
    CHECK(gemm_counters.algo_refused == before + 1);
    if (r.workspace_bytes == 0) continue;
    p.algo_version -= 1;
    p.workspace_bytes -= 1;  // less than it writes to: it may not run
    Compare(p);
    CHECK(gemm_counters.algo_refused == before + 2);
  }
}

void TestReductions() {
  GemmProblem p = Problem(8, 8, 8);
  p.workspace_bytes = 1 << 20;
  for (bool any : {false, true}) {
    if (any) p.reductions += static_cast<int64_t>(lt::Reduction::kOutputType);
    auto plan = GemmPlan::Make(p);
    auto found = (*plan)->Candidates(0, 8);
    CHECK(found.has_value() && found->size() == (any ? 4 : 3), Message(found));
  }
}

void TestCapture() {
  GemmProblem p = Problem(8, 8, 8);
  p.bias = 1;
  auto plan = GemmPlan::Make(p);
  Buffer lhs(256), rhs(256), bias(32), out(256);
  GemmBuffers b;
  b.lhs = lhs.data, b.rhs = rhs.data, b.bias = bias.data, b.out = out.data;
  for (float* f : {lhs.floats(), rhs.floats()}) std::fill(f, f + 64, 1.0f);
  std::fill(bias.floats(), bias.floats() + 8, 2.0f);
  CHECK((*plan)->Prepare(1).success());
  fake_cuda_capture(true);
  ffi::Error error = (*plan)->Launch(1, nullptr, b);
  fake_cuda_capture(false);
  CHECK(error.success() && out.floats()[63] == 10.0f, Message(error));
}

// One plan on two devices from many threads, each with a bias of its own: descriptors must not mix.
void TestThreads() {
  setenv("FAKE_CUBLASLT_SLEEP_US", "200", 1);
  GemmProblem p = Problem(4, 8, 4);
  p.bias = 1;
  auto plan = GemmPlan::Make(p);
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&, t] {
      Buffer lhs(64), rhs(128), bias(32), out(128);
      std::fill(lhs.floats(), lhs.floats() + 16, 1.0f);
      std::fill(rhs.floats(), rhs.floats() + 32, 1.0f);
      std::fill(bias.floats(), bias.floats() + 8, 100.0f * t);
      GemmBuffers b;
      b.lhs = lhs.data, b.rhs = rhs.data, b.bias = bias.data, b.out = out.data;
      for (int i = 0; i < 20; ++i) {
        ffi::Error error = (*plan)->Launch(t % 2, nullptr, b);
        CHECK(error.success() && out.floats()[31] == 4 + 100.0f * t, Message(error));
      }
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(fake_cuda_current_device() == -1, "a context was left behind");
  unsetenv("FAKE_CUBLASLT_SLEEP_US");
}

}  // namespace
}  // namespace shardops

int main(int argc, char** argv) {
  const bool threads_only = argc > 1 && std::string(argv[1]) == "threads";
  if (!threads_only) {
    shardops::TestValues();
    shardops::TestStrides();
    shardops::TestErrors();
    shardops::TestAlgorithm();
    shardops::TestReductions();
    shardops::TestCapture();
  }
  shardops::TestThreads();
  return Summary("gemm_test");
}
