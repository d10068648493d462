#pragma once

#include <nanobind/nanobind.h>

namespace quire {

void bind_pool(nanobind::module_& module);
void bind_panels(nanobind::module_& module);
void bind_program(nanobind::module_& module);

}  // namespace quire
