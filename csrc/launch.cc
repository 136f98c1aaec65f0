// shardops_launch: one custom call = one launch of a kernel whose code travels in the call.
//
// Attributes
//   cubin         uint8[]   the code
//   name          string    the kernel's symbol in it
//   grid          int64[3]  blocks
//   block         int64[3]  threads
//   cluster       int64[3]  blocks a cluster; all 1: no clusters
//   shared_bytes  int64     dynamic shared memory
//   scalars       uint8[]   scalar arguments, packed
//   sizes         int64[]   the size of each, in bytes
//   zeroed        int64[]   indices of results that are set to zero first, on the stream
//   early         int64     1: it may start before what precedes it on the stream has ended, since
//                           the kernel waits for that itself; may be left out
//   align         int64     what each address that the kernel gets is a multiple of; may be left
//                           out
//   resident      int64     1: all blocks run at the same time, or the launch fails, since they
//                           wait for each other; may be left out
// Kernel parameters, in order: operand addresses, result addresses, scalars.
//
// Stages. instantiate checks the attributes and loads the code, once a process for each distinct
// cubin. initialize runs on each device before each execution, outside stream capture: the first
// one loads the kernel into the device's context. execute launches, and copies arrays that are not
// at a multiple of `align`; it can be captured.
#include <optional>

#include "handlers.h"

namespace shardops {
namespace {

constexpr char kOp[] = "shardops_launch";

// Reads attributes until one is missing or of another type; then `error` says which.
class Reader {
 public:
  explicit Reader(ffi::Dictionary attributes) : attributes_(attributes) {}

  template <class T>
  void Array(const char* name, std::vector<T>& out) {
    if (auto span =
            Get<ffi::Span<const T>>(name, sizeof(T) == 1 ? "a uint8 array" : "an int64 array")) {
      out.assign(span->begin(), span->end());
    }
  }
  void Dims(const char* name, LaunchSpec::Dims& out) {
    std::vector<int64_t> dims;
    Array(name, dims);
    if (error_) return;
    if (dims.size() != out.size()) {
      error_ =
          InvalidAttribute(kOp, name, std::to_string(dims.size()) + " integers long", "3 integers");
      return;
    }
    std::copy(dims.begin(), dims.end(), out.begin());
  }
  void Integer(const char* name, int64_t& out) {
    if (auto value = Get<int64_t>(name, "an int64")) out = *value;
  }
  void String(const char* name, std::string& out) {
    if (auto value = Get<std::string_view>(name, "a string")) out = std::string(*value);
  }
  void OptionalInteger(const char* name, int64_t& out) {
    if (attributes_.contains(name)) Integer(name, out);
  }
  const std::optional<ffi::Error>& error() const { return error_; }

 private:
  template <class T>
  std::optional<T> Get(const char* name, const char* want) {
    if (error_) return std::nullopt;
    if (!attributes_.contains(name)) {
      error_ = InvalidAttribute(kOp, name, "missing", want);
      return std::nullopt;
    }
    auto value = attributes_.get<T>(name);
    if (!value.has_value()) {
      error_ = InvalidAttribute(kOp, name, "of another type", want);
      return std::nullopt;
    }
    return *value;
  }

  ffi::Dictionary attributes_;
  std::optional<ffi::Error> error_;
};

ffi::ErrorOr<std::unique_ptr<Kernel>> Instantiate(ffi::Dictionary attributes) {
  LaunchSpec spec;
  std::vector<uint8_t> cubin;
  Reader reader(attributes);
  reader.Array("cubin", cubin);
  reader.String("name", spec.name);
  reader.Dims("grid", spec.grid);
  reader.Dims("block", spec.block);
  reader.Dims("cluster", spec.cluster);
  reader.Integer("shared_bytes", spec.shared_bytes);
  reader.Array("scalars", spec.scalars);
  reader.Array("sizes", spec.sizes);
  reader.Array("zeroed", spec.zeroed);
  // Programs of older versions have none of these.
  reader.OptionalInteger("early", spec.early);
  reader.OptionalInteger("align", spec.align);
  reader.OptionalInteger("resident", spec.resident);
  if (reader.error()) return ffi::Unexpected(*reader.error());
  spec.cubin.assign(cubin.begin(), cubin.end());
  return Kernel::Make(spec);
}

ffi::Error Initialize(int32_t device, Kernel* kernel, ffi::RemainingArgs, ffi::RemainingRets,
                      ffi::Dictionary) {
  return kernel->Prepare(device);
}

ffi::Error Execute(cu::Stream stream, int32_t device, Kernel* kernel, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Dictionary) {
  return ExecuteLaunch(stream, device, kernel, args, rets);
}

}  // namespace

ffi::Error ExecuteLaunch(cu::Stream stream, int32_t device, Kernel* kernel, ffi::RemainingArgs args,
                         ffi::RemainingRets rets) {
  std::vector<Region> operands;
  operands.reserve(args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    operands.push_back({buffer->untyped_data(), buffer->size_bytes()});
  }
  std::vector<Region> results;
  results.reserve(rets.size());
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    results.push_back({(*buffer)->untyped_data(), (*buffer)->size_bytes()});
  }
  return kernel->Launch(device, stream, operands, results);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(LaunchInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(LaunchInitialize, Initialize,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<Kernel>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(LaunchExecute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cu::Stream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<Kernel>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace shardops
