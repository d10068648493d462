// The sampling functions that process whole rows (SampleKernels in sample.h).
#pragma once

#include <cmath>

#include "philox.h"
#include "sample.h"

namespace quire {
namespace QUIRE_ISA {

QUIRE_INLINE uint32_t lanes_from(const float* x, int lanes, f32 least) {
  return not_less(load_lanes(x, lanes), least) & ((1u << lanes) - 1);
}

static int64_t count_from(const float* x, int64_t size, float least) {
  int64_t count = 0;
  over_lanes(size, [&](int64_t at, int lanes) { count += __builtin_popcount(lanes_from(x + at, lanes, set1(least))); });
  return count;
}

static int64_t count_same(const float* x, int64_t size, float value) {
  int64_t count = 0;
  over_lanes(size, [&](int64_t at, int lanes) {
    count += __builtin_popcount(same(load_lanes(x + at, lanes), set1(value)) & ((1u << lanes) - 1));
  });
  return count;
}

static int64_t collect_from(const float* x, int64_t size, float least, int64_t limit, Candidate* out) {
  int64_t count = 0;
  for (int64_t at = 0; at < size && count <= limit; at += kLanes) {
    const int lanes = size - at < kLanes ? static_cast<int>(size - at) : kLanes;
    const uint32_t bits = lanes_from(x + at, lanes, set1(least));
    if (bits) count += store_pairs(out + count, bits, load_lanes(x + at, lanes), iota_i32(static_cast<int32_t>(at)));
  }
  return count;
}

// What a difference of logits is multiplied by to become a binary logarithm of a probability.
QUIRE_INLINE float log2_factor(float temperature) {
  const float factor = 1.44269504f / temperature;
  return factor < 1e30f ? factor : 1e30f;
}

// The lanes after the last are minus infinity.
QUIRE_INLINE f32 load_logits(const float* x, int lanes) {
  return lanes == kLanes ? load(x) : select((1u << lanes) - 1, load_part(x, lanes), set1(-INFINITY));
}

constexpr int64_t kPiece = 4096;  // a piece is summed in float32, pieces are added in float64

static double sum_exp(const float* x, int64_t size, float largest, float temperature, float least) {
  double total = 0;
  for (int64_t first = 0; first < size; first += kPiece) {
    f32 piece = zero();
    over_lanes(size - first < kPiece ? size - first : kPiece, [&](int64_t at, int lanes) {
      f32 logits = load_logits(x + first + at, lanes);
      f32 weight = exp_of_negative((logits - set1(largest)) / set1(temperature));
      piece = piece + zero_if_less(logits, set1(least), weight);
    });
    total += sum(piece);
  }
  return total;
}

// 2^x for x <= 0, with a relative error below 3e-6. Results below the smallest normal number are that number.
QUIRE_INLINE f32 rough_exp2(f32 x) {
  f32 bounded = max(x, set1(-126.0f));
  f32 n = round(bounded);
  f32 f = bounded - n;
  f32 p = fma(set1(0.0095701013f), f, set1(0.055917863f));
  p = fma(p, f, set1(0.24024744f));
  p = fma(p, f, set1(0.69312179f));
  return scale_by_power(fma(p, f, set1(0.99999928f)), n);
}

static ExpSums rough_sums(const float* x, int64_t size, float largest, float temperature, float least, float from) {
  const f32 factor = set1(log2_factor(temperature));
  ExpSums total = {0, 0};
  for (int64_t first = 0; first < size; first += kPiece) {
    f32 all = zero(), some = zero();
    over_lanes(size - first < kPiece ? size - first : kPiece, [&](int64_t at, int lanes) {
      f32 logits = load_logits(x + first + at, lanes);
      f32 weight = rough_exp2((logits - set1(largest)) * factor);
      all = all + zero_if_less(logits, set1(least), weight);
      some = some + zero_if_less(logits, set1(from), weight);
    });
    total.all += sum(all);
    total.some += sum(some);
  }
  return total;
}

struct Words {
  i32 words[4];
};

// The keys of the rounds, and what the first two rounds compute from the position and the keys alone.
struct Philox {
  i32 keys[kPhiloxRounds][2];
  i32 c1, c2, c3;  // after round 0
  i32 c0, low;     // of round 1, from c2: c0 without the low half that round 0 computes, and c1

  explicit Philox(const Noise& noise) {
    uint32_t k0 = noise.key[0], k1 = noise.key[1];
    for (int round = 0; round < kPhiloxRounds; round++, k0 += kPhiloxStep0, k1 += kPhiloxStep1) {
      keys[round][0] = set1_i32(static_cast<int32_t>(k0));
      keys[round][1] = set1_i32(static_cast<int32_t>(k1));
    }
    const Wide first = multiply_wide(set1_i32(static_cast<int32_t>(noise.position[0])), kPhiloxMultiplier0);
    c1 = exclusive_or(set1_i32(static_cast<int32_t>(noise.position[1])), keys[0][0]);
    c2 = exclusive_or(first.high, keys[0][1]);
    c3 = exclusive_or(first.low, keys[1][1]);
    const Wide second = multiply_wide(c2, kPhiloxMultiplier1);
    c0 = exclusive_or(second.high, keys[1][0]);
    low = second.low;
  }

