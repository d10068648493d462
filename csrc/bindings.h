#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

namespace quire {

// Releases the GIL for the lifetime of the object. If a daemon thread acquires the GIL during interpreter shutdown,
// Python ends the thread by unwinding its stack, and C++ would call std::terminate. Such a thread waits here until the
// process ends.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_;
};

void bind_pool(nanobind::module_& module);
void bind_panels(nanobind::module_& module);
void bind_program(nanobind::module_& module);
void bind_text(nanobind::module_& module);

}  // namespace quire
