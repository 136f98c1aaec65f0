// What the test programs share: a check that counts, and the text of an error.
#ifndef SHARDOPS_TESTS_CPP_CHECK_H_
#define SHARDOPS_TESTS_CPP_CHECK_H_

#include <atomic>
#include <cstdio>
#include <string>

#include "errors.h"

inline std::atomic<int> checks{0}, failures{0};

inline void CheckThat(bool ok, const char* text, const char* file, int line,
                      const std::string& more) {
  ++checks;
  if (ok) return;
  ++failures;
  std::printf("%s:%d: %s is false. %s\n", file, line, text, more.c_str());
}

// The second argument, optional, is said where the first is false.
#define CHECK(condition, ...) \
  CheckThat(condition, #condition, __FILE__, __LINE__, std::string(__VA_ARGS__))

template <class T>
std::string Message(const xla::ffi::ErrorOr<T>& result) {
  return result.has_value() ? "no error" : result.error().message();
}
inline std::string Message(const xla::ffi::Error& error) {
  return error.success() ? "no error" : error.message();
}

inline bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// What main returns.
inline int Summary(const char* name) {
  std::printf("%s: %d checks, %d failures\n", name, checks.load(), failures.load());
  return failures == 0 && checks > 0 ? 0 : 1;
}

#endif  // SHARDOPS_TESTS_CPP_CHECK_H_
