// Runs one of csrc/kernels' sources on the host: a fiber a thread, blocks one after the other.
//
// A fiber runs until its next barrier or shuffle; then the block's next fiber runs. So all fibers
// must meet the same barriers and shuffles in the same order, a stricter rule than CUDA's, and one
// that these kernels are written to keep. `emulate` returns 1 where a kernel broke it.
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

struct Index {
  unsigned x, y, z;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)

static Index threadIdx, blockIdx, gridDim;
static float* dynamic_shared;

namespace host {
enum Stop { kStarted, kBarrier, kShuffle, kDone };
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Stop stop = kStarted;
  int shuffles = 0;
};
static std::vector<Fiber> fibers;
static std::vector<float> exchanged[2];
static ucontext_t scheduler;
static unsigned current;
static void (*body)();

inline void stop_at(Stop why) {
  fibers[current].stop = why;
  swapcontext(&fibers[current].context, &scheduler);
}
inline void enter() {
  body();
  fibers[current].stop = kDone;
}
}  // namespace host

inline void __syncthreads() { host::stop_at(host::kBarrier); }
inline float __shfl_xor_sync(unsigned, float value, int offset) {
  // Two buffers in turn: a fiber can be one shuffle ahead of its partner, never two.
  std::vector<float>& buffer = host::exchanged[host::fibers[host::current].shuffles++ % 2];
  const unsigned me = host::current;
  buffer[me] = value;
  host::stop_at(host::kShuffle);
  return buffer[me ^ static_cast<unsigned>(offset)];
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// In the place of ptx.cuh.
inline float float_from_f16(unsigned short bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}
inline unsigned f16_from_float(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  unsigned short bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline unsigned bf16_from_float(float value) {
  const unsigned bits = __float_as_uint(value);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned f16x2_from_floats(float low, float high) {
  return f16_from_float(low) | f16_from_float(high) << 16;
}
inline unsigned bf16x2_from_floats(float low, float high) {
  return bf16_from_float(low) | bf16_from_float(high) << 16;
}
inline void forget_origin(unsigned&) {}

namespace host {
template <typename... Parameters, std::size_t... kIndices>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<kIndices...>) {
  kernel(*static_cast<Parameters*>(arguments[kIndices])...);
}
template <typename... Parameters>
void call(void (*kernel)(Parameters...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<Parameters...>());
}

// Returns 1 where fibers of a block stopped at different things.
inline int run_block(const Index& block) {
  const unsigned count = block.x * block.y * block.z;
  fibers.assign(count, {});
  for (std::vector<float>& buffer : exchanged) buffer.assign(count, 0.0f);
  for (Fiber& fiber : fibers) {
    fiber.stack.resize(1 << 16);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
  }
  while (fibers[0].stop != kDone) {
    for (current = 0; current < count; ++current) {
      threadIdx = {current % block.x, current / block.x % block.y, current / block.x / block.y};
      swapcontext(&scheduler, &fibers[current].context);
      if (fibers[current].stop != fibers[0].stop) return 1;
    }
  }
  return 0;
}

template <typename Kernel>
int launch(Kernel* kernel, const Index& grid, const Index& block, long shared_bytes, void** args) {
  static Kernel* the_kernel;
  static void** the_arguments;
  the_kernel = kernel;
  the_arguments = args;
  body = [] { call(the_kernel, the_arguments); };
  gridDim = grid;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      // NaN in every word: what is read before it is written shows.
      std::vector<uint4> shared(shared_bytes / 16 + 1);
      std::memset(shared.data(), 0xff, shared.size() * 16);
      dynamic_shared = reinterpret_cast<float*>(shared.data());
      blockIdx = {x, y, 0};
      if (run_block(block) != 0) return 1;
    }
  }
  return 0;
}
}  // namespace host
