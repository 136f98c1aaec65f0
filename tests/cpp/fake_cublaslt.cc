// A stand-in for libcublasLt.so.13 that computes on the host in double precision, written from the
// documented behaviour alone. It is strict: what the documentation forbids is an error here. It
// shows that the callers say what they mean to say, not that the real library understands it.
//
// FAKE_CUBLASLT_REFUSES=gelu makes it know no algorithm with GELU; =fp8, none for 8-bit operands;
// =all, no algorithm at all.
// FAKE_CUBLASLT_MICROSECONDS=30,10,20: what algorithms 0, 1 and 2 spend of the streams' clock.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "cuda_abi.h"
#include "fake_cuda.h"
#include "fake_matmul.h"

namespace {

using lt::Status;
using lt::Type;

struct FakeHandle {
  int device;
};
struct FakePreference {
  uint64_t workspace = 0;
  uint32_t reductions = 7;
};

FakeDesc& Of(lt::Desc d) { return *reinterpret_cast<FakeDesc*>(d); }
FakeLayout& Of(lt::Layout l) { return *reinterpret_cast<FakeLayout*>(l); }
FakePreference& Of(lt::Preference p) { return *reinterpret_cast<FakePreference*>(p); }

class InUse {
 public:
  InUse(FakeDesc& d, bool exclusive) : d_(d), weight_(exclusive ? kExclusive : 1) {
    const int before = d_.users.fetch_add(weight_);
    clash = exclusive ? before != 0 : before >= kExclusive;
  }
  ~InUse() { d_.users.fetch_sub(weight_); }
  bool clash;

 private:
  static constexpr int kExclusive = 1000;
  FakeDesc& d_;
  const int weight_;
};

constexpr uint64_t kMagic = 0xc0ffee;
uint64_t Workspace(const lt::Algo& algo) { return algo.data[1] << 16; }

double Microseconds(uint64_t algorithm) {
  const char* at = std::getenv("FAKE_CUBLASLT_MICROSECONDS");
  for (; at && algorithm; --algorithm) at = std::strchr(at, ',') ? std::strchr(at, ',') + 1 : "0";
  return at ? std::atof(at) : 0;
}

template <class T>
Status Put(T& field, const void* value, size_t bytes) {
  if (bytes != sizeof(field)) return Bad("attribute size");
  std::memcpy(&field, value, bytes);
  return Status::kSuccess;
}

}  // namespace

