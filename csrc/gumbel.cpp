// The noise of an id, and its score (sample.h). quire/kernels/sampling.py is the reference.
#include <algorithm>
#include <cmath>

#include "philox.h"
#include "sample.h"

namespace quire {

Noise noise_of(int64_t seed, int64_t position) {
  const auto key = static_cast<uint64_t>(seed), at = static_cast<uint64_t>(position);
  return {{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)},
          {static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32)}};
}

uint32_t token_word(const Noise& noise, int64_t id) {
  const int64_t block = id / kPhiloxBlock, within = id % kPhiloxBlock;
  uint32_t c[4] = {noise.position[0], noise.position[1],
                   static_cast<uint32_t>(block * kPhiloxLanes + within % kPhiloxLanes), 0};
  uint32_t k0 = noise.key[0], k1 = noise.key[1];
  for (int round = 0; round < kPhiloxRounds; round++) {
    const uint64_t first = uint64_t{c[0]} * kPhiloxMultiplier0, second = uint64_t{c[2]} * kPhiloxMultiplier1;
    c[0] = static_cast<uint32_t>(second >> 32) ^ c[1] ^ k0;
    c[1] = static_cast<uint32_t>(second);
    c[2] = static_cast<uint32_t>(first >> 32) ^ c[3] ^ k1;
    c[3] = static_cast<uint32_t>(first);
    k0 += kPhiloxStep0;
    k1 += kPhiloxStep1;
  }
  return c[within / kPhiloxLanes];
}

float gumbel_score(float scaled, uint32_t word) {
  const float uniform = std::min(static_cast<float>(word) * 0x1p-32f + 0x1p-33f, 1.0f - 0x1p-24f);
  const double exponential = -std::log1p(-static_cast<double>(uniform));
  return scaled + static_cast<float>(-std::log(exponential));
}

float least_to_win(const DrawCall& call, const Winner& winner) {
  return std::nextafterf(call.largest + call.temperature * (winner.score - kMostNoise), -INFINITY);
}

}  // namespace quire
