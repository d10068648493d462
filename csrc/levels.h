// quire's own int4: finds 16 levels m + d * q that approximate a block of 32 values. pack_dense.cpp calls it for each
// block. It uses vectors of four floats, which every processor has.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "half.h"
#include "panels.h"

namespace quire {

// A scale as it is stored, in float16. Codes are computed with the rounded value.
struct Rounded {
  uint16_t half;
  float value;

  explicit Rounded(float exact) : half(float_to_half(exact)), value(half_to_float(half)) {
    if ((half & 0x7c00) != 0x7c00) return;
    throw std::invalid_argument(
        "a value is infinite, not a number or too large for a float16 scale; keep this matrix in f32 or bf16.");
  }
};

using Quad = float __attribute__((vector_size(16)));
using QuadCodes = int32_t __attribute__((vector_size(16)));

inline float sum(Quad x) { return x[0] + x[1] + (x[2] + x[3]); }

struct Levels {
  Rounded d, m;
  float inverse;

  Levels(float low, float high)
      : d((high - low) / 15.0f), m(low), inverse(d.value > 0 ? 1.0f / d.value : 0.0f) {}

  QuadCodes codes(Quad x) const {
    Quad place = (x - m.value) * inverse;
    place = place > 0.0f ? place : Quad{};
    place = place < 15.0f ? place : Quad{} + 15.0f;
    return __builtin_convertvector(place + 0.5f, QuadCodes);
  }

  // The sum of squared errors.
  float error(const Quad* x) const {
    Quad total{};
    for (int i = 0; i < kBlock / 4; ++i) {
      Quad miss = __builtin_convertvector(codes(x[i]), Quad) * d.value + m.value - x[i];
      total += miss * miss;
    }
    return sum(total);
  }

  // The least-squares levels for the codes that the current levels assign.
  Levels refit(const Quad* x) const {
    Quad q_total{}, qq_total{}, x_total{}, qx_total{};
    for (int i = 0; i < kBlock / 4; ++i) {
      Quad q = __builtin_convertvector(codes(x[i]), Quad);
      q_total += q;
      qq_total += q * q;
      x_total += x[i];
      qx_total += q * x[i];
    }
    float sum_q = sum(q_total), sum_x = sum(x_total);
    float spread = kBlock * sum(qq_total) - sum_q * sum_q;
    float slope = spread > 0 ? (kBlock * sum(qx_total) - sum_q * sum_x) / spread : 0.0f;
    float start = (sum_x - slope * sum_q) / kBlock;
    return Levels(start, start + 15.0f * (slope > 0 ? slope : 0.0f));
  }
};

struct Extremes {
  float low, high;
};

inline Extremes find_extremes(const Quad* x) {
  Quad low = x[0], high = x[0];
  for (int i = 1; i < kBlock / 4; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  for (int j = 1; j < 4; ++j) {
    low[0] = low[j] < low[0] ? low[j] : low[0];
    high[0] = high[j] > high[0] ? high[j] : high[0];
  }
  return {low[0], high[0]};
}

// A range that is a little smaller than that of the values makes the outermost values less accurate and all others more
// accurate. For normally distributed weights the squared error is four fifths of that with the whole range. Finer steps
// do not improve it.
inline Levels best_levels(const Quad* x) {
  const Extremes ends = find_extremes(x);
  Levels best(ends.low, ends.high);
  float error = best.error(x);
  auto keep_better = [&](const Levels& levels) {
    float other = levels.error(x);
    if (other < error) best = levels, error = other;
  };
  const float step = (ends.high - ends.low) / 48.0f;
  for (int i = 1; i < 9; ++i) {
    keep_better(Levels(ends.low + step * static_cast<float>(i / 3), ends.high - step * static_cast<float>(i % 3)));
  }
  for (int i = 0; i < 2; ++i) keep_better(best.refit(x));
  return best;
}

}  // namespace quire
