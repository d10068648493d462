// Scales, and zeros if wanted, of groups of columns: value = scale * (code - zero). On any processor.
#pragma once

#include <cstdint>

namespace quire {

struct Groups {
  const float* values;  // [rows, cols]
  int64_t rows, cols;
  int64_t group;            // 32, 64 or 128 columns, and `cols` is a multiple of it
  const float* importance;  // [cols] weights of the squared errors; null: all alike
  int low, high;            // codes; with zeros from 0 to `high`
  bool has_zeros;
  float *scales, *zeros;  // [rows, cols / group]; zeros are whole numbers from 0 to `high`, and null without `has_zeros`
};

bool can_fit_groups(int64_t group);
void fit_groups(const Groups& groups);

}  // namespace quire
