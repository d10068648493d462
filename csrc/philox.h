// Philox4x32-10, as in quire/kernels/philox.py.
#pragma once

#include <cstdint>

namespace quire {

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53, kPhiloxMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxStep0 = 0x9E3779B9, kPhiloxStep1 = 0xBB67AE85;
constexpr int kPhiloxRounds = 10;
constexpr int kPhiloxLanes = 16;                      // consecutive ids that use the same word
constexpr int64_t kPhiloxBlock = 4 * kPhiloxLanes;    // ids that share kPhiloxLanes counters

}  // namespace quire
