// The Python module quire.kernels.cpu._native. It calls the bind function of each file.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_native, module) {
  quire::bind_pool(module);
  quire::bind_panels(module);
  quire::bind_program(module);
  quire::bind_text(module);
}
