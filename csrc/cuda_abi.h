// The part of the CUDA driver's and cuBLASLt's ABI that is called through dlsym.
//
// The extension needs nothing else of CUDA, so it builds on a machine that has none.
// tests/cpp/abi_check.cc proves every value, size, offset and signature against the official
// headers where those exist. All of it has been the same since CUDA 12.0, but for scale modes,
// which came with cuBLAS 12.8 and, for blocks of 128, 12.9: an older library refuses the attribute.
#ifndef SHARDOPS_CSRC_CUDA_ABI_H_
#define SHARDOPS_CSRC_CUDA_ABI_H_

#include <cstddef>
#include <cstdint>

namespace cu {

using Device = int;
using Pointer = unsigned long long;
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Library = struct LibraryTag*;
using Kernel = struct KernelTag*;
using Function = struct FunctionTag*;
using Event = struct EventTag*;

enum class Result : uint32_t { kSuccess = 0 };

enum class FunctionAttribute : uint32_t {
  kMaxDynamicSharedBytes = 8,
  kNonPortableClusterSizeAllowed = 14,
};

enum class LaunchAttributeId : uint32_t {
  kCooperative = 2,
  kClusterDimension = 4,
  kProgrammaticStreamSerialization = 6,
};

enum class CaptureMode : uint32_t { kRelaxed = 2 };

enum class StreamFlags : uint32_t { kNonBlocking = 1 };

struct LaunchAttribute {
  LaunchAttributeId id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int allowed;  // of programmatic stream serialization
    int cooperative;
  } value;
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

// One member a symbol of libcuda, whose names carry version suffixes: see driver.cc.
struct Functions {
  Result (*Init)(unsigned flags);
  Result (*GetErrorName)(Result, const char** name);
  Result (*DriverGetVersion)(int*);
  Result (*DeviceGet)(Device*, int ordinal);
  Result (*DeviceGetName)(char* name, int bytes, Device);
  Result (*DevicePrimaryCtxRetain)(Context*, Device);
  Result (*CtxPushCurrent)(Context);
  Result (*CtxPopCurrent)(Context*);
  // `options` and `values` arrays, JIT options then library options; always empty here.
  Result (*LibraryLoadData)(Library*, const void* image, int* options, void** values, unsigned,
                            int* library_options, void** library_values, unsigned);
  Result (*LibraryGetKernel)(Kernel*, Library, const char* name);
  Result (*KernelGetFunction)(Function*, Kernel);
  Result (*KernelSetAttribute)(FunctionAttribute, int value, Kernel, Device);
  Result (*LaunchKernelEx)(const LaunchConfig*, Function, void** parameters, void** extra);
  Result (*MemsetD8Async)(Pointer, unsigned char value, size_t bytes, Stream);
  // Of timing alone.
  Result (*MemGetInfo)(size_t* free, size_t* total);
  Result (*MemAlloc)(Pointer*, size_t bytes);
  Result (*MemFree)(Pointer);
  Result (*MemcpyHtoDAsync)(Pointer, const void*, size_t bytes, Stream);
  Result (*MemcpyDtoDAsync)(Pointer to, Pointer from, size_t bytes, Stream);
  Result (*StreamCreate)(Stream*, unsigned flags);
  Result (*StreamSynchronize)(Stream);
  Result (*StreamDestroy)(Stream);
  Result (*EventCreate)(Event*, unsigned flags);
  Result (*EventRecord)(Event, Stream);
  Result (*EventSynchronize)(Event);
  Result (*EventElapsedTime)(float* milliseconds, Event from, Event to);
  Result (*EventDestroy)(Event);
  Result (*ThreadExchangeStreamCaptureMode)(CaptureMode*);
};

}  // namespace cu