extern "C" {

size_t cublasLtGetVersion() { return 130100; }

const char* cublasLtGetStatusName(Status s) {
  if (s == Status::kInvalidValue) return "CUBLAS_STATUS_INVALID_VALUE";
  if (s == Status::kNotSupported) return "CUBLAS_STATUS_NOT_SUPPORTED";
  return s == Status::kSuccess ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_NOT_INITIALIZED";
}

Status cublasLtCreate(lt::Handle* handle) {
  if (fake_cuda_capturing() || fake_cuda_current_device() < 0) return Status::kNotInitialized;
  *handle = reinterpret_cast<lt::Handle>(new FakeHandle{fake_cuda_current_device()});
  return Status::kSuccess;
}

Status cublasLtMatmulDescCreate(lt::Desc* desc, lt::Compute compute, Type scale_type) {
  if (scale_type != Type::kF32) return Status::kNotSupported;
  auto* made = new FakeDesc;
  made->compute = compute;
  *desc = reinterpret_cast<lt::Desc>(made);
  return Status::kSuccess;
}

Status cublasLtMatmulDescDestroy(lt::Desc desc) {
  delete &Of(desc);
  return Status::kSuccess;
}

Status cublasLtMatmulDescSetAttribute(lt::Desc desc, lt::DescAttr attr, const void* value,
                                      size_t n) {
  FakeDesc& d = Of(desc);
  InUse use(d, true);
  if (use.clash) return Bad("a descriptor is changed while in use");
  switch (attr) {
    case lt::DescAttr::kTransA:
      return Put(d.transa, value, n);
    case lt::DescAttr::kTransB:
      return Put(d.transb, value, n);
    case lt::DescAttr::kEpilogue:
      return Put(d.epilogue, value, n);
    case lt::DescAttr::kBiasPointer:
      return Put(d.bias, value, n);
    case lt::DescAttr::kAuxPointer:
      return Put(d.aux, value, n);
    case lt::DescAttr::kAuxLd:
      return Put(d.aux_ld, value, n);
    case lt::DescAttr::kAuxBatchStride:
      return Put(d.aux_stride, value, n);
    case lt::DescAttr::kSmCount:
      return Put(d.sm_count, value, n);
    case lt::DescAttr::kAScalePointer:
      return Put(d.a_scale, value, n);
    case lt::DescAttr::kBScalePointer:
      return Put(d.b_scale, value, n);
    case lt::DescAttr::kFastAccum:
      return Put(d.fast, value, n);
    case lt::DescAttr::kBiasType:
      return Put(d.bias_type, value, n);
    case lt::DescAttr::kAScaleMode:
      return Put(d.a_mode, value, n);
    case lt::DescAttr::kBScaleMode:
      return Put(d.b_mode, value, n);
  }
  return Bad("unknown descriptor attribute");
}

Status cublasLtMatrixLayoutCreate(lt::Layout* layout, Type type, uint64_t rows, uint64_t cols,
                                  int64_t ld) {
  *layout = reinterpret_cast<lt::Layout>(new FakeLayout{type, rows, cols, ld});
  return Status::kSuccess;
}

Status cublasLtMatrixLayoutDestroy(lt::Layout layout) {
  delete &Of(layout);
  return Status::kSuccess;
}

Status cublasLtMatrixLayoutSetAttribute(lt::Layout layout, lt::LayoutAttr attr, const void* value,
                                        size_t n) {
  if (attr == lt::LayoutAttr::kBatchCount) return Put(Of(layout).batch, value, n);
  if (attr == lt::LayoutAttr::kBatchStride) return Put(Of(layout).stride, value, n);
  return Bad("unknown layout attribute");
}

Status cublasLtMatmulPreferenceCreate(lt::Preference* preference) {
  *preference = reinterpret_cast<lt::Preference>(new FakePreference);
  return Status::kSuccess;
}

Status cublasLtMatmulPreferenceDestroy(lt::Preference preference) {
  delete &Of(preference);
  return Status::kSuccess;
}

Status cublasLtMatmulPreferenceSetAttribute(lt::Preference preference, lt::PrefAttr attr,
                                            const void* value, size_t n) {
  if (attr == lt::PrefAttr::kMaxWorkspace) return Put(Of(preference).workspace, value, n);
  if (attr == lt::PrefAttr::kReductionMask) return Put(Of(preference).reductions, value, n);
  uint32_t align = 0;
  const Status s = Put(align, value, n);
  return s == Status::kSuccess && align == 0 ? Bad("alignment") : s;
}

// Four algorithms, the last one first; number i uses i * 64 KiB of workspace. Number 3 splits k,
// and sums the parts in the type of the result.
Status cublasLtMatmulAlgoGetHeuristic(lt::Handle handle, lt::Desc desc, lt::Layout a, lt::Layout b,
                                      lt::Layout c, lt::Layout o, lt::Preference preference,
                                      int want, lt::HeuristicResult* out, int* got) {
  if (!handle) return Status::kNotInitialized;
  InUse use(Of(desc), false);
  if (use.clash) return Bad("a descriptor is read while it is changed");
  *got = 0;
  const Status s = Supported(Of(desc), Of(a), Of(b), Of(c), Of(o));
  if (s != Status::kSuccess) return s;
  const FakePreference& asked = Of(preference);
  const bool splits = asked.reductions & static_cast<uint32_t>(lt::Reduction::kOutputType);
  for (uint64_t i = splits ? 0 : 1; i < 4 && *got < want; ++i) {
    lt::HeuristicResult r = {};
    r.algo.data[0] = kMagic, r.algo.data[1] = 3 - i;
    r.workspace_bytes = Workspace(r.algo);
    if (r.workspace_bytes <= asked.workspace) out[(*got)++] = r;
  }
  return Status::kSuccess;
}

Status cublasLtMatmulAlgoCheck(lt::Handle handle, lt::Desc desc, lt::Layout a, lt::Layout b,
                               lt::Layout c, lt::Layout o, const lt::Algo* algo,
                               lt::HeuristicResult* r) {
  if (!handle) return Status::kNotInitialized;
  if (algo->data[0] != kMagic || algo->data[1] > 3) return Status::kInvalidValue;
  r->workspace_bytes = Workspace(*algo);
  return r->state = Supported(Of(desc), Of(a), Of(b), Of(c), Of(o));
}

Status cublasLtMatmulAlgoConfigGetAttribute(const lt::Algo* algo, lt::AlgoAttr attr, void* value,
                                            size_t n, size_t* written) {
  if (algo->data[0] != kMagic || n != sizeof(int32_t) || !written)
    return Bad("algorithm attribute");
  const int32_t held = attr == lt::AlgoAttr::kTile ? static_cast<int32_t>(algo->data[1]) : 1;
  std::memcpy(value, &held, *written = n);
  return Status::kSuccess;
}

Status cublasLtMatmul(lt::Handle handle, lt::Desc desc, const void* alpha, const void* A,
                      lt::Layout a, const void* B, lt::Layout b, const void* beta, const void* C,
                      lt::Layout c, void* O, lt::Layout o, const lt::Algo* algo, void* workspace,
                      size_t workspace_bytes, cu::Stream) {
  if (!handle) return Status::kNotInitialized;
  if (reinterpret_cast<FakeHandle*>(handle)->device != fake_cuda_current_device()) {
    return Bad("the context is not the handle's");
  }
  FakeDesc& d = Of(desc);
  InUse use(d, false);
  if (use.clash) return Bad("a descriptor is used while it is changed");
  const Status s = Supported(d, Of(a), Of(b), Of(c), Of(o));
  if (s != Status::kSuccess) return s;
  if (!algo || algo->data[0] != kMagic) return Bad("not an algorithm");
  const uint64_t uses = Workspace(*algo);
  if (uses > workspace_bytes) return Bad("workspace too small");
  if (uses && reinterpret_cast<uintptr_t>(workspace) % 256) return Bad("workspace alignment");
  if (uses) std::memset(workspace, 0xee, uses);
  for (void* p : {d.bias, d.aux, d.a_scale, d.b_scale}) {
    if (p == reinterpret_cast<void*>(4096)) return Bad("placeholder pointer");
  }
  if (const char* pause = std::getenv("FAKE_CUBLASLT_SLEEP_US")) usleep(std::atoi(pause));
  fake_cuda_spend(Microseconds(algo->data[1]));
  Compute(d, *static_cast<const float*>(alpha), A, Of(a), B, Of(b),
          *static_cast<const float*>(beta), C, Of(c), O, Of(o));
  return Status::kSuccess;
}

}  // extern "C"
