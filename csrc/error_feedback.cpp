// Implements error_feedback.h.
#include "error_feedback.h"

#include <algorithm>
#include <cmath>

namespace quire {
namespace {

float nearest(float x) {
  constexpr float shift = 12582912.0f;  // adding it rounds to a whole number
  return (std::min(std::max(x, -4e6f), 4e6f) + shift) - shift;
}

void quantize_row(const Feedback& work, int64_t row) {
  const int64_t first = row * work.stride;
  float *x = work.values + first, *errors = work.errors + row * work.cols;
  for (int64_t col = 0; col < work.cols; col++) {
    const float scale = work.scales[first + col], base = work.bases[first + col];
    const float inverse = std::fabs(scale) > 1e-30f ? 1.0f / scale : 0.0f;
    const float code = std::min(std::max(nearest((x[col] - base) * inverse), work.low), work.high);
    const float* factor = work.factor + col * work.factor_stride;
    const float error = (x[col] - (scale * code + base)) / factor[col];
    work.codes[first + col] = code;
    errors[col] = error;
    for (int64_t later = col + 1; later < work.cols; later++) x[later] -= error * factor[later];
  }
}

}  // namespace

void quantize_with_feedback(const Feedback& work) {
  for (int64_t row = 0; row < work.rows; row++) quantize_row(work, row);
}

}  // namespace quire
