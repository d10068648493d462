// The Python module quire.kernels.cpu._native: what each file binds, under one roof.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_native, module) {
  quire::bind_pool(module);
  quire::bind_panels(module);
  quire::bind_program(module);
  quire::bind_text(module);
}
