// The small ops between products: norms, rotary embeddings, activations, sums, and the largest of a row.
// `kernels/reference.py` defines them. Each instruction set compiles this file in its own translation unit.
#pragma once

#include <cmath>

#include "kernels.h"
#include "quantize.inl"
#include "scratch.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

// Calls f(at, lanes) for each vector of [0, size). The last vector may have fewer lanes.
template <class F>
QUIRE_INLINE void over_lanes(int64_t size, F f) {
  int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes) f(at, kLanes);
  if (at < size) f(at, static_cast<int>(size - at));
}

QUIRE_INLINE f32 load_lanes(const float* p, int lanes) { return lanes == kLanes ? load(p) : load_part(p, lanes); }
QUIRE_INLINE void store_lanes(float* p, f32 x, int lanes) {
  if (lanes == kLanes) {
    store(p, x);
  } else {
    store_part(p, x, lanes);
  }
}

// x, or x plus the residual.
QUIRE_INLINE f32 load_sum(const float* x, const float* residual, int lanes) {
  f32 value = load_lanes(x, lanes);
  return residual ? value + load_lanes(residual, lanes) : value;
}

// The mean that is subtracted from each value of a group, and the factor that the difference is multiplied by.
struct Moments {
  f32 mean;
  f32 factor;
};

QUIRE_INLINE Moments find_moments(const float* x, const float* residual, const NormCall& call) {
  f32 total = zero(), squares = zero();
  if (call.centered) {
    over_lanes(call.size, [&](int64_t at, int lanes) {
      total = total + load_sum(x + at, residual ? residual + at : nullptr, lanes);
    });
  }
  const float mean = call.centered ? sum(total) / static_cast<float>(call.size) : 0.0f;
  over_lanes(call.size, [&](int64_t at, int lanes) {
    f32 value = load_sum(x + at, residual ? residual + at : nullptr, lanes);
    if (call.centered) value = select((1u << lanes) - 1, value - set1(mean), zero());
    squares = fma(value, value, squares);
  });
  return {set1(mean), set1(1.0f / std::sqrt(sum(squares) / static_cast<float>(call.size) + call.eps))};
}

// The pointers of one group of one row.
struct NormGroup {
  const float* x;
  const float* residual;
  float* sum;
  float* y;

  static NormGroup of(const NormCall& call, int64_t row, int64_t group) {
    const int64_t at = group * call.size;
    return {call.x + row * call.x_stride + at,
            call.residual ? call.residual + row * call.residual_stride + at : nullptr,
            call.residual ? call.sum + row * call.sum_stride + at : nullptr,
            call.y ? call.y + row * call.y_stride + at : nullptr};
  }

  // Normalizes the lanes at `at`, and stores the sum if there is a residual.
  f32 apply(int64_t at, int lanes, const Moments& moments, const NormCall& call) const {
    f32 value = load_sum(x + at, residual ? residual + at : nullptr, lanes);
    if (sum) store_lanes(sum + at, value, lanes);
    if (call.centered) value = value - moments.mean;
    f32 normed = value * moments.factor * load_lanes(call.weight + at, lanes);
    if (call.bias) normed = normed + load_lanes(call.bias + at, lanes);
    if (y) store_lanes(y + at, normed, lanes);
    return normed;
  }
};

static void norm_plain(const NormCall& call, Worker& worker) {
  const Span span = part_of(share_rows(worker, call.rows, kRowGrain, call.groups), call.rank, call.ranks);
  for (int64_t at = span.first; at < span.last; at++) {
    const NormGroup group = NormGroup::of(call, at / call.groups, at % call.groups);
    const Moments moments = find_moments(group.x, group.residual, call);
    over_lanes(call.size, [&](int64_t lane, int lanes) { group.apply(lane, lanes, moments, call); });
  }
}

// Normalizes and quantizes blocks [first, last) of one tile.
QUIRE_INLINE void norm_tile(const NormCall& call, const Tile& tile, int64_t first, int64_t last) {
  for (int64_t r = 0; r < tile.rows; r++) {
    const NormGroup group = NormGroup::of(call, tile.first + r, 0);
    const Moments moments = find_moments(group.x, group.residual, call);
    for (int64_t block = first; block < last; block++) {
      f32 low = group.apply(block * kBlock, kLanes, moments, call);
      f32 high = group.apply(block * kBlock + kLanes, kLanes, moments, call);
      quantize_block(low, high, record_of(call.quantized, tile, block), tile.size, r);
    }
  }
  for (int64_t r = tile.rows; r < tile.size; r++) {
    for (int64_t block = first; block < last; block++)
      clear_row(record_of(call.quantized, tile, block), tile.size, r);
  }
}

