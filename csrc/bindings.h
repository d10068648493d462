#pragma once

#include <nanobind/nanobind.h>

#ifdef __GLIBC__
#include <cxxabi.h>
#include <unistd.h>
#endif

#include <cstdint>
#include <string>
#include <utility>

#include "kernels.h"

namespace quire {

// Releases the GIL for the lifetime of the object. If a daemon thread acquires the GIL during interpreter shutdown,
// Python ends the thread. With glibc that unwinds its stack, and C++ would call std::terminate. Such a thread waits
// here until the process ends.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

#ifdef __GLIBC__
  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) pause();
    }
  }
#else
  ~ReleasedGil() { PyEval_RestoreThread(state_); }
#endif

 private:
  PyThreadState* state_;
};

using Address = uintptr_t;
using View = std::pair<Address, int64_t>;  // rows: the address, and values from one row to the next

inline float* floats(const View& view) { return reinterpret_cast<float*>(view.first); }

// Raises ValueError if they were not built.
const KernelTable& kernels_named(const std::string& isa);

void bind_drafts(nanobind::module_& module);
void bind_pool(nanobind::module_& module);
void bind_panels(nanobind::module_& module);
void bind_program(nanobind::module_& module);
void bind_quantize(nanobind::module_& module);
void bind_ranks(nanobind::module_& module);
void bind_sampling(nanobind::module_& module);
void bind_suffix(nanobind::module_& module);
void bind_text(nanobind::module_& module);

}  // namespace quire
