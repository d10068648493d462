#pragma once

#include <tuple>

#include "bindings.h"
#include "program.h"

namespace quire {

using Quantized = std::pair<Address, int64_t>;  // Activations: address (0: none) and columns

inline Activations activations_of(const Quantized& rows, bool by_rows = true) {
  return {reinterpret_cast<uint8_t*>(rows.first), rows.second, by_rows};
}

// Columns of activations that an op writes: the address, all columns, the first that it writes, and their number.
using QuantizedPart = std::tuple<Address, int64_t, int64_t, int64_t>;

inline Activations activations_of(const QuantizedPart& rows) {
  const auto& [address, cols, first, width] = rows;
  return {reinterpret_cast<uint8_t*>(address), cols, true, first, width};
}

// Raises ValueError for a name that it does not have.
Activation parse_activation(const std::string& name);

void bind_experts(nanobind::class_<Program>& program);

}  // namespace quire
