#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

namespace quire {

// Gives up the GIL for as long as it lives. Python ends a daemon thread that asks for the GIL while the interpreter shuts
// down by unwinding its stack, which C++ answers with std::terminate; such a thread waits here for the process to end.
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
