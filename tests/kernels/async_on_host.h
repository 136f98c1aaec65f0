// For cuda_on_host.h: copies, barriers and clusters of csrc/kernels/async.cuh.
#pragma once

// In the place of async.cuh: an address in shared memory is an offset into the block's.
using Shared = unsigned;
constexpr int kBarrierBytes = 8;
namespace host {
struct Barrier {
  short arrivals;  // that complete a phase
  short missing;   // of the current one
  int bytes : 31;  // still to come in the current one
  unsigned phase : 1;
};
struct Copy {
  void* to;
  const void* from;
  unsigned bytes;
  Barrier* barrier;
  bool arrives = false;  // too, once it is there
};
static std::vector<Copy> on_the_way;

inline char* of_rank(Shared address, unsigned rank) {
  return reinterpret_cast<char*>(fibers[rank * per_block].shared) + address;
}
inline char* mine(Shared address) { return reinterpret_cast<char*>(me().shared) + address; }
inline Barrier& barrier_at(Shared address) { return *reinterpret_cast<Barrier*>(mine(address)); }
inline void settle(Barrier& barrier) {
  if (barrier.missing != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.missing = barrier.arrivals;
}
// Copies move nothing until somebody waits.
inline void land() {
  for (const Copy& copy : on_the_way) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    if (copy.barrier == nullptr) continue;
    if (copy.arrives)
      copy.barrier->missing--;
    else
      copy.barrier->bytes -= static_cast<int>(copy.bytes);
    settle(*copy.barrier);
  }
  on_the_way.clear();
}
inline void must(bool condition) {
  if (!condition) __builtin_trap();
}
}  // namespace host
inline Shared shared_address(const void* pointer) {
  return static_cast<Shared>(static_cast<const char*>(pointer) -
                             reinterpret_cast<char*>(host::me().shared));
}
inline void barrier_init(Shared barrier, int arrivals) {
  const short count = static_cast<short>(arrivals);
  host::must(barrier % 8 == 0);
  host::barrier_at(barrier) = {count, count, 0, 0};
}
inline void barriers_visible() {}
inline void barrier_arrive(Shared barrier) {
  host::barrier_at(barrier).missing--;
  host::settle(host::barrier_at(barrier));
}
inline void barrier_arrive_expecting(Shared barrier, unsigned bytes) {
  host::barrier_at(barrier).bytes += static_cast<int>(bytes);
  barrier_arrive(barrier);
}
inline void barrier_wait(Shared barrier, unsigned parity) {
  while (host::barrier_at(barrier).phase == parity) {  // the phase of this parity is not complete
    host::stop_at(host::kWaits);                       // and look again each time
    host::land();
  }
}
inline void bulk_load(Shared to, const void* from, unsigned bytes, Shared barrier) {
  host::must(reinterpret_cast<unsigned long>(from) % 16 == 0 && bytes % 16 == 0 && to % 16 == 0);
  host::on_the_way.push_back({host::mine(to), from, bytes, &host::barrier_at(barrier)});
}
inline void bulk_store(void* to, Shared from, unsigned bytes) {
  host::must(reinterpret_cast<unsigned long>(to) % 16 == 0 && bytes % 16 == 0 && from % 16 == 0);
  host::on_the_way.push_back({to, host::mine(from), bytes, nullptr});
}
inline void bulk_commit() {}
template <int kLeft>
void bulk_wait_read() {
  host::land();
}
inline void publish_to_copies() {}
template <int kWords>
void load_words(Shared from, unsigned* to) {
  host::must(from % (kWords ? 4 * kWords : 2) == 0);
  to[0] = 0;
  std::memcpy(to, host::mine(from), kWords ? 4 * kWords : 2);
}
template <int kWords>
void store_words(Shared to, const unsigned* from) {
  host::must(to % (kWords ? 4 * kWords : 2) == 0);
  std::memcpy(host::mine(to), from, kWords ? 4 * kWords : 2);
}
inline unsigned cluster_rank() { return host::me().rank; }
inline void cluster_arrive() { host::me().cluster_barriers++; }
inline void cluster_wait() { host::stop_at(host::kAtCluster); }
inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
inline void send_to_rank(Shared mine, Shared barrier, unsigned rank, float first, float second) {
  const float both[2] = {first, second};
  std::memcpy(host::of_rank(mine, rank), both, sizeof(both));
  auto& told = *reinterpret_cast<host::Barrier*>(host::of_rank(barrier, rank));
  told.bytes -= sizeof(both);
  host::settle(told);
}
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline void tell_grid(unsigned long long* to, unsigned long long word) { *to = word; }
inline unsigned long long told_by_grid(const unsigned long long* from) {
  if (*from == 0) {  // nothing yet: others go on first
    host::stop_at(host::kWaits);
    host::land();
  }
  return *from;
}
