// Errors in the form "{op}: {argument} is {got}; expected {want}."
#ifndef SHARDOPS_CSRC_ERRORS_H_
#define SHARDOPS_CSRC_ERRORS_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace shardops {

namespace ffi = xla::ffi;

inline std::string Quoted(std::string_view name) { return "'" + std::string(name) + "'"; }

// A caller's mistake. `text` is a whole sentence.
inline ffi::Error Invalid(std::string_view op, const std::string& text) {
  return ffi::Error::InvalidArgument(std::string(op) + ": " + text);
}

inline ffi::Error InvalidAttribute(std::string_view op, std::string_view name,
                                   const std::string& got, const std::string& want) {
  return Invalid(op, "attribute " + Quoted(name) + " is " + got + "; expected " + want + ".");
}

inline ffi::Error InvalidAttribute(std::string_view op, std::string_view name, int64_t got,
                                   const std::string& want) {
  return InvalidAttribute(op, name, std::to_string(got), want);
}

// A failure of a library or device. `text` is a whole sentence.
inline ffi::Error Failed(std::string_view op, const std::string& text) {
  return ffi::Error::Internal(std::string(op) + ": " + text);
}

// What this version of a library does not do on this device. `text` is a whole sentence.
inline ffi::Error Unsupported(std::string_view op, const std::string& text) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented, std::string(op) + ": " + text);
}

}  // namespace shardops

#endif  // SHARDOPS_CSRC_ERRORS_H_
