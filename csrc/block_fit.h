// Searches for the scales of a few values that share them. The errors are weighted sums of squares. quantize_blocks.cpp
// builds the blocks of GGUF files from these searches.
//
// Everything is computed in the same lanes and without fused operations, so the bits are the same on every processor.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace quire {
namespace fit {

typedef float Lanes __attribute__((vector_size(16)));

constexpr int kWidth = 4;
constexpr float kTiny = 1e-30f;

inline Lanes spread(float value) { return Lanes{} + value; }
inline Lanes smaller(Lanes a, Lanes b) { return a < b ? a : b; }
inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

// To the nearest whole number, ties to even, for magnitudes below 2^22.
inline Lanes round_lanes(Lanes x) {
  const Lanes shift = spread(12582912.0f);
  return (x + shift) - shift;
}

inline double add_up(Lanes x) {
  return (static_cast<double>(x[0]) + static_cast<double>(x[1])) +
         (static_cast<double>(x[2]) + static_cast<double>(x[3]));
}

// N values, their weights and their codes. Codes are whole numbers in floats.
template <int N>
struct Run {
  static constexpr int parts = N / kWidth;
  Lanes x[parts], w[parts], q[parts];
};

// value = scale * code + base, with codes from `low` to `high`.
struct Grid {
  float scale, base;
};

struct Limits {
  float low, high;
};

template <int N>
void assign(Run<N>& run, float inverse, float base, Limits limits) {
  for (int i = 0; i < run.parts; i++) {
    const Lanes code = round_lanes((run.x[i] - spread(base)) * spread(inverse));
    run.q[i] = smaller(larger(code, spread(limits.low)), spread(limits.high));
  }
}

inline float inverse_of(float scale) { return std::fabs(scale) > kTiny ? 1.0f / scale : 0.0f; }

// Assigns the nearest codes and returns the error.
template <int N>
double assign_error(Run<N>& run, Grid grid, Limits limits) {
  assign(run, inverse_of(grid.scale), grid.base, limits);
  Lanes sum{};
  for (int i = 0; i < run.parts; i++) {
    const Lanes off = run.x[i] - (spread(grid.scale) * run.q[i] + spread(grid.base));
    sum += run.w[i] * off * off;
  }
  return add_up(sum);
}

// Sums over a run, for least squares with the codes as they are.
struct Sums {
  double w, x, q, qq, xq;
};

template <int N>
Sums sums_of(const Run<N>& run) {
  Lanes w{}, x{}, q{}, qq{}, xq{};
  for (int i = 0; i < run.parts; i++) {
    const Lanes wq = run.w[i] * run.q[i];
    w += run.w[i];
    x += run.w[i] * run.x[i];
    q += wq;
    qq += wq * run.q[i];
    xq += wq * run.x[i];
  }
  return {add_up(w), add_up(x), add_up(q), add_up(qq), add_up(xq)};
}

struct Found {
  Grid grid;
  double gain;  // what the grid takes from the sum of w x^2
};

inline Found best_scale(const Sums& sums) {
  if (sums.qq <= 0) return {{0, 0}, 0};
  const double scale = sums.xq / sums.qq;
  return {{static_cast<float>(scale), 0}, scale * sums.xq};
}

// With `negative`, the base is at most 0.
inline Found best_affine(const Sums& sums, bool negative) {
  const double determinant = sums.w * sums.qq - sums.q * sums.q;
  if (determinant <= 0) return best_scale(sums);
  const double scale = (sums.w * sums.xq - sums.x * sums.q) / determinant;
  const double base = (sums.qq * sums.x - sums.q * sums.xq) / determinant;
  if (negative && base > 0) return best_scale(sums);
  return {{static_cast<float>(scale), static_cast<float>(base)}, scale * sums.xq + base * sums.x};
}

constexpr int kRefinements = 3;

// Repeats: the nearest codes of the grid, then the best grid of the codes.
template <int N, class Best>
Found refine(Run<N>& run, Found found, Limits limits, Best best) {
  for (int i = 0; i < kRefinements; i++) {
    assign(run, inverse_of(found.grid.scale), found.grid.base, limits);
    const Found next = best(sums_of(run));
    if (next.gain <= found.gain) break;
    found = next;
  }
  return found;
}

template <int N>
Limits range_of(const Run<N>& run) {
  Limits range = {run.x[0][0], run.x[0][0]};
  for (int i = 0; i < run.parts; i++) {
    for (int lane = 0; lane < kWidth; lane++) {
      range.low = std::min(range.low, run.x[i][lane]);
      range.high = std::max(range.high, run.x[i][lane]);
    }
  }
  return range;
}

// value = scale * code. The value of the largest magnitude is tried at both ends of the codes and beyond them.
template <int N>
float fit_scale(Run<N>& run, Limits limits) {
  const Limits range = range_of(run);
  const float most = -range.low > range.high ? range.low : range.high;
  Found found = {{0, 0}, 0};
  if (std::fabs(most) < kTiny) return 0;
  for (float end : {limits.low, limits.high}) {
    if (end == 0) continue;
    for (int step = -9; step <= 9; step++) {
      assign(run, (end + 0.1f * static_cast<float>(step)) / most, 0.0f, limits);
      const Found next = best_scale(sums_of(run));
      if (next.gain > found.gain) found = next;
    }
  }
  return refine(run, found, limits, best_scale).grid.scale;
}

// value = scale * code + base, with codes from 0 to `top`. With `negative`, the base is at most 0.
template <int N>
Grid fit_affine(Run<N>& run, float top, bool negative) {
  Limits range = range_of(run);
  if (negative) range.low = std::min(range.low, 0.0f);
  const float width = range.high - range.low;
  if (!(width > kTiny)) return {0, range.low};
  const Limits limits = {0, top};
  const auto best = [=](const Sums& sums) { return best_affine(sums, negative); };
  Found found = {{0, range.low}, -1e300};
  for (int step = -10; step <= 10; step++) {
    assign(run, (top + 0.1f * static_cast<float>(step)) / width, range.low, limits);
    const Found next = best(sums_of(run));
    if (next.gain > found.gain) found = next;
  }
  return refine(run, found, limits, best).grid;
}

}  // namespace fit
}  // namespace quire
