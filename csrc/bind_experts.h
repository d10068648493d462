#pragma once

#include "bindings.h"
#include "program.h"

namespace quire {

using Quantized = std::pair<Address, int64_t>;  // Activations: address (0: none) and columns

inline Activations activations_of(const Quantized& rows, bool by_rows = true) {
  return {reinterpret_cast<uint8_t*>(rows.first), rows.second, by_rows};
}

// Raises ValueError for a name that it does not have.
Activation parse_activation(const std::string& name);

void bind_experts(nanobind::class_<Program>& program);

}  // namespace quire
