// Compiles only where csrc/cuda_abi.h agrees with the official headers. Not linked into anything.
//
//   g++ -std=c++17 -fsyntax-only -Icsrc -isystem <folder of cuda.h> tests/cpp/abi_check.cc
//
// and, for cuBLASLt too: -isystem <folder of cublasLt.h> -DSHARDOPS_CHECK_CUBLASLT.
#include <cuda.h>
#ifdef SHARDOPS_CHECK_CUBLASLT
#include <cublasLt.h>
#endif

#include <type_traits>

#include "cuda_abi.h"

// The calling convention cannot tell an enum from an integer of the same size, nor one data pointer
// from another. Constness is compared all the same: it says which way data flows.
template <class Ours, class Theirs>
constexpr bool Same() {
  if constexpr (std::is_same_v<Ours, Theirs>) {
    return true;
  } else if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    return std::is_const_v<std::remove_pointer_t<Ours>> ==
           std::is_const_v<std::remove_pointer_t<Theirs>>;
  } else if constexpr ((std::is_enum_v<Ours> || std::is_integral_v<Ours>) &&
                       (std::is_enum_v<Theirs> || std::is_integral_v<Theirs>)) {
    return sizeof(Ours) == sizeof(Theirs);
  } else {
    return false;
  }
}

template <class Ours, class Theirs>
struct SameFunction : std::false_type {};
template <class R, class... A, class S, class... B>
struct SameFunction<R (*)(A...), S (*)(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) != sizeof...(B)) {
      return false;
    } else {
      return Same<R, S>() && (Same<A, B>() && ...);
    }
  }();
};

template <class Ours, class Theirs>
constexpr bool Equal(Ours ours, Theirs theirs) {
  return static_cast<long long>(ours) == static_cast<long long>(theirs);
}

