// A shared library found at run time.
#ifndef SHARDOPS_CSRC_DYNAMIC_LIBRARY_H_
#define SHARDOPS_CSRC_DYNAMIC_LIBRARY_H_

#include <dlfcn.h>

#include <string>
#include <vector>

namespace shardops {

// Opened once and never closed: its functions may be running in other threads until the process
// ends.
class DynamicLibrary {
 public:
  // Opens the first that can be: names which the process has loaded already come before the
  // linker's search. `why` gets the linker's complaints where none opens.
  static DynamicLibrary Open(const std::vector<std::string>& names, std::string& why) {
    for (int flags : {RTLD_NOLOAD, 0}) {
      for (const std::string& name : names) {
        if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | flags)) {
          return DynamicLibrary(handle);
        }
        if (flags == 0) why += std::string(why.empty() ? "" : "; ") + dlerror();
      }
    }
    return DynamicLibrary(nullptr);
  }

  explicit operator bool() const { return handle_ != nullptr; }

  // Adds the symbol's name to `missing` where there is none.
  template <class F>
  void Find(const char* symbol, F*& function, std::string& missing) const {
    function = reinterpret_cast<F*>(dlsym(handle_, symbol));
    if (!function) missing += std::string(missing.empty() ? "" : ", ") + symbol;
  }

 private:
  explicit DynamicLibrary(void* handle) : handle_(handle) {}
  void* handle_;
};

}  // namespace shardops

#endif  // SHARDOPS_CSRC_DYNAMIC_LIBRARY_H_
