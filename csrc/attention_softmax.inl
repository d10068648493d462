// The softmax of a row over a part of its keys, and how parts are put together. One merge serves all, so that results
// do not depend on who computed which part. Used by attention.inl.
#pragma once

#include "panels.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

constexpr float kLowest = -3.0e38f;  // below any score, and finite: e^(kLowest - kLowest) must be 1

QUIRE_INLINE f32 minus_infinity() { return set1(-__builtin_inff()); }

// The softmax of one row over some keys, in floats: the weighted sum of values, 16 lanes of the sum of weights, and the
// highest score.
struct State {
  int head_dim;

  int64_t stride() const { return head_dim + 2 * kLanes; }
  float* weight(float* row) const { return row + head_dim; }
  float* highest(float* row) const { return row + head_dim + kLanes; }

  void clear_sums(float* row) const {
    for (int d = 0; d < head_dim; d += kLanes) store(row + d, zero());
  }

  // Joins the softmax of later keys.
  void merge(float* row, const float* later) const {
    float* top = highest(row);
    float later_top = later[head_dim + kLanes], common = *top > later_top ? *top : later_top;
    f32 fade = exp(set1(*top - common)), later_fade = exp(set1(later_top - common));
    for (int d = 0; d < head_dim + kLanes; d += kLanes) {
      store(row + d, fma(load(row + d), fade, load(later + d) * later_fade));
    }
    *top = common;
  }

  void finish(const float* row, float* out) const {
    f32 total = set1(sum(load(row + head_dim)));
    for (int d = 0; d < head_dim; d += kLanes) store(out + d, load(row + d) / total + zero());
  }
};

}  // namespace QUIRE_ISA
}  // namespace quire
