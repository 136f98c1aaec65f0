#include "gemm_timing.h"

#include <algorithm>
#include <limits>

namespace shardops {
namespace {

constexpr int kRounds = 4;                // the least time counts: others only add to it
constexpr float kMeasured = 1000;         // microseconds of launches in a row, about
constexpr int kMostLaunches = 50;         // of these
constexpr size_t kRandomBytes = 1 << 20;  // copied over and over
constexpr float kFailed = std::numeric_limits<float>::infinity();

// Words of an operand: `ones` with random bits where `random` has ones. Random data, because a GPU
// that multiplies zeros draws less power and clocks higher than it will in use.
struct Pattern {
  uint32_t ones, random;
};

// Both signs, all mantissas, four exponents: 1/8 to 2.
Pattern PatternOf(const GemmSlot& slot) {
  const bool scale = slot.member == &GemmBuffers::scale_a || slot.member == &GemmBuffers::scale_b;
  if (!slot.type) return {0x7f7f7f7f, 0};
  if (scale) return {0x3f800000, 0};
  switch (slot.type->type) {
    case lt::Type::kF32:
      return {0x3f800000, 0x81ffffff};
    case lt::Type::kF16:
      return {0x3c003c00, 0x8fff8fff};
    case lt::Type::kBF16:
      return {0x3f803f80, 0x81ff81ff};
    case lt::Type::kF8E4M3:
      return {0x38383838, 0x9f9f9f9f};
    case lt::Type::kF8E5M2:
      return {0x3c3c3c3c, 0x8f8f8f8f};
  }
  return {};
}

// The context is current as long as it lives.
class Bench {
 public:
  Bench(GemmPlan& plan, int ordinal) : plan_(plan), ordinal_(ordinal) {}
  ~Bench() {
    if (stream_) cuda().StreamSynchronize(stream_);
    for (cu::Pointer p : owned_) cuda().MemFree(p);
    if (start_) cuda().EventDestroy(start_);
    if (stop_) cuda().EventDestroy(stop_);
    if (stream_) cuda().StreamDestroy(stream_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  ffi::Error Allocate() {
    size_t needed = 0, free = 0, total = 0;
    for (const auto* slots : {&plan_.operands(), &plan_.results()}) {
      for (const GemmSlot& slot : *slots) needed += slot.bytes;
    }
    Check("cuMemGetInfo", cuda().MemGetInfo(&free, &total));
    if (ok() && needed > free / 2) return NoMemory(needed, free);
    Check("cuStreamCreate",
          cuda().StreamCreate(&stream_, static_cast<unsigned>(cu::StreamFlags::kNonBlocking)));
    Check("cuEventCreate", cuda().EventCreate(&start_, 0));
    Check("cuEventCreate", cuda().EventCreate(&stop_, 0));
    if (!ok()) return error_;
    for (const auto* slots : {&plan_.operands(), &plan_.results()}) {
      for (const GemmSlot& slot : *slots) {
        cu::Pointer p = 0;
        if (cuda().MemAlloc(&p, slot.bytes) != cu::Result::kSuccess) return NoMemory(needed, free);
        owned_.push_back(p);
        buffers_.*slot.member = reinterpret_cast<void*>(p);
        if (slots == &plan_.operands()) Fill(p, slot);
      }
    }
    Check("cuStreamSynchronize", cuda().StreamSynchronize(stream_));
    return error_;
  }

  // Microseconds a launch of `count` in a row.
  float Time(const lt::Algo& algo, int count) {
    bool done = cuda().EventRecord(start_, stream_) == cu::Result::kSuccess;
    for (int i = 0; i < count && done; ++i) {
      done = plan_.LaunchWith(algo, ordinal_, stream_, buffers_).success();
    }
    done = done && cuda().EventRecord(stop_, stream_) == cu::Result::kSuccess &&
           cuda().EventSynchronize(stop_) == cu::Result::kSuccess;
    float milliseconds = 0;
    done = done && cuda().EventElapsedTime(&milliseconds, start_, stop_) == cu::Result::kSuccess;
    return done ? milliseconds * 1000 / static_cast<float>(count) : kFailed;
  }

 private:
  static const cu::Functions& cuda() { return Driver::Get().functions(); }
  bool ok() const { return error_.success(); }

  void Check(const char* call, cu::Result result) {
    if (ok() && result != cu::Result::kSuccess) {
      error_ = Driver::Get().Error(kGemmOp, call, result);
    }
  }

  static ffi::Error NoMemory(size_t needed, size_t free) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      std::string(kGemmOp) + ": timing takes " + std::to_string(needed) +
                          " bytes; expected at most half of the " + std::to_string(free) +
                          " that are free.");
  }

  void Fill(cu::Pointer to, const GemmSlot& slot) {
    const Pattern pattern = PatternOf(slot);
    std::vector<uint32_t> words((std::min(slot.bytes, kRandomBytes) + 3) / 4);
    for (uint32_t& word : words) {
      random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
      word = pattern.ones ^ (static_cast<uint32_t>(random_ >> 16) & pattern.random);
    }
    size_t filled = std::min(slot.bytes, kRandomBytes);
    Check("cuMemcpyHtoDAsync", cuda().MemcpyHtoDAsync(to, words.data(), filled, stream_));
    Check("cuStreamSynchronize", cuda().StreamSynchronize(stream_));  // `words` goes
    while (ok() && filled < slot.bytes) {
      const size_t more = std::min(filled, slot.bytes - filled);
      Check("cuMemcpyDtoDAsync", cuda().MemcpyDtoDAsync(to + filled, to, more, stream_));
      filled += more;
    }
  }

  GemmPlan& plan_;
  const int ordinal_;
  ffi::Error error_ = ffi::Error::Success();
  cu::Stream stream_ = nullptr;
  cu::Event start_ = nullptr, stop_ = nullptr;
  std::vector<cu::Pointer> owned_;
  GemmBuffers buffers_;
  uint64_t random_ = 0x9e3779b97f4a7c15;
};

}  // namespace

ffi::ErrorOr<std::vector<float>> TimeGemm(GemmPlan& plan, int ordinal,
                                          const std::vector<lt::HeuristicResult>& candidates) {
  auto context = Driver::Get().ContextOf(ordinal);
  if (!context.has_value()) return ffi::Unexpected(context.error());
  ContextScope scope(*context);
  if (scope.result() != cu::Result::kSuccess) {
    return ffi::Unexpected(Driver::Get().Error(kGemmOp, "cuCtxPushCurrent", scope.result()));
  }
  RelaxedCapture relaxed;
  Bench bench(plan, ordinal);
  if (ffi::Error e = bench.Allocate(); e.failure()) return ffi::Unexpected(e);
  std::vector<float> least(candidates.size(), kFailed);
  std::vector<int> counts(candidates.size(), 0);
  for (size_t i = 0; i < candidates.size(); ++i) {
    bench.Time(candidates[i].algo, 1);  // loads its kernel
    const float once = bench.Time(candidates[i].algo, 1);
    if (once == kFailed) continue;
    const float fitting = kMeasured / std::max(once, kMeasured / kMostLaunches);
    counts[i] = std::max(1, static_cast<int>(fitting));
  }
  // In turns: clocks fall while a GPU gets warm.
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (counts[i]) least[i] = std::min(least[i], bench.Time(candidates[i].algo, counts[i]));
    }
  }
  return least;
}

}  // namespace shardops