namespace lt {

// Opaque: only ever held as pointers that the library made.
using Handle = struct HandleTag*;
using Desc = struct DescTag*;
using Layout = struct LayoutTag*;
using Preference = struct PreferenceTag*;

// An algorithm is plain data: it may be stored and given back to the same version of the library.
struct Algo {
  uint64_t data[8];
};

enum class Status : uint32_t {
  kSuccess = 0,
  kNotInitialized = 1,
  kInvalidValue = 7,
  kNotSupported = 15,
};

struct HeuristicResult {
  Algo algo;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

enum class Type : uint32_t { kF32 = 0, kF16 = 2, kBF16 = 14, kF8E4M3 = 28, kF8E5M2 = 29 };

enum class Compute : uint32_t { kF32 = 68, kF32FastTF32 = 77 };

enum class Op : uint32_t { kN = 0, kT = 1 };

enum class LayoutAttr : uint32_t {
  kBatchCount = 5,   // int32
  kBatchStride = 6,  // int64, elements
};

enum class DescAttr : uint32_t {
  kTransA = 3,           // int32
  kTransB = 4,           // int32
  kEpilogue = 7,         // uint32
  kBiasPointer = 8,      // pointer
  kAuxPointer = 11,      // pointer
  kAuxLd = 12,           // int64
  kAuxBatchStride = 13,  // int64
  kSmCount = 15,         // int32
  kAScalePointer = 17,   // pointer
  kBScalePointer = 18,   // pointer
  kFastAccum = 25,       // int8
  kBiasType = 26,        // int32
  kAScaleMode = 31,      // int32
  kBScaleMode = 32,      // int32
};

// What one scale of an FP8 matrix covers.
enum class Scale : uint32_t {
  kTensor = 0,        // float32, the matrix
  kVec32 = 2,         // E8M0, 32 elements along k
  kVec128 = 4,        // float32, 128 elements along k
  kBlock128x128 = 5,  // float32, 128 x 128 elements
};

// An epilogue is the sum of its parts, or kNone.
enum class Epilogue : uint32_t { kNone = 1, kRelu = 2, kBias = 4, kGelu = 32, kAux = 128 };

enum class PrefAttr : uint32_t {
  kMaxWorkspace = 1,   // uint64
  kReductionMask = 3,  // uint32, a sum of schemes
  kMinAlignA = 5,      // uint32, bytes; so are the three that follow
  kMinAlignB = 6,
  kMinAlignC = 7,
  kMinAlignD = 8,
};

// What an algorithm is: each a 32-bit number.
enum class AlgoAttr : uint32_t { kKernel = 0, kTile = 1, kSplit = 2 };

// How the parts of a split k are summed: in the compute type, or in place or apart in that of the
// result.
enum class Reduction : uint32_t { kInPlace = 1, kComputeType = 2, kOutputType = 4 };

// One member a symbol. Each name is the symbol without its "cublasLt" prefix.
struct Functions {
  size_t (*GetVersion)();
  const char* (*GetStatusName)(Status);
  Status (*Create)(Handle*);
  Status (*MatmulDescCreate)(Desc*, Compute, Type scale_type);
  Status (*MatmulDescDestroy)(Desc);
  Status (*MatmulDescSetAttribute)(Desc, DescAttr, const void*, size_t);
  Status (*MatrixLayoutCreate)(Layout*, Type, uint64_t rows, uint64_t cols, int64_t ld);
  Status (*MatrixLayoutDestroy)(Layout);
  Status (*MatrixLayoutSetAttribute)(Layout, LayoutAttr, const void*, size_t);
  Status (*MatmulPreferenceCreate)(Preference*);
  Status (*MatmulPreferenceDestroy)(Preference);
  Status (*MatmulPreferenceSetAttribute)(Preference, PrefAttr, const void*, size_t);
  Status (*MatmulAlgoGetHeuristic)(Handle, Desc, Layout a, Layout b, Layout c, Layout d, Preference,
                                   int requested, HeuristicResult*, int* found);
  Status (*MatmulAlgoCheck)(Handle, Desc, Layout a, Layout b, Layout c, Layout d, const Algo*,
                            HeuristicResult*);
  Status (*MatmulAlgoConfigGetAttribute)(const Algo*, AlgoAttr, void*, size_t, size_t* written);
  Status (*Matmul)(Handle, Desc, const void* alpha, const void* a, Layout, const void* b, Layout,
                   const void* beta, const void* c, Layout, void* d, Layout, const Algo*,
                   void* workspace, size_t workspace_bytes, cu::Stream);
};

}  // namespace lt

#endif  // SHARDOPS_CSRC_CUDA_ABI_H_