  // The random words of 16 counters.
  __attribute__((always_inline)) Words words(i32 counters) const {
    const Wide start = multiply_wide(counters, kPhiloxMultiplier1);
    const Wide next = multiply_wide(exclusive_or(start.high, c1), kPhiloxMultiplier0);
    i32 w0 = exclusive_or(c0, start.low), w1 = low, w2 = exclusive_or(next.high, c3), w3 = next.low;
    for (int round = 2; round < kPhiloxRounds; round++) {
      const Wide first = multiply_wide(w0, kPhiloxMultiplier0), second = multiply_wide(w2, kPhiloxMultiplier1);
      w0 = exclusive_or(exclusive_or(second.high, w1), keys[round][0]);
      w1 = second.low;
      w2 = exclusive_or(exclusive_or(first.high, w3), keys[round][1]);
      w3 = first.low;
    }
    return {{w0, w1, w2, w3}};
  }
};

// What is computed once for each winner.
struct Bounds {
  f32 factor, shift;  // log2(exp(scaled - winner's score)) = (logit - largest) * factor + shift
  f32 least;          // a lower logit cannot win

  static Bounds of(const DrawCall& call, const Winner& winner) {
    constexpr float kLog2e = 1.44269504f, kSlack = 1e-3f;  // of the rounding of the product
    const float least = least_to_win(call, winner);
    return {set1(log2_factor(call.temperature)), set1(0.5f + kSlack - winner.score * kLog2e),
            set1(least > call.least ? least : call.least)};
  }
};

// An id can only win if its exponential number, -log(1 - uniform), is below exp(scaled - best score). The uniform
// number is below the exponential one, and the next power of 2 is above the exponential function. These are compared
// first, and the logarithm is computed for few ids only. `id_of` returns the id of a lane.
template <class F>
QUIRE_INLINE void draw_lanes(const DrawCall& call, f32 logits, i32 words, F id_of, Bounds* bounds, Winner* winner) {
  f32 power = round(fma(logits - set1(call.largest), bounds->factor, bounds->shift));
  f32 bound = scale_by_power(set1(0x1p32f), max(power, set1(-40.0f)));
  uint32_t bits = not_less(bound, to_float_unsigned(words) + set1(0.5f));
  if (!bits) return;
  bits &= not_less(logits, set1(call.least));
  uint32_t its[kLanes];
  float values[kLanes];
  store_bytes(reinterpret_cast<uint8_t*>(its), words);
  store(values, logits);
  for (; bits; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    const int64_t id = id_of(lane);
    if (values[lane] == call.least && id >= call.end) continue;
    const float score = gumbel_score((values[lane] - call.largest) / call.temperature, its[lane]);
    if (score < winner->score || (score == winner->score && id >= winner->id)) continue;
    *winner = {score, id};
    *bounds = Bounds::of(call, *winner);
  }
}

static void draw(const DrawCall& call, Winner* winner) {
  static_assert(kLanes == kPhiloxLanes, "a vector takes the same word of as many counters");
  const Philox philox(call.noise);
  Bounds bounds = Bounds::of(call, *winner);
  for (int64_t first = 0; first < call.size; first += kPhiloxBlock) {
    const int64_t count = call.size - first < kPhiloxBlock ? call.size - first : kPhiloxBlock;
    f32 most = set1(-INFINITY);
    over_lanes(count, [&](int64_t at, int lanes) { most = max(most, load_logits(call.logits + first + at, lanes)); });
    if (!not_less(most, bounds.least)) continue;
    const Words block = philox.words(iota_i32(static_cast<int32_t>(first / kPhiloxBlock * kPhiloxLanes)));
    over_lanes(count, [&](int64_t at, int lanes) {
      f32 logits = load_logits(call.logits + first + at, lanes);
      draw_lanes(call, logits, block.words[at / kLanes], [=](int lane) { return first + at + lane; }, &bounds, winner);
    });
  }
}

static void draw_candidates(const DrawCall& call, const Candidate* candidates, int64_t count, Winner* winner) {
  const Philox philox(call.noise);
  Bounds bounds = Bounds::of(call, *winner);
  for (int64_t first = 0; first < count; first += kLanes) {
    const int lanes = count - first < kLanes ? static_cast<int>(count - first) : kLanes;
    const Candidate* some = candidates + first;
    uint32_t counters[kLanes] = {}, its[kLanes] = {}, words[4][kLanes];
    float logits[kLanes];
    for (int lane = 0; lane < kLanes; lane++) {
      const Candidate each = some[lane < lanes ? lane : 0];
      counters[lane] = static_cast<uint32_t>(each.id / kPhiloxBlock * kPhiloxLanes + each.id % kPhiloxLanes);
      logits[lane] = lane < lanes ? each.logit : -INFINITY;
    }
    const Words block = philox.words(load_bytes(reinterpret_cast<const uint8_t*>(counters)));
    for (int word = 0; word < 4; word++) store_bytes(reinterpret_cast<uint8_t*>(words[word]), block.words[word]);
    for (int lane = 0; lane < lanes; lane++) its[lane] = words[some[lane].id % kPhiloxBlock / kPhiloxLanes][lane];
    draw_lanes(call, load(logits), load_bytes(reinterpret_cast<const uint8_t*>(its)),
               [=](int lane) { return int64_t{some[lane].id}; }, &bounds, winner);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