// Workers that share a tile each compute the moments of all its rows. That is cheaper than writing to the same cache
// lines.
static void norm(const NormCall& call, Worker& worker) {
  if (!call.quantized.data) return norm_plain(call, worker);
  over_records(
      call.quantized, call.rows, worker,
      [&](const Tile& tile, Span blocks) { norm_tile(call, tile, blocks.first, blocks.last); }, call.rank, call.ranks);
}

// Expands the cosines and sines of one position to the lanes of a head: y = x * cosines + partner(x) * sines.
QUIRE_INLINE void spread_table(const float* row, int64_t dim, bool interleaved, float* cosines, float* sines) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i++) {
    const int64_t a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + half;
    cosines[a] = cosines[b] = row[i];
    sines[a] = -row[half + i];
    sines[b] = row[half + i];
  }
}

QUIRE_INLINE void turn_head(float* x, int64_t dim, bool interleaved, const float* cosines, const float* sines,
                            float* partner) {
  const int64_t half = dim / 2;
  if (interleaved) {
    for (int64_t i = 0; i < dim; i += 2) {
      partner[i] = x[i + 1];
      partner[i + 1] = x[i];
    }
  } else {
    std::memcpy(partner, x + half, static_cast<size_t>(half) * 4);
    std::memcpy(partner + half, x, static_cast<size_t>(half) * 4);
  }
  over_lanes(dim, [&](int64_t at, int lanes) {
    f32 straight = load_lanes(x + at, lanes) * load_lanes(cosines + at, lanes);
    store_lanes(x + at, fma(load_lanes(partner + at, lanes), load_lanes(sines + at, lanes), straight), lanes);
  });
}

static void rope(const RopeCall& call, Worker& worker) {
  const Span rows = share_rows(worker, call.rows, kRowGrain);
  float* cosines = reinterpret_cast<float*>(scratch(static_cast<size_t>(round_up(call.dim, kLanes)) * 12));
  float* sines = cosines + round_up(call.dim, kLanes);
  float* partner = sines + round_up(call.dim, kLanes);
  for (int64_t row = rows.first; row < rows.last; row++) {
    spread_table(call.table + call.positions[row] * call.dim, call.dim, call.interleaved, cosines, sines);
    for (int64_t head = 0; head < call.heads; head++)
      turn_head(call.x + row * call.stride + head * call.head_dim, call.dim, call.interleaved, cosines, sines, partner);
  }
}

static void activate_rows(const ActivateCall& call, Worker& worker) {
  const Span rows = share_rows(worker, call.rows, kRowGrain);
  for (int64_t row = rows.first; row < rows.last; row++) {
    const float* x = call.x + row * call.x_stride;
    float* y = call.y + row * call.y_stride;
    over_lanes(call.size, [&](int64_t at, int lanes) {
      f32 value = activate(load_lanes(x + at, lanes), call.activation);
      store_lanes(y + at, call.gated ? value * load_lanes(x + call.size + at, lanes) : value, lanes);
    });
  }
}

static void add_rows(const AddCall& call, Worker& worker) {
  const Span rows = share_rows(worker, call.rows, kRowGrain);
  const f32 factor = set1(call.factor);
  for (int64_t row = rows.first; row < rows.last; row++) {
    const float* a = call.a + row * call.a_stride;
    const float* b = call.b + row * call.b_stride;
    float* y = call.y + row * call.y_stride;
    over_lanes(call.size, [&](int64_t at, int lanes) {
      const f32 first = load_lanes(a + at, lanes), second = load_lanes(b + at, lanes);
      store_lanes(y + at, call.multiplies ? first * second : (first + second) * factor, lanes);
    });
  }
}

static void find_largest(const float* x, int64_t cols, int64_t* index, float* value) {
  f32 best = set1(-INFINITY);
  bool numbers = true;
  over_lanes(cols, [&](int64_t at, int lanes) {
    f32 here = lanes == kLanes ? load(x + at) : select((1u << lanes) - 1, load_part(x + at, lanes), best);
    numbers = numbers && same(here, here) == 0xffff;
    best = max(best, here);
  });
  *value = numbers ? largest(best) : NAN;
  for (int64_t at = 0; at < cols; at += kLanes) {
    const int lanes = cols - at < kLanes ? static_cast<int>(cols - at) : kLanes;
    f32 here = load_lanes(x + at, lanes);
    const uint32_t found = (numbers ? same(here, set1(*value)) : ~same(here, here)) & ((1u << lanes) - 1);
    if (found) {
      *index = at + __builtin_ctz(found);
      return;
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
