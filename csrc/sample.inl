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

static void collect_from(const float* x, int64_t size, float least, Candidate* out) {
  over_lanes(size, [&](int64_t at, int lanes) {
    for (uint32_t bits = lanes_from(x + at, lanes, set1(least)); bits; bits &= bits - 1) {
      const int64_t id = at + __builtin_ctz(bits);
      *out++ = {x[id], static_cast<int32_t>(id)};
    }
  });
}

static double sum_exp(const float* x, int64_t size, float largest, float temperature, float least) {
  constexpr int64_t kPiece = 4096;  // a piece is summed in float32, pieces are added in float64
  double total = 0;
  for (int64_t first = 0; first < size; first += kPiece) {
    f32 piece = zero();
    over_lanes(size - first < kPiece ? size - first : kPiece, [&](int64_t at, int lanes) {
      const float* here = x + first + at;
      f32 weight = exp_of_negative((load_lanes(here, lanes) - set1(largest)) / set1(temperature));
      piece = piece + select(lanes_from(here, lanes, set1(least)), weight, zero());
    });
    total += sum(piece);
  }
  return total;
}

struct Words {
  i32 words[4];
};

// The random words of kPhiloxBlock ids. Ids that use word w are consecutive.
QUIRE_INLINE Words philox_block(const Noise& noise, int64_t block) {
  i32 c0 = set1_i32(static_cast<int32_t>(noise.position[0])), c1 = set1_i32(static_cast<int32_t>(noise.position[1]));
  i32 c2 = iota_i32(static_cast<int32_t>(block * kPhiloxLanes)), c3 = zero_i32();
  uint32_t k0 = noise.key[0], k1 = noise.key[1];
  for (int round = 0; round < kPhiloxRounds; round++) {
    const Wide first = multiply_wide(c0, kPhiloxMultiplier0), second = multiply_wide(c2, kPhiloxMultiplier1);
    c0 = exclusive_or(exclusive_or(second.high, c1), set1_i32(static_cast<int32_t>(k0)));
    c1 = second.low;
    c2 = exclusive_or(exclusive_or(first.high, c3), set1_i32(static_cast<int32_t>(k1)));
    c3 = first.low;
    k0 += kPhiloxStep0;
    k1 += kPhiloxStep1;
  }
  return {{c0, c1, c2, c3}};
}

constexpr float kMostNoise = 22.88f;  // at the smallest uniform number, 2^-33

// An id can only win if its exponential number, -log(1 - uniform), is below exp(scaled - best score). The uniform
// number is below the exponential one. So it is compared first, and the logarithm is computed for few ids only.
QUIRE_INLINE void draw_lanes(const DrawCall& call, int64_t at, int lanes, i32 words, Winner* winner) {
  f32 logits = load_lanes(call.logits + at, lanes);
  f32 scaled = (logits - set1(call.largest)) / set1(call.temperature);
  f32 uniform = fma(to_float_unsigned(words), set1(0x1p-32f), set1(0x1p-33f));
  f32 bound = exp(scaled - set1(winner->score)) * set1(1.0001f);
  uint32_t bits = not_less(bound, uniform) & not_less(logits, set1(call.least)) & ((1u << lanes) - 1);
  if (!bits) return;
  uint32_t its[kLanes];
  float values[kLanes];
  store_bytes(reinterpret_cast<uint8_t*>(its), words);
  store(values, scaled);
  for (; bits; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    const float score = gumbel_score(values[lane], its[lane]);
    if (score > winner->score || (score == winner->score && at + lane < winner->id)) *winner = {score, at + lane};
  }
}

static void draw(const DrawCall& call, Winner* winner) {
  static_assert(kLanes == kPhiloxLanes, "a vector takes the same word of as many counters");
  for (int64_t first = 0; first < call.size; first += kPhiloxBlock) {
    const int64_t count = call.size - first < kPhiloxBlock ? call.size - first : kPhiloxBlock;
    f32 most = set1(-INFINITY);
    over_lanes(count, [&](int64_t at, int lanes) {
      most = max(most, lanes == kLanes ? load(call.logits + first + at)
                                       : select((1u << lanes) - 1, load_part(call.logits + first + at, lanes), most));
    });
    if ((largest(most) - call.largest) / call.temperature + kMostNoise < winner->score) continue;
    const Words block = philox_block(call.noise, first / kPhiloxBlock);
    for (int word = 0; word < 4 && word * kLanes < count; word++) {
      const int64_t at = word * kLanes;
      draw_lanes(call, first + at, count - at < kLanes ? static_cast<int>(count - at) : kLanes, block.words[word], winner);
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
