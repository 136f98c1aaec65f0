// Runs one of csrc/kernels' sources on the host: a fiber a thread, clusters one after the other.
//
// A fiber runs until it must wait for others: at a barrier of its block or cluster, at a shuffle of
// its warp, or for an mbarrier. `emulate` returns 1 where nobody can go on, as where the threads of
// a warp meet different numbers of shuffles. Copies that are asynchronous on a GPU are done as late
// as can be: when somebody waits. Blocks of a cluster must not use static shared memory: there is
// one of it.
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
enum Stop { kStarted, kAtWarp, kAtBlock, kAtCluster, kWaits, kDone };
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Index thread, block;
  unsigned rank;  // of its block in the cluster
  float* shared;  // its block's
  Stop stop = kStarted;
  int shuffles = 0, block_barriers = 0, cluster_barriers = 0;
};
static std::vector<Fiber> fibers;  // of a cluster, block by block
static unsigned per_block;
static std::vector<float> exchanged[2];
static ucontext_t scheduler;
static unsigned current;
static void (*body)();
static long shared_size;

inline Fiber& me() { return fibers[current]; }
inline void stop_at(Stop why) {
  me().stop = why;
  swapcontext(&me().context, &scheduler);
}
inline void enter() {
  body();
  me().stop = kDone;
}
// Whether all fibers from `first` on have met as many of what `counter` counts as `least`. Blocks
// of a cluster do not wait for threads that have ended; elsewhere one that ends early is an error.
inline bool all_at(int Fiber::* counter, unsigned first, unsigned count, int least) {
  for (unsigned i = first; i < first + count; ++i) {
    if (counter == &Fiber::cluster_barriers && fibers[i].stop == kDone) continue;
    if (fibers[i].*counter < least) return false;
  }
  return true;
}
inline bool can_go_on(unsigned i) {
  const Fiber& f = fibers[i];
  if (f.stop == kAtBlock) {
    return all_at(&Fiber::block_barriers, i / per_block * per_block, per_block, f.block_barriers);
  }
  if (f.stop == kAtCluster) {
    return all_at(&Fiber::cluster_barriers, 0, fibers.size(), f.cluster_barriers);
  }
  return f.stop != kAtWarp || all_at(&Fiber::shuffles, i / 32 * 32, 32, f.shuffles);
}
}  // namespace host

inline void __syncthreads() {
  host::me().block_barriers++;
  host::stop_at(host::kAtBlock);
}
inline void __syncwarp() {
  host::me().shuffles++;
  host::stop_at(host::kAtWarp);
}
inline float __shfl_sync(unsigned, float value, int lane) {
  // Two buffers in turn: a fiber can be one shuffle ahead of its partner, never two.
  std::vector<float>& buffer = host::exchanged[host::me().shuffles++ % 2];
  const unsigned me = host::current;
  buffer[me] = value;
  host::stop_at(host::kAtWarp);
  return buffer[me / 32 * 32 + static_cast<unsigned>(lane)];
}
inline float __shfl_xor_sync(unsigned all, float value, int offset) {
  return __shfl_sync(all, value, static_cast<int>(host::current % 32) ^ offset);
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> bits % 32);
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
inline void wait_for_launches_before() {}  // they have ended
inline void let_launches_after_start() {}

#include "async_on_host.h"
#include "group_on_host.h"
#include "quantize_on_host.h"

namespace host {
template <typename... Parameters, std::size_t... kIndices>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<kIndices...>) {
  kernel(*static_cast<Parameters*>(arguments[kIndices])...);
}
template <typename... Parameters>
void call(void (*kernel)(Parameters...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<Parameters...>());
}

// Returns 1 where nobody can go on.
inline int run_cluster() {
  for (std::vector<float>& buffer : exchanged) buffer.assign(fibers.size(), 0.0f);
  for (Fiber& fiber : fibers) {
    fiber.stack.resize(1 << 16);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
  }
  int idle_rounds = 0;
  for (bool any = true; any && idle_rounds < 3;) {
    any = false;
    bool progress = false;
    for (current = 0; current < fibers.size(); ++current) {
      Fiber& fiber = me();
      if (fiber.stop == kDone) continue;
      any = true;
      if (!can_go_on(current)) continue;
      threadIdx = fiber.thread;
      blockIdx = fiber.block;
      dynamic_shared = fiber.shared;
      swapcontext(&scheduler, &fiber.context);
      progress = progress || fiber.stop != kWaits;
    }
    idle_rounds = progress ? 0 : idle_rounds + 1;
  }
  for (const Fiber& fiber : fibers) {
    if (fiber.stop != kDone) return 1;
  }
  return 0;
}

template <typename Kernel>
int launch(Kernel* kernel, const Index& grid, const Index& block, unsigned cluster,
           long shared_bytes, void** args) {
  static Kernel* the_kernel;
  static void** the_arguments;
  the_kernel = kernel;
  the_arguments = args;
  body = [] { call(the_kernel, the_arguments); };
  gridDim = grid;
  per_block = block.x * block.y * block.z;
  shared_size = shared_bytes;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; x += cluster) {
      // NaN in every word: what is read before it is written shows.
      std::vector<std::vector<uint4>> shared(cluster);
      fibers.clear();
      fibers.resize(cluster * per_block);
      for (unsigned rank = 0; rank < cluster; ++rank) {
        shared[rank].resize(shared_bytes / 16 + 1);
        std::memset(shared[rank].data(), 0xff, shared[rank].size() * 16);
        for (unsigned t = 0; t < per_block; ++t) {
          Fiber& fiber = fibers[rank * per_block + t];
          fiber.thread = {t % block.x, t / block.x % block.y, t / block.x / block.y};
          fiber.block = {x + rank, y, 0};
          fiber.rank = rank;
          fiber.shared = reinterpret_cast<float*>(shared[rank].data());
        }
      }
      if (run_cluster() != 0) return 1;
    }
  }
  return 0;
}
}  // namespace host
