// The inner loop of GPTQ: the columns of a block are rounded one after another, and the later columns of the block take
// over each rounding error.
#pragma once

#include <cstdint>

namespace quire {

// Rows of `cols` columns, `stride` values apart in `values`, `scales`, `bases` and `codes`; `errors` [rows, cols].
// value = scale * code + base, with codes from `low` to `high`. `factor` is a block of the upper Cholesky factor of the
// inverse of the inputs' second moments, [cols, factor_stride].
struct Feedback {
  int64_t rows, cols, stride;
  float* values;  // overwritten with what was rounded
  const float *scales, *bases;
  float low, high;
  const float* factor;
  int64_t factor_stride;
  float *codes, *errors;  // errors are divided by the factor's diagonal
};

void quantize_with_feedback(const Feedback& work);

}  // namespace quire
