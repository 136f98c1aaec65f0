// Copies that run beside the threads, the barriers that tell of their end, and clusters of blocks:
// sm_90 and newer. Apart from the rest, so that a host compiler can stand in for them in tests.
//
// A barrier is 8 bytes of shared memory. A phase of it is complete when so many threads have
// arrived as `barrier_init` says and all bytes that were announced are there; phases alternate in
// parity.
#pragma once

// Where something lies in this block's shared memory. Kept as 32 bits: made from a pointer each
// time it costs a read of the block's place in its cluster.
using Shared = unsigned;
[[maybe_unused]] constexpr int kBarrierBytes = 8;

__device__ __forceinline__ Shared shared_address(const void* pointer) {
  return static_cast<Shared>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(Shared barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// After the inits, before the threads' barrier: other threads and copies may use them.
__device__ __forceinline__ void barriers_visible() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(Shared barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expecting(Shared barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Returns once the phase of this parity is complete: at once if a later one has begun. At the scope
// of the block: what other blocks and copies wrote comes by complete_tx, which this waits for, and
// an acquire at the scope of the cluster would empty the L1 cache each time. In kernels built for
// racecheck, which watches each look at a barrier, threads look seldom: else they hold up the
// others, in large clusters for minutes.
__device__ __forceinline__ void barrier_wait(Shared barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
#ifdef FOR_RACECHECK
    if (!done) asm volatile("nanosleep.u32 20000;");
#endif
  } while (!done);
}

// Global to shared memory; both on 16 bytes, a multiple of 16 bytes. Without a policy of the L2
// cache: to have it drop what was read first made the kernels a tenth slower.
__device__ __forceinline__ void bulk_load(Shared to, const void* from, unsigned bytes,
                                          Shared barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Shared to global memory. The threads that wrote the source have called `publish_to_copies`.
__device__ __forceinline__ void bulk_store(void* to, Shared from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All of this thread's committed stores but the newest kLeft have read their source.
template <int kLeft>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

__device__ __forceinline__ void publish_to_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// kWords 32-bit words, aligned to as many; one word of two bytes for kWords = 0.
template <int kWords>
__device__ __forceinline__ void load_words(Shared from, unsigned* to) {
  if constexpr (kWords == 4) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from));
  } else if constexpr (kWords == 1) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(from));
  } else {
    unsigned short half;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(from));
    to[0] = half;
  }
}

template <int kWords>
__device__ __forceinline__ void store_words(Shared to, const unsigned* from) {
  if constexpr (kWords == 4) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(from[0]), "r"(from[1]),
                 "r"(from[2]), "r"(from[3])
                 : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(from[0]), "r"(from[1])
                 : "memory");
  } else if constexpr (kWords == 1) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(from[0]) : "memory");
  } else {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(static_cast<unsigned short>(from[0]))
                 : "memory");
  }
}

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// The same in two parts, for warps whose threads may come apart from each other; the arrival orders
// nothing.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ unsigned address_at_rank(Shared mine, unsigned rank) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(mine), "r"(rank));
  return address;
}

// To where block `rank` of the cluster has what this one has at `mine`; its `barrier` is told of
// the 8 bytes once they are there.
__device__ __forceinline__ void send_to_rank(Shared mine, Shared barrier, unsigned rank,
                                             float first, float second) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(address_at_rank(mine, rank)),
      "f"(first), "f"(second), "r"(address_at_rank(barrier, rank))
      : "memory");
}

// 8 bytes of global memory from one block of a grid to the others, written and read as one.
__device__ __forceinline__ void tell_grid(unsigned long long* to, unsigned long long word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ unsigned long long told_by_grid(const unsigned long long* from) {
  unsigned long long word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}
