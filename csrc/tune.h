// The durations of two ways to multiply that have the same results. kernels/cpu/native.py chooses between them by what
// the machine measures, not by its name.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace quire {

// The shortest time of some products of `rows` rows with a small quantized matrix of this format, in nanoseconds. Codes
// are unpacked in registers or stored unpacked. The matrix stays in the cache, so that only computation is timed.
int64_t time_product(const KernelTable& kernels, Format format, int64_t rows, bool in_registers);

}  // namespace quire
