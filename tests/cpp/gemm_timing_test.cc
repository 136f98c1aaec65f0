// TimeGemm on the stand-in libraries, whose streams have a clock that algorithms move on.
#include "gemm_timing.h"

#include <cmath>
#include <cstdlib>
#include <thread>

#include "check.h"
#include "fake_cuda.h"
#include "gemm_operands.h"

namespace shardops {
namespace {

ffi::ErrorOr<std::vector<float>> Times(GemmProblem p, int device = 0) {
  p.workspace_bytes = 1 << 20;
  auto plan = GemmPlan::Make(p);
  CHECK(plan.has_value(), Message(plan));
  auto found = (*plan)->Candidates(device, 8);
  CHECK(found.has_value() && found->size() == 3, Message(found));
  auto times = TimeGemm(**plan, device, *found);
  CHECK(fake_cuda_live() == 0, "something was not released");
  CHECK(fake_cuda_current_device() == -1, "a context was left behind");
  return times;
}

bool Near(float got, float want) { return std::abs(got - want) < 1e-3f * want; }

// Candidate i is algorithm 2 - i.
void TestTimes() {
  setenv("FAKE_CUBLASLT_MICROSECONDS", "30,10,2000", 1);
  for (int device : {0, 1}) {
    auto times = Times(Problem(8, 16, 8), device);
    CHECK(times.has_value() && times->size() == 3, Message(times));
    CHECK(Near((*times)[0], 2000) && Near((*times)[1], 10) && Near((*times)[2], 30));
  }
}

// Every operand and result is there, and as long as the launch wants it: the sanitizer sees that.
void TestEveryOperand() {
  GemmProblem p = Problem(48, 32, 160);
  p.type = int64_t(lt::Type::kBF16), p.out_type = p.type;
  p.bias = p.add = p.gelu = p.aux = 1;
  p.batch = 2;
  CHECK(Times(p).has_value());
  p = Problem(48, 32, 160);
  p.type = int64_t(lt::Type::kF8E4M3), p.type_b = int64_t(lt::Type::kF8E5M2), p.transb = 1;
  p.out_type = int64_t(lt::Type::kF16), p.scale_a = p.scale_b = int64_t(ScaleMode::kTensor);
  CHECK(Times(p).has_value());
  p.scale_a = int64_t(ScaleMode::kVec128), p.scale_b = int64_t(ScaleMode::kBlock128);
  CHECK(Times(p).has_value());
}

void TestMemory() {
  setenv("FAKE_CUDA_FREE_BYTES", "1000", 1);
  auto times = Times(Problem(64, 64, 64));
  CHECK(!times.has_value() && times.error().errc() == ffi::ErrorCode::kResourceExhausted);
  CHECK(Contains(Message(times), "timing takes "), Message(times));
  setenv("FAKE_CUDA_FREE_BYTES", "2500000", 1);  // enough in all, but not in one piece
  times = Times(Problem(8, 8, 8));
  CHECK(!times.has_value() && times.error().errc() == ffi::ErrorCode::kResourceExhausted);
  unsetenv("FAKE_CUDA_FREE_BYTES");
}

// Timing goes on beside a capture in another thread, and leaves this thread's mode as it was.
void TestCapture() {
  std::atomic<int> stage{0};
  std::thread other([&] {
    fake_cuda_capture(true);
    stage = 1;
    while (stage != 2) std::this_thread::yield();
    fake_cuda_capture(false);
  });
  while (stage != 1) std::this_thread::yield();
  auto times = Times(Problem(8, 16, 8));
  CHECK(times.has_value(), Message(times));
  cu::Pointer p = 0;
  CHECK(Driver::Get().functions().MemAlloc(&p, 16) != cu::Result::kSuccess);
  stage = 2;
  other.join();
}

}  // namespace
}  // namespace shardops

int main() {
  shardops::TestTimes();
  shardops::TestEveryOperand();
  shardops::TestMemory();
  shardops::TestCapture();
  return Summary("gemm_timing_test");
}
