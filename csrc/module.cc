// shardops._core: hands the FFI handlers to Python, and asks cuBLASLt which algorithm to use.
#include <pybind11/pybind11.h>

#include <cstring>
#include <stdexcept>

#include "gemm_timing.h"
#include "handlers.h"

namespace py = pybind11;

namespace shardops {
namespace {

// A failure becomes RuntimeError, a caller's mistake ValueError, a lack of memory MemoryError.
void Raise(const ffi::Error& error) {
  if (error.success()) return;
  if (error.errc() == ffi::ErrorCode::kInvalidArgument) throw py::value_error(error.message());
  if (error.errc() == ffi::ErrorCode::kResourceExhausted) {
    PyErr_SetString(PyExc_MemoryError, error.message().c_str());
    throw py::error_already_set();
  }
  throw std::runtime_error(error.message());
}

template <class T>
T Value(ffi::ErrorOr<T>&& result) {
  if (!result.has_value()) Raise(result.error());
  return std::move(*result);
}

py::capsule Handler(XLA_FFI_Handler* handler) {
  return py::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

py::dict Stages(XLA_FFI_Handler* instantiate, XLA_FFI_Handler* initialize,
                XLA_FFI_Handler* execute) {
  py::dict stages;
  stages["instantiate"] = Handler(instantiate);
  if (initialize) stages["initialize"] = Handler(initialize);
  stages["execute"] = Handler(execute);
  return stages;
}

template <class State>
py::dict Type() {
  py::dict type;
  type["type_id"] = py::capsule(static_cast<void*>(&State::id));
  type["type_info"] = py::capsule(static_cast<void*>(&State::info));
  return type;
}

py::dict Types() {
  py::dict types;
  types["shardops.Kernel"] = Type<Kernel>();
  types["shardops.GemmPlan"] = Type<GemmPlan>();
  return types;
}

py::dict Targets() {
  py::dict targets;
  targets["shardops_launch"] = Stages(LaunchInstantiate, LaunchInitialize, LaunchExecute);
  targets["shardops_gemm"] = Stages(GemmInstantiate, GemmInitialize, GemmExecute);
  return targets;
}

GemmProblem ProblemFrom(const py::kwargs& attributes) {
  GemmProblem p = DefaultGemmProblem();
  for (auto [name, value] : attributes) {
    const std::string key = py::cast<std::string>(name);
    bool known = false;
    for (const GemmField& f : kGemmFields) {
      if (key != f.name) continue;
      p.*f.member = py::cast<int64_t>(value);
      known = true;
    }
    if (!known) {
      Raise(Invalid(kGemmOp, "attribute " + Quoted(key) + " is unknown; expected one of " +
                                 Describe(p) + "."));
    }
  }
  return p;
}

// What an algorithm says of itself; -1 where it does not.
int32_t Setting(const lt::Algo& algo, lt::AlgoAttr attr) {
  int32_t value = -1;
  size_t written = 0;
  const lt::Status s = CublasLt::Get().functions().MatmulAlgoConfigGetAttribute(
      &algo, attr, &value, sizeof(value), &written);
  return s == lt::Status::kSuccess ? value : -1;
}

py::list GemmQuery(int device, int limit, bool timed, const py::kwargs& attributes) {
  if (limit < 1) Raise(InvalidAttribute(kGemmOp, "limit", limit, "at least 1"));
  auto plan = Value(GemmPlan::Make(ProblemFrom(attributes)));
  std::vector<float> times;
  const auto found = [&] {
    py::gil_scoped_release release;
    auto algorithms = plan->Candidates(device, limit);
    if (timed && algorithms.has_value()) {
      auto measured = TimeGemm(*plan, device, *algorithms);
      if (!measured.has_value()) return decltype(algorithms)(ffi::Unexpected(measured.error()));
      times = std::move(*measured);
    }
    return algorithms;
  }();
  py::list candidates;
  if (!found.has_value()) {
    if (found.error().errc() != ffi::ErrorCode::kUnimplemented) Raise(found.error());
    return candidates;
  }
  for (size_t i = 0; i < found->size(); ++i) {
    const lt::HeuristicResult& r = (*found)[i];
    py::dict candidate;
    candidate["algo"] = py::bytes(reinterpret_cast<const char*>(&r.algo), sizeof(r.algo));
    candidate["algo_version"] = CublasLt::Get().version();
    candidate["workspace_bytes"] = r.workspace_bytes;
    candidate["waves"] = r.waves;
    candidate["kernel"] = Setting(r.algo, lt::AlgoAttr::kKernel);
    candidate["tile"] = Setting(r.algo, lt::AlgoAttr::kTile);
    candidate["split"] = Setting(r.algo, lt::AlgoAttr::kSplit);
    if (timed) candidate["microseconds"] = times[i];
    candidates.append(candidate);
  }
  return candidates;
}

py::dict Versions() {
  int driver = 0;
  {
    py::gil_scoped_release release;
    Raise(Driver::Get().Load());
    Raise(CublasLt::Get().Load());
    Driver::Get().functions().DriverGetVersion(&driver);
  }
  py::dict versions;
  versions["driver"] = driver;
  versions["cublaslt"] = CublasLt::Get().version();
  return versions;
}

std::string DeviceName(int device) {
  Raise(Driver::Get().Load());
  return Value(Driver::Get().NameOf(device));
}

py::dict Counters() {
  py::dict counters;
  counters["cubins_loaded"] = launch_counters.cubins_loaded.load();
  counters["kernels_launched"] = launch_counters.launched.load();
  counters["gemms_instantiated"] = gemm_counters.instantiated.load();
  counters["gemms_settled"] = gemm_counters.settled.load();
  counters["gemms_launched"] = gemm_counters.launched.load();
  counters["algorithms_refused"] = gemm_counters.algo_refused.load();
  return counters;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "FFI handlers of shardops, and the queries that they need at lowering time.";
  m.attr("ffi_api_version") = py::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("types", &Types, "FFI types by name, for jax.ffi.register_ffi_type.");
  m.def("targets", &Targets, "FFI targets by name, for jax.ffi.register_ffi_target.");
  m.def(
      "set_library_paths",
      [](const std::string& driver, const std::string& cublaslt) {
        const bool early = Driver::Get().SetPath(driver);
        return CublasLt::Get().SetPath(cublaslt) && early;
      },
      py::arg("driver"), py::arg("cublaslt"),
      "Which libraries to load. False where one was loaded before.");
  m.def("versions", &Versions, "Of the CUDA driver and of cuBLASLt; loads both.");
  m.def("device_name", &DeviceName, py::arg("device"), "As nvidia-smi shows it.");
  m.def("gemm_query", &GemmQuery, py::arg("device"), py::arg("limit"), py::arg("timed") = false,
        "The algorithms for a GEMM with the given attributes, the fastest by cuBLASLt's heuristic "
        "first: dicts of algo, algo_version, workspace_bytes, waves, and kernel, tile and split as "
        "cublasLtMatmulAlgoConfigAttributes_t has them. Empty where it has none. "
        "Timed, each one runs on the device and has its microseconds too; MemoryError where the "
        "memory for that is missing.");
  m.def("counters", &Counters, "How often each thing happened in this process.");
}

}  // namespace shardops
