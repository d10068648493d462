// Choices between kernels with the same results, made by what this machine measures and not by its name.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace quire {

// `few_rows` of MatmulCall: 31, 63, 127, 255, or no limit. Takes about a millisecond.
int64_t measure_few_rows(const KernelTable& kernels);

}  // namespace quire
