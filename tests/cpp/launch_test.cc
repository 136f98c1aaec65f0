// Kernel on the stand-in driver: parameters, zeroing, copies, limits, the cubin cache, errors,
// threads.
#include <array>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_cuda.h"
#include "kernel.h"

namespace shardops {
namespace {

template <class T>
void AddScalar(LaunchSpec& spec, T value) {
  const size_t at = spec.scalars.size();
  spec.scalars.resize(at + sizeof(T));
  std::memcpy(&spec.scalars[at], &value, sizeof(T));
  spec.sizes.push_back(sizeof(T));
}

LaunchSpec Spec(const char* name, const char* cubin = "FAKE: axpy words meet shape three") {
  LaunchSpec spec;
  spec.name = name;
  spec.cubin = std::string(cubin) + '\0';
  return spec;
}

LaunchSpec Axpy(float a, int32_t n) {
  LaunchSpec spec = Spec("axpy");
  AddScalar(spec, a);
  AddScalar(spec, n);
  return spec;
}

std::unique_ptr<Kernel> Make(const LaunchSpec& spec) {
  auto kernel = Kernel::Make(spec);
  CHECK(kernel.has_value(), Message(kernel));
  return kernel.has_value() ? std::move(*kernel) : nullptr;
}

std::vector<int32_t> ShapeOf(const LaunchSpec& spec, int device = 0) {
  std::vector<int32_t> out(10, -1);
  auto kernel = Make(spec);
  ffi::Error error = kernel->Launch(device, nullptr, {}, {{out.data(), 40}});
  CHECK(error.success(), Message(error));
  return out;
}

void TestParameters() {
  float x[3] = {1, 2, 3}, y[3] = {10, 20, 30}, out[3] = {1000, 1000, 1000};
  LaunchSpec spec = Axpy(2.0f, 3);
  ffi::Error error = Make(spec)->Launch(0, nullptr, {{x, 12}, {y, 12}}, {{out, 12}});
  CHECK(error.success() && out[0] == 1012 && out[2] == 1036, Message(error));

  spec.zeroed = {0};
  error = Make(spec)->Launch(1, nullptr, {{x, 12}, {y, 12}}, {{out, 12}});
  CHECK(error.success() && out[0] == 12 && out[2] == 36, Message(error));

  const int64_t before = fake_cuda_counters().memsets;
  LaunchSpec none = Axpy(2.0f, 0);
  none.zeroed = {0};
  error = Make(none)->Launch(0, nullptr, {{x, 12}, {y, 12}}, {{nullptr, 0}});
  CHECK(error.success() && fake_cuda_counters().memsets == before, "an empty result is not set");

  LaunchSpec three = Spec("three");
  AddScalar<int8_t>(three, 5);
  AddScalar<double>(three, 0.25);
  AddScalar<int16_t>(three, -300);
  double sum = 0;
  error = Make(three)->Launch(0, nullptr, {}, {{&sum, 8}});
  CHECK(error.success() && sum == -294.75, Message(error));
}

void TestShapes() {
  LaunchSpec spec = Spec("shape");
  spec.grid = {64, 3, 2}, spec.block = {32, 4, 2}, spec.shared_bytes = 1024;
  CHECK((ShapeOf(spec) == std::vector<int32_t>{64, 3, 2, 32, 4, 2, 1, 1, 1, 1024}));
  spec.cluster = {8, 1, 2};  // 16 blocks need leave of the device
  CHECK((ShapeOf(spec) == std::vector<int32_t>{64, 3, 2, 32, 4, 2, 8, 1, 2, 1024}));

  // Two calls of one kernel: the second, which needs less, must not take from the first.
  spec.shared_bytes = 200 << 10;
  auto large = Make(spec);
  CHECK(large->Prepare(0).success());
  spec.shared_bytes = 100 << 10;
  CHECK(ShapeOf(spec)[9] == 100 << 10);
  std::vector<int32_t> out(10);
  ffi::Error error = large->Launch(0, nullptr, {}, {{out.data(), 40}});
  CHECK(error.success() && out[9] == 200 << 10, Message(error));
  spec.shared_bytes = 200 << 10;
  CHECK(ShapeOf(spec, 1)[9] == 200 << 10, "each device has limits of its own");
}

void TestEarly() {
  LaunchSpec spec = Spec("shape");
  spec.cluster = {1, 1, 1};
  const int64_t before = fake_cuda_counters().early_launches;
  ShapeOf(spec);
  CHECK(fake_cuda_counters().early_launches == before, "none unless the call asks for it");
  spec.early = 1, spec.grid = {4, 1, 1}, spec.cluster = {2, 1, 1};
  CHECK(ShapeOf(spec)[6] == 2 && fake_cuda_counters().early_launches == before + 1);
}

void TestResident() {
  LaunchSpec spec = Spec("shape");
  const int64_t before = fake_cuda_counters().resident_launches;
  ShapeOf(spec);
  CHECK(fake_cuda_counters().resident_launches == before, "none unless the call asks for it");
  spec.grid = {4, 1, 1}, spec.cluster = {2, 1, 1}, spec.resident = 1, spec.early = 1;
  ShapeOf(spec);
  CHECK(fake_cuda_counters().resident_launches == before + 1,
        "beside a cluster and an early start");
}

// Each array at each place of a word, also while a stream is captured: the kernel gets addresses of
// whole words, and what is around the result stays.
void TestCopies() {
  LaunchSpec spec = Axpy(2.0f, 3);
  spec.name = "words";
  spec.align = 16;
  spec.zeroed = {0};
  const int64_t live = fake_cuda_live();
  auto kernel = Make(spec);
  CHECK(kernel->Prepare(0).success());
  for (const bool captured : {true, false}) {
    for (int i = 0; i < 64; ++i) {
      alignas(16) float x[8] = {}, y[8] = {}, out[8] = {7, 7, 7, 7, 7, 7, 7, 7};
      const int at[3] = {i % 4, i / 4 % 4, i / 16};
      for (int j = 0; j < 3; ++j) x[at[0] + j] = j + 1.0f, y[at[1] + j] = 10.0f * i;
      fake_cuda_capture(captured);
      ffi::Error error =
          kernel->Launch(0, nullptr, {{x + at[0], 12}, {y + at[1], 12}}, {{out + at[2], 12}});
      fake_cuda_capture(false);
      CHECK(error.success(), Message(error));
      for (int j = 0; j < 8; ++j) {
        const int of = j - at[2];
        CHECK(out[j] == (of < 0 || of > 2 ? 7.0f : 2.0f * (of + 1) + 10.0f * i));
      }
    }
  }
  CHECK(fake_cuda_live() == live + 3, "the copies stay for the next launch");
  kernel.reset();
  CHECK(fake_cuda_live() == live);

  alignas(16) static float large[4] = {};
  const std::string text = Message(
      Make(spec)->Launch(0, nullptr, {{large + 1, size_t{1} << 40}, {large, 12}}, {{large, 12}}));
  CHECK(Contains(text, "cuMemAlloc failed") && Contains(text, "array 0 is not where"), text);
}

// Threads that run one call at once each get the result of what they gave it: the kernel waits for
// the other thread, which has copied its operands by then unless copies and launch are one.
void TestCopiesOfThreads() {
  LaunchSpec spec = Axpy(2.0f, 3);
  spec.name = "meet";
  spec.align = 16;
  spec.zeroed = {0};
  auto kernel = Make(spec);
  CHECK(kernel->Prepare(0).success());
  std::vector<std::thread> threads;
  for (int t = 1; t <= 2; ++t) {
    threads.emplace_back([&, t] {
      alignas(16) float x[4] = {0, 1.0f * t, 1.0f * t, 1.0f * t}, y[4] = {}, out[4] = {};
      for (int i = 0; i < 3; ++i) {
        CHECK(kernel->Launch(0, nullptr, {{x + 1, 12}, {y + 1, 12}}, {{out + 1, 12}}).success());
        CHECK(out[1] == 2.0f * t && out[3] == 2.0f * t, std::to_string(out[1] / 2));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void TestCache() {
  const LaunchSpec spec = Spec("shape", "FAKE: shape, of the cache test");
  const FakeCudaCounters before = fake_cuda_counters();
  const int64_t loaded = launch_counters.cubins_loaded;
  for (int device : {0, 1, 0}) ShapeOf(spec, device);
  CHECK(fake_cuda_counters().libraries == before.libraries + 1);
  CHECK(fake_cuda_counters().kernels == before.kernels + 1);
  CHECK(launch_counters.cubins_loaded == loaded + 1);
}

void TestCapture() {
  auto kernel = Make(Spec("shape", "FAKE: shape, of the capture test"));
  std::vector<int32_t> out(10, -1);
  fake_cuda_capture(true);
  CHECK(!kernel->Launch(0, nullptr, {}, {{out.data(), 40}}).success(), "the fake is too lenient");
  fake_cuda_capture(false);
  CHECK(kernel->Prepare(0).success());
  fake_cuda_capture(true);
  ffi::Error error = kernel->Launch(0, nullptr, {}, {{out.data(), 40}});
  fake_cuda_capture(false);
  CHECK(error.success() && out[0] == 1, Message(error));
}

void TestErrors() {
  auto message = [](auto change) {
    LaunchSpec spec = Axpy(1.0f, 1);
    change(spec);
    return Message(Kernel::Make(spec));
  };
  struct Case {
    std::string got, want;
  };
  for (const Case& c : {
           Case{message([](auto& s) { s.cubin.clear(); }), "'cubin' is empty; expected the code"},
           Case{message([](auto& s) { s.name.clear(); }), "'name' is empty; expected a kernel"},
           Case{message([](auto& s) { s.grid = {1, 0, 1}; }), "'grid' is (1, 0, 1); expected"},
           Case{message([](auto& s) { s.grid = {1, 65536, 1}; }), "to (2147483647, 65535, 65535)"},
           Case{message([](auto& s) { s.block = {1024, 2, 1}; }), "no more than 1024 threads"},
           Case{message([](auto& s) { s.cluster = {4, 8, 1}; }), "no more than 16 blocks in all"},
           Case{message([](auto& s) { s.cluster = {2, 1, 1}; }), "a multiple of the cluster (2,"},
           Case{message([](auto& s) { s.shared_bytes = -1; }), "'shared_bytes' is -1; expected 0"},
           Case{message([](auto& s) { s.early = 2; }), "'early' is 2; expected 0 or 1"},
           Case{message([](auto& s) { s.resident = 2; }), "'resident' is 2; expected 0 or 1"},
           Case{message([](auto& s) { s.align = 0; }), "'align' is 0; expected 1 or more"},
           Case{message([](auto& s) { s.sizes = {4}; }), "'scalars' is 8 bytes long; expected 4"},
           Case{message([](auto& s) { s.sizes = {8, 0}; }), "'sizes' is 0; expected 1 to"},
           Case{message([](auto& s) { s.name = "none"; }), "has no kernel 'none'."},
           Case{message([](auto& s) { s.cubin = "ELF"; }), "failed with CUDA_ERROR_INVALID_IMAGE"},
       }) {
    CHECK(Contains(c.got, "shardops_launch: ") && Contains(c.got, c.want), c.got);
    CHECK(c.got.back() == '.', c.got);
  }
  LaunchSpec spec = Axpy(1.0f, 1);
  spec.zeroed = {1};
  float x[1] = {0};
  std::string text = Message(Make(spec)->Launch(0, nullptr, {{x, 4}, {x, 4}}, {{x, 4}}));
  CHECK(Contains(text, "'zeroed' is 1; expected the index of one of 1 results."), text);
  text = Message(Make(Axpy(1.0f, 1))->Prepare(2));
  CHECK(Contains(text, "cuDeviceGet failed with CUDA_ERROR_INVALID_DEVICE for device 2."), text);
  spec = Spec("shape");
  spec.shared_bytes = 300 << 10;
  text = Message(Make(spec)->Prepare(0));
  CHECK(Contains(text, "cuKernelSetAttribute failed with CUDA_ERROR_INVALID_VALUE on device 0"),
        text);
}

// Many calls of one cubin, prepared and launched at once from many threads on two devices.
void TestThreads() {
  const FakeCudaCounters before = fake_cuda_counters();
  auto shared = Make(Spec("shape", "FAKE: shape, of the thread test"));
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        LaunchSpec spec = Spec("shape", "FAKE: shape, of the thread test");
        spec.grid = {t + 1, 1, 1}, spec.shared_bytes = (50 + i) << 10;
        CHECK(ShapeOf(spec, t % 2)[0] == t + 1);
        int32_t out[10];
        CHECK(shared->Launch(i % 2, nullptr, {}, {{out, 40}}).success());
      }
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(fake_cuda_counters().libraries == before.libraries + 1);
  CHECK(fake_cuda_current_device() == -1, "a context was left behind");
}

}  // namespace
}  // namespace shardops

// "missing" tells what a machine without a driver says; "threads" runs the threads alone.
int main(int argc, char** argv) {
  using namespace shardops;
  const std::string only = argc > 1 ? argv[1] : "";
  if (only == "missing") {
    CHECK(Driver::Get().SetPath("/nowhere/libcuda.so.1"), "none is loaded yet");
    auto kernel = Make(Axpy(1.0f, 1));  // compiling for a GPU needs none
    const std::string text = Message(kernel->Prepare(0));
    CHECK(Contains(text, "the driver library could not be loaded (/nowhere/libcuda.so.1"), text);
    CHECK(Contains(text, "Install the NVIDIA driver"), text);
    return Summary("launch_test missing");
  }
  if (only != "threads") {
    TestParameters();
    TestShapes();
    TestEarly();
    TestResident();
    TestCopies();
    TestCache();
    TestCapture();
    TestErrors();
  }
  TestThreads();
  TestCopiesOfThreads();
  return Summary("launch_test");
}
