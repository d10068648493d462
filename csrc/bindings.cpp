// The Python module quire.kernels.cpu._native. It calls the bind function of each file.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_native, module) {
  // At exit Python may keep objects of modules alive. That is no leak to report to a user.
  nanobind::set_leak_warnings(false);
  quire::bind_pool(module);
  quire::bind_panels(module);
  quire::bind_program(module);
  quire::bind_quantize(module);
  quire::bind_ranks(module);
  quire::bind_drafts(module);
  quire::bind_sampling(module);
  quire::bind_suffix(module);
  quire::bind_text(module);
}
