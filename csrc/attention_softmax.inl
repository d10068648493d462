// The softmax of a row over a part of its keys, and the merge of parts. All parts are merged by the same function, so
// results do not depend on which thread computes which part. attention.inl calls it.
#pragma once

#include "panels.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

constexpr float kLowest = -3.0e38f;  // below any score, but finite: e^(kLowest - kLowest) must be 1

QUIRE_INLINE f32 minus_infinity() { return set1(-__builtin_inff()); }

// The softmax of one row over some keys, as floats: the weighted sum of values, the sum of weights in 16 lanes, and the
// largest score.
struct State {
  int value_dim;

  int64_t stride() const { return value_dim + 2 * kLanes; }
  float* weight(float* row) const { return row + value_dim; }
  float* highest(float* row) const { return row + value_dim + kLanes; }

  void clear_sums(float* row) const {
    for (int d = 0; d < value_dim; d += kLanes) store(row + d, zero());
  }

  // Merges the softmax of later keys into consecutive rows. One call of `exp` computes the factors of 16 rows.
  void merge(int rows, float* row, const float* later) const {
    for (int done = 0; done < rows; done += kLanes) {
      const int count = rows - done < kLanes ? rows - done : kLanes;
      float fades[kLanes] = {}, later_fades[kLanes] = {};
      for (int i = 0; i < count; ++i) set_common(row + i * stride(), later + i * stride(), fades[i], later_fades[i]);
      store(fades, exp(load(fades)));
      store(later_fades, exp(load(later_fades)));
      for (int i = 0; i < count; ++i, row += stride(), later += stride()) {
        const f32 fade = set1(fades[i]), later_fade = set1(later_fades[i]);
        for (int d = 0; d < value_dim + kLanes; d += kLanes) {
          store(row + d, fma(load(row + d), fade, load(later + d) * later_fade));
        }
      }
    }
  }

  // With a sink, its weight is a part of the mass.
  void finish(float* row, float* out, const float* sink) const {
    f32 total = set1(sum(load(row + value_dim)));
    if (sink) {
      const float top = *highest(row), common = top > *sink ? top : *sink;
      const f32 fade = exp(set1(top - common));
      total = fma(total, fade, exp(set1(*sink - common)));
      for (int d = 0; d < value_dim; d += kLanes) store(row + d, load(row + d) * fade);
    }
    for (int d = 0; d < value_dim; d += kLanes) store(out + d, load(row + d) / total + zero());
  }

 private:
  // Sets the largest score to the larger of both. The weights of each are scaled by e to its distance below that.
  void set_common(float* row, const float* later, float& below, float& later_below) const {
    float top = *highest(row), later_top = later[value_dim + kLanes], common = top > later_top ? top : later_top;
    below = top - common;
    later_below = later_top - common;
    *highest(row) = common;
  }
};

}  // namespace QUIRE_ISA
}  // namespace quire
