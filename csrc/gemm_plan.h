// A GEMM made ready: descriptors, the buffers it wants, and an algorithm for each device.
//
// Row-major and cuBLASLt. The library reads column-major matrices. The same bytes read that way
// are the transposed matrix, so it is asked for out^T = op(rhs)^T op(lhs)^T: its A is our rhs, its
// B is our lhs, its m is our n, and each transpose flag stays with its matrix. Hence bias, which
// the library adds to each of its columns, has our length n.
#ifndef SHARDOPS_CSRC_GEMM_PLAN_H_
#define SHARDOPS_CSRC_GEMM_PLAN_H_

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cublaslt.h"
#include "gemm_problem.h"

namespace shardops {

// Addresses of one call.
struct GemmBuffers {
  void *lhs = nullptr, *rhs = nullptr, *scale_a = nullptr, *scale_b = nullptr, *bias = nullptr,
       *add = nullptr, *out = nullptr, *aux = nullptr, *workspace = nullptr;
};

// An operand or result that the plan expects.
struct GemmSlot {
  const char* name;
  void* GemmBuffers::* member;
  size_t bytes;
  const GemmType* type;  // null: bytes
};

// The workspace result has this many bytes more than the algorithm uses, to be aligned in.
constexpr size_t kWorkspaceAlign = 256;

// The state of one custom call, shared by its executions on all devices and threads.
class GemmPlan {
 public:
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  // Checks the problem. Needs no library.
  static ffi::ErrorOr<std::unique_ptr<GemmPlan>> Make(GemmProblem problem);
  ~GemmPlan();
  GemmPlan(const GemmPlan&) = delete;
  GemmPlan& operator=(const GemmPlan&) = delete;

  const GemmProblem& problem() const { return p_; }
  const std::vector<GemmSlot>& operands() const { return operands_; }
  const std::vector<GemmSlot>& results() const { return results_; }

  // At most `max` algorithms, the one that the heuristic thinks fastest first.
  ffi::ErrorOr<std::vector<lt::HeuristicResult>> Candidates(int ordinal, int max);

  // Settles the algorithm on a device: the problem's where this library accepts it, else the
  // heuristic's first. May not happen while a stream is captured. Later calls cost one atomic load.
  ffi::Error Prepare(int ordinal);

  ffi::Error Launch(int ordinal, cu::Stream stream, const GemmBuffers& buffers);

  // Likewise with an algorithm of `Candidates`, the device's context current.
  ffi::Error LaunchWith(const lt::Algo& algo, int ordinal, cu::Stream stream,
                        const GemmBuffers& buffers);

 private:
  struct Choice {
    lt::Handle handle;
    lt::Algo algo;
  };

  explicit GemmPlan(const GemmProblem& problem) : p_(problem) {}
  void ListSlots();

  bool HasPointers() const { return p_.bias || p_.aux || p_.scale_a || p_.scale_b; }
  const lt::Functions& blas() const { return CublasLt::Get().functions(); }
  ffi::Error NeedDescriptors();  // holding mutex_
  ffi::Error MakeDescriptors();
  ffi::ErrorOr<lt::Desc> MakeDesc() const;
  lt::Status MakeLayout(lt::Layout& layout, int64_t type, int64_t rows, int64_t cols, int64_t ld,
                        int64_t stride) const;
  lt::Status MakePreference();
  ffi::ErrorOr<std::vector<lt::HeuristicResult>> AskHeuristic(lt::Handle handle, int max) const;
  bool Accepts(lt::Handle handle) const;
  ffi::Error Run(const Choice& choice, cu::Stream stream, const GemmBuffers& buffers);
  ffi::Error Matmul(const Choice& choice, lt::Desc desc, const GemmBuffers& buffers,
                    cu::Stream stream) const;

  // Addresses of scales, bias and aux live in the descriptor, so a call that has any takes one of
  // its own off a stack and puts it back after the launch; the library has read it by then.
  ffi::ErrorOr<lt::Desc> Take();
  void Give(lt::Desc desc);

  GemmProblem p_;
  std::vector<GemmSlot> operands_, results_;

  std::mutex mutex_;                // of what is made once, up to choices_
  std::optional<ffi::Error> made_;  // how the one attempt to make descriptors ended
  lt::Desc desc_ = nullptr;
  lt::Layout rhs_ = nullptr, lhs_ = nullptr, out_ = nullptr;
  lt::Preference preference_ = nullptr;
  std::deque<Choice> settled_;
  std::array<std::atomic<const Choice*>, kMaxDevices> choices_ = {};

  std::mutex free_mutex_;
  std::vector<lt::Desc> free_;
};

// For the tests: how often each thing happened in this process.
struct GemmCounters {
  std::atomic<int64_t> instantiated{0}, settled{0}, launched{0}, algo_refused{0};
};
extern GemmCounters gemm_counters;

}  // namespace shardops

#endif  // SHARDOPS_CSRC_GEMM_PLAN_H_
