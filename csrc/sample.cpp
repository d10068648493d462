#include "sample.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "philox.h"

namespace quire {
namespace {

// The initial value. Every score is larger.
constexpr Winner kNoWinner = {-INFINITY, -1};

struct Settings {
  double temperature, top_k, top_p, floor;
};

Settings settings_of(const SampleCall& call, int64_t row) {
  const double* at = call.settings + 4 * row;
  return {at[0], at[1], at[2], at[3]};
}

bool cuts_by_count(const Settings& wanted, int64_t size) {
  return wanted.top_k > 0 && wanted.top_k < static_cast<double>(size);
}

bool is_cut(const Settings& wanted, int64_t size) { return cuts_by_count(wanted, size) || wanted.top_p < 1.0; }

Noise noise_of(int64_t seed, int64_t position) {
  const auto key = static_cast<uint64_t>(seed), at = static_cast<uint64_t>(position);
  return {{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)},
          {static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32)}};
}

// Larger logits first; of equals the lower id.
bool goes_first(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// The distance below the largest logit within which top-p keeps logits. All logits further below together have a
// probability of less than 1 - top-p.
double reach_of(const Settings& wanted, int64_t size) {
  const double spare = std::max(1.0 - wanted.top_p, 1e-300);
  return wanted.temperature * std::log(static_cast<double>(size) / spare) * 1.001 + 1e-6;
}

// A threshold that at least `count` logits reach.
float find_least(const SampleCall& call, const float* logits, float largest, double count) {
  for (double below = 4.0; below < 1e6; below *= 2) {
    const float least = largest - static_cast<float>(below);
    if (static_cast<double>(call.kernels.count_from(logits, call.size, least)) >= count) return least;
  }
  return -INFINITY;
}

// Moves the candidates that top-p keeps to the front, likeliest first. Returns their number.
int64_t keep_mass(const Settings& wanted, float largest, double mass, Candidate* candidates, int64_t count) {
  std::sort(candidates, candidates + count, goes_first);
  double before = 0;
  int64_t kept = 0;
  while (kept < count && before < wanted.top_p * mass) {
    const float scaled = (candidates[kept].logit - largest) / static_cast<float>(wanted.temperature);
    before += std::exp(static_cast<double>(scaled));
    kept++;
  }
  return kept;
}

double mass_of(const Settings& wanted, float largest, const Candidate* candidates, int64_t count) {
  double mass = 0;
  for (int64_t nth = 0; nth < count; nth++)
    mass += std::exp(static_cast<double>((candidates[nth].logit - largest) / static_cast<float>(wanted.temperature)));
  return mass;
}

// Collects the ids that min-p, top-k and top-p keep. Returns their number.
int64_t keep(const SampleCall& call, const float* logits, float largest, float least, const Settings& wanted,
             Candidate* candidates) {
  float from = least;
  const bool by_count = cuts_by_count(wanted, call.size);
  if (by_count) from = std::max(from, find_least(call, logits, largest, wanted.top_k));
  else from = std::max(from, largest - static_cast<float>(reach_of(wanted, call.size)));
  int64_t count = call.kernels.count_from(logits, call.size, from);
  call.kernels.collect_from(logits, call.size, from, candidates);
  const auto most = static_cast<int64_t>(wanted.top_k);
  if (by_count && count > most) {
    std::nth_element(candidates, candidates + most, candidates + count, goes_first);
    count = most;
  }
  if (wanted.top_p >= 1.0) return count;
  const auto temperature = static_cast<float>(wanted.temperature);
  const double mass = by_count ? mass_of(wanted, largest, candidates, count)
                               : call.kernels.sum_exp(logits, call.size, largest, temperature, least);
  return keep_mass(wanted, largest, mass, candidates, count);
}

inline float penalized(const PenaltyCall& call, float value, int32_t count) {
  const float repeated = value > 0.0f ? value / call.repetition : value * call.repetition;
  const int32_t in_answer = count & (call.in_prompt - 1);
  const float taken = call.frequency * static_cast<float>(in_answer) + (in_answer > 0 ? call.presence : 0.0f);
  return (count > 0 ? repeated : value) - taken;
}

}  // namespace

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

bool needs_candidates(const SampleCall& call, int64_t row) {
  const Settings wanted = settings_of(call, row);
  return wanted.temperature > 0 && is_cut(wanted, call.size);
}

void sample_row(const SampleCall& call, int64_t row, Candidate* candidates) {
  const float* logits = call.logits + row * call.stride;
  const Settings wanted = settings_of(call, row);
  call.kernels.find_largest(logits, call.size, call.tokens + row, call.largest + row);
  const float largest = call.largest[row];
  if (wanted.temperature <= 0 || !std::isfinite(largest)) return;

  const auto temperature = static_cast<float>(wanted.temperature);
  const float floor = static_cast<float>(wanted.floor);
  // The smallest logit whose difference to the largest, as float32, is not below the floor.
  float least = largest + floor;
  while (least - largest < floor) least = std::nextafterf(least, INFINITY);
  while (std::isfinite(least) && std::nextafterf(least, -INFINITY) - largest >= floor)
    least = std::nextafterf(least, -INFINITY);
  least = std::max(least, -3.4028235e38f);  // banned tokens are never sampled
  const Noise noise = noise_of(call.seeds[row], call.positions[row]);
  Winner winner = kNoWinner;
  if (!is_cut(wanted, call.size)) {
    const int64_t first = call.tokens[row];
    winner = {gumbel_score(0.0f, token_word(noise, first)), first};
    call.kernels.draw({logits, call.size, largest, temperature, least, noise}, &winner);
    call.tokens[row] = winner.id;
    return;
  }
  const int64_t count = keep(call, logits, largest, least, wanted, candidates);
  for (int64_t nth = 0; nth < count; nth++) {
    const Candidate& each = candidates[nth];
    const float score = gumbel_score((each.logit - largest) / temperature, token_word(noise, each.id));
    if (score > winner.score || (score == winner.score && each.id < winner.id)) winner = {score, each.id};
  }
  call.tokens[row] = winner.id;
}

void penalize_row(const PenaltyCall& call) {
  struct Drafted {
    int64_t token;
    float value;
  };
  std::vector<Drafted> drafted;  // computed before the logits are changed
  for (int64_t nth = 0; nth < call.num_more; nth++) {
    const int64_t token = call.more[nth];
    if (token < 0) continue;
    const auto more = static_cast<int32_t>(std::count(call.more, call.more + call.num_more, token));
    drafted.push_back({token, penalized(call, call.logits[token], call.counts[token] + more)});
  }
  for (int64_t id = 0; id < call.size; id++) call.logits[id] = penalized(call, call.logits[id], call.counts[id]);
  for (const Drafted& each : drafted) call.logits[each.token] = each.value;
}

}  // namespace quire