#define CHECK_VALUE(ours, theirs) static_assert(Equal(ours, theirs), #ours " is not " #theirs)
#define CHECK_FUNCTION(ours, theirs) \
  static_assert(SameFunction<decltype(ours), decltype(&theirs)>::value, #ours " is not " #theirs)

// The checks can fail.
static_assert(!SameFunction<int (*)(int), int (*)(int, int)>::value);
static_assert(!SameFunction<int (*)(int), int (*)(int64_t)>::value);
static_assert(!SameFunction<int (*)(void*), int (*)(const void*)>::value);
static_assert(!SameFunction<int (*)(float), int (*)(int)>::value);

// ---------------------------------------------------------------------------------- the driver

static_assert(sizeof(cu::Pointer) == sizeof(CUdeviceptr));
static_assert(sizeof(cu::Device) == sizeof(CUdevice));
CHECK_VALUE(cu::Result::kSuccess, CUDA_SUCCESS);
CHECK_VALUE(cu::FunctionAttribute::kMaxDynamicSharedBytes,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
CHECK_VALUE(cu::FunctionAttribute::kNonPortableClusterSizeAllowed,
            CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
CHECK_VALUE(cu::CaptureMode::kRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
CHECK_VALUE(cu::StreamFlags::kNonBlocking, CU_STREAM_NON_BLOCKING);
CHECK_VALUE(cu::LaunchAttributeId::kCooperative, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
CHECK_VALUE(cu::LaunchAttributeId::kClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
CHECK_VALUE(cu::LaunchAttributeId::kProgrammaticStreamSerialization,
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);

static_assert(sizeof(cu::LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(sizeof(cu::LaunchAttribute::value) == sizeof(CUlaunchAttributeValue));
CHECK_VALUE(offsetof(cu::LaunchAttribute, id), offsetof(CUlaunchAttribute, id));
CHECK_VALUE(offsetof(cu::LaunchAttribute, value.cluster.x),
            offsetof(CUlaunchAttribute, value.clusterDim.x));
CHECK_VALUE(offsetof(cu::LaunchAttribute, value.cluster.y),
            offsetof(CUlaunchAttribute, value.clusterDim.y));
CHECK_VALUE(offsetof(cu::LaunchAttribute, value.cluster.z),
            offsetof(CUlaunchAttribute, value.clusterDim.z));
CHECK_VALUE(offsetof(cu::LaunchAttribute, value.allowed),
            offsetof(CUlaunchAttribute, value.programmaticStreamSerializationAllowed));
CHECK_VALUE(offsetof(cu::LaunchAttribute, value.cooperative),
            offsetof(CUlaunchAttribute, value.cooperative));

static_assert(sizeof(cu::LaunchConfig) == sizeof(CUlaunchConfig));
CHECK_VALUE(offsetof(cu::LaunchConfig, grid_x), offsetof(CUlaunchConfig, gridDimX));
CHECK_VALUE(offsetof(cu::LaunchConfig, grid_y), offsetof(CUlaunchConfig, gridDimY));
CHECK_VALUE(offsetof(cu::LaunchConfig, grid_z), offsetof(CUlaunchConfig, gridDimZ));
CHECK_VALUE(offsetof(cu::LaunchConfig, block_x), offsetof(CUlaunchConfig, blockDimX));
CHECK_VALUE(offsetof(cu::LaunchConfig, block_y), offsetof(CUlaunchConfig, blockDimY));
CHECK_VALUE(offsetof(cu::LaunchConfig, block_z), offsetof(CUlaunchConfig, blockDimZ));
CHECK_VALUE(offsetof(cu::LaunchConfig, shared_bytes), offsetof(CUlaunchConfig, sharedMemBytes));
CHECK_VALUE(offsetof(cu::LaunchConfig, stream), offsetof(CUlaunchConfig, hStream));
CHECK_VALUE(offsetof(cu::LaunchConfig, attributes), offsetof(CUlaunchConfig, attrs));
CHECK_VALUE(offsetof(cu::LaunchConfig, attribute_count), offsetof(CUlaunchConfig, numAttrs));

// cuda.h maps plain names to the versioned symbols by macro: driver.cc asks for the same ones.
CHECK_FUNCTION(cu::Functions::Init, cuInit);
CHECK_FUNCTION(cu::Functions::GetErrorName, cuGetErrorName);
CHECK_FUNCTION(cu::Functions::DriverGetVersion, cuDriverGetVersion);
CHECK_FUNCTION(cu::Functions::DeviceGet, cuDeviceGet);
CHECK_FUNCTION(cu::Functions::DeviceGetName, cuDeviceGetName);
CHECK_FUNCTION(cu::Functions::DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain);
CHECK_FUNCTION(cu::Functions::CtxPushCurrent, cuCtxPushCurrent_v2);
CHECK_FUNCTION(cu::Functions::CtxPopCurrent, cuCtxPopCurrent_v2);
CHECK_FUNCTION(cu::Functions::LibraryLoadData, cuLibraryLoadData);
CHECK_FUNCTION(cu::Functions::LibraryGetKernel, cuLibraryGetKernel);
CHECK_FUNCTION(cu::Functions::KernelGetFunction, cuKernelGetFunction);
CHECK_FUNCTION(cu::Functions::KernelSetAttribute, cuKernelSetAttribute);
CHECK_FUNCTION(cu::Functions::LaunchKernelEx, cuLaunchKernelEx);
CHECK_FUNCTION(cu::Functions::MemsetD8Async, cuMemsetD8Async);
CHECK_FUNCTION(cu::Functions::MemGetInfo, cuMemGetInfo_v2);
CHECK_FUNCTION(cu::Functions::MemAlloc, cuMemAlloc_v2);
CHECK_FUNCTION(cu::Functions::MemFree, cuMemFree_v2);
CHECK_FUNCTION(cu::Functions::MemcpyHtoDAsync, cuMemcpyHtoDAsync_v2);
CHECK_FUNCTION(cu::Functions::MemcpyDtoDAsync, cuMemcpyDtoDAsync_v2);
CHECK_FUNCTION(cu::Functions::StreamCreate, cuStreamCreate);
CHECK_FUNCTION(cu::Functions::StreamSynchronize, cuStreamSynchronize);
CHECK_FUNCTION(cu::Functions::StreamDestroy, cuStreamDestroy_v2);
CHECK_FUNCTION(cu::Functions::EventCreate, cuEventCreate);
CHECK_FUNCTION(cu::Functions::EventRecord, cuEventRecord);
CHECK_FUNCTION(cu::Functions::EventSynchronize, cuEventSynchronize);
CHECK_FUNCTION(cu::Functions::EventElapsedTime, cuEventElapsedTime);
CHECK_FUNCTION(cu::Functions::EventDestroy, cuEventDestroy_v2);
CHECK_FUNCTION(cu::Functions::ThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode);

// ------------------------------------------------------------------------------------ cuBLASLt

#ifdef SHARDOPS_CHECK_CUBLASLT

static_assert(sizeof(lt::Algo) == 64 && sizeof(lt::Algo) == sizeof(cublasLtMatmulAlgo_t));
static_assert(alignof(lt::Algo) == alignof(cublasLtMatmulAlgo_t));
using Theirs = cublasLtMatmulHeuristicResult_t;
static_assert(sizeof(lt::HeuristicResult) == sizeof(Theirs));
static_assert(alignof(lt::HeuristicResult) == alignof(Theirs));
CHECK_VALUE(offsetof(lt::HeuristicResult, algo), offsetof(Theirs, algo));
CHECK_VALUE(offsetof(lt::HeuristicResult, workspace_bytes), offsetof(Theirs, workspaceSize));
CHECK_VALUE(offsetof(lt::HeuristicResult, state), offsetof(Theirs, state));
CHECK_VALUE(offsetof(lt::HeuristicResult, waves), offsetof(Theirs, wavesCount));
CHECK_VALUE(offsetof(lt::HeuristicResult, reserved), offsetof(Theirs, reserved));
// Passed to attributes by size.
static_assert(sizeof(lt::Op) == 4 && sizeof(lt::Epilogue) == 4 && sizeof(lt::Scale) == 4);
static_assert(sizeof(lt::Type) == 4 && sizeof(cudaDataType_t) == 4);

CHECK_VALUE(lt::Status::kSuccess, CUBLAS_STATUS_SUCCESS);
CHECK_VALUE(lt::Status::kNotInitialized, CUBLAS_STATUS_NOT_INITIALIZED);
CHECK_VALUE(lt::Status::kInvalidValue, CUBLAS_STATUS_INVALID_VALUE);
CHECK_VALUE(lt::Status::kNotSupported, CUBLAS_STATUS_NOT_SUPPORTED);

CHECK_VALUE(lt::Type::kF32, CUDA_R_32F);
CHECK_VALUE(lt::Type::kF16, CUDA_R_16F);
CHECK_VALUE(lt::Type::kBF16, CUDA_R_16BF);
CHECK_VALUE(lt::Type::kF8E4M3, CUDA_R_8F_E4M3);
CHECK_VALUE(lt::Type::kF8E5M2, CUDA_R_8F_E5M2);

CHECK_VALUE(lt::Compute::kF32, CUBLAS_COMPUTE_32F);
CHECK_VALUE(lt::Compute::kF32FastTF32, CUBLAS_COMPUTE_32F_FAST_TF32);

CHECK_VALUE(lt::Op::kN, CUBLAS_OP_N);
CHECK_VALUE(lt::Op::kT, CUBLAS_OP_T);

CHECK_VALUE(lt::LayoutAttr::kBatchCount, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
CHECK_VALUE(lt::LayoutAttr::kBatchStride, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);

CHECK_VALUE(lt::DescAttr::kTransA, CUBLASLT_MATMUL_DESC_TRANSA);
CHECK_VALUE(lt::DescAttr::kTransB, CUBLASLT_MATMUL_DESC_TRANSB);
CHECK_VALUE(lt::DescAttr::kEpilogue, CUBLASLT_MATMUL_DESC_EPILOGUE);
CHECK_VALUE(lt::DescAttr::kBiasPointer, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
CHECK_VALUE(lt::DescAttr::kAuxPointer, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
CHECK_VALUE(lt::DescAttr::kAuxLd, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
CHECK_VALUE(lt::DescAttr::kAuxBatchStride, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE);
CHECK_VALUE(lt::DescAttr::kSmCount, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET);
CHECK_VALUE(lt::DescAttr::kAScalePointer, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
CHECK_VALUE(lt::DescAttr::kBScalePointer, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
CHECK_VALUE(lt::DescAttr::kFastAccum, CUBLASLT_MATMUL_DESC_FAST_ACCUM);
CHECK_VALUE(lt::DescAttr::kBiasType, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);

#if CUBLAS_VERSION >= 120900  // enumerators, which #ifdef cannot see
CHECK_VALUE(lt::DescAttr::kAScaleMode, CUBLASLT_MATMUL_DESC_A_SCALE_MODE);
CHECK_VALUE(lt::DescAttr::kBScaleMode, CUBLASLT_MATMUL_DESC_B_SCALE_MODE);
CHECK_VALUE(lt::Scale::kTensor, CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F);
CHECK_VALUE(lt::Scale::kVec32, CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
CHECK_VALUE(lt::Scale::kVec128, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
CHECK_VALUE(lt::Scale::kBlock128x128, CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
#endif

// The parts of an epilogue add up to those that the library has.
constexpr unsigned kBias = unsigned(lt::Epilogue::kBias), kGelu = unsigned(lt::Epilogue::kGelu),
                   kAux = unsigned(lt::Epilogue::kAux), kRelu = unsigned(lt::Epilogue::kRelu);
CHECK_VALUE(lt::Epilogue::kNone, CUBLASLT_EPILOGUE_DEFAULT);
CHECK_VALUE(kBias, CUBLASLT_EPILOGUE_BIAS);
CHECK_VALUE(kGelu, CUBLASLT_EPILOGUE_GELU);
CHECK_VALUE(kGelu + kBias, CUBLASLT_EPILOGUE_GELU_BIAS);
CHECK_VALUE(kGelu + kAux, CUBLASLT_EPILOGUE_GELU_AUX);
CHECK_VALUE(kGelu + kAux + kBias, CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
CHECK_VALUE(kRelu, CUBLASLT_EPILOGUE_RELU);
CHECK_VALUE(kRelu + kBias, CUBLASLT_EPILOGUE_RELU_BIAS);

CHECK_VALUE(lt::PrefAttr::kMaxWorkspace, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
CHECK_VALUE(lt::AlgoAttr::kKernel, CUBLASLT_ALGO_CONFIG_ID);
CHECK_VALUE(lt::AlgoAttr::kTile, CUBLASLT_ALGO_CONFIG_TILE_ID);
CHECK_VALUE(lt::AlgoAttr::kSplit, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
CHECK_VALUE(lt::PrefAttr::kReductionMask, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
CHECK_VALUE(lt::Reduction::kInPlace, CUBLASLT_REDUCTION_SCHEME_INPLACE);
CHECK_VALUE(lt::Reduction::kComputeType, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
CHECK_VALUE(lt::Reduction::kOutputType, CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE);
CHECK_VALUE(lt::PrefAttr::kMinAlignA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
CHECK_VALUE(lt::PrefAttr::kMinAlignB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
CHECK_VALUE(lt::PrefAttr::kMinAlignC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
CHECK_VALUE(lt::PrefAttr::kMinAlignD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);

CHECK_FUNCTION(lt::Functions::GetVersion, cublasLtGetVersion);
CHECK_FUNCTION(lt::Functions::GetStatusName, cublasLtGetStatusName);
CHECK_FUNCTION(lt::Functions::Create, cublasLtCreate);
CHECK_FUNCTION(lt::Functions::MatmulDescCreate, cublasLtMatmulDescCreate);
CHECK_FUNCTION(lt::Functions::MatmulDescDestroy, cublasLtMatmulDescDestroy);
CHECK_FUNCTION(lt::Functions::MatmulDescSetAttribute, cublasLtMatmulDescSetAttribute);
CHECK_FUNCTION(lt::Functions::MatrixLayoutCreate, cublasLtMatrixLayoutCreate);
CHECK_FUNCTION(lt::Functions::MatrixLayoutDestroy, cublasLtMatrixLayoutDestroy);
CHECK_FUNCTION(lt::Functions::MatrixLayoutSetAttribute, cublasLtMatrixLayoutSetAttribute);
CHECK_FUNCTION(lt::Functions::MatmulPreferenceCreate, cublasLtMatmulPreferenceCreate);
CHECK_FUNCTION(lt::Functions::MatmulPreferenceDestroy, cublasLtMatmulPreferenceDestroy);
CHECK_FUNCTION(lt::Functions::MatmulPreferenceSetAttribute, cublasLtMatmulPreferenceSetAttribute);
CHECK_FUNCTION(lt::Functions::MatmulAlgoGetHeuristic, cublasLtMatmulAlgoGetHeuristic);
CHECK_FUNCTION(lt::Functions::MatmulAlgoCheck, cublasLtMatmulAlgoCheck);
CHECK_FUNCTION(lt::Functions::MatmulAlgoConfigGetAttribute, cublasLtMatmulAlgoConfigGetAttribute);
CHECK_FUNCTION(lt::Functions::Matmul, cublasLtMatmul);

#endif
