#include "sample.h"

#include <algorithm>
#include <cmath>

#include "scratch.h"

namespace quire {
namespace {

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

double weight_of(float logit, float largest, float temperature) {
  return std::exp(static_cast<double>((logit - largest) / temperature));
}

// The number of candidates that top-p keeps. They are sorted.
int64_t keep_mass(const Settings& wanted, float largest, double mass, const Candidate* candidates, int64_t count) {
  double before = 0;
  int64_t kept = 0;
  while (kept < count && before < wanted.top_p * mass) {
    before += weight_of(candidates[kept].logit, largest, static_cast<float>(wanted.temperature));
    kept++;
  }
  return kept;
}

double mass_of(const Settings& wanted, float largest, const Candidate* candidates, int64_t count) {
  double mass = 0;
  for (int64_t nth = 0; nth < count; nth++)
    mass += weight_of(candidates[nth].logit, largest, static_cast<float>(wanted.temperature));
  return mass;
}

// The largest logit of a row, the id that has it, and the smallest logit that min-p keeps.
struct Range {
  int64_t first;
  float largest, least;
};

// The smallest logit whose difference to the largest, as float32, is not below min-p's floor.
float find_floor(float largest, float floor) {
  float least = largest + floor;
  while (least - largest < floor) least = std::nextafterf(least, INFINITY);
  while (std::isfinite(least) && std::nextafterf(least, -INFINITY) - largest >= floor)
    least = std::nextafterf(least, -INFINITY);
  return std::max(least, -3.4028235e38f);  // banned tokens are never sampled
}

// Collects the ids that min-p, top-k and top-p keep. Returns their number.
int64_t keep(const SampleCall& call, const float* logits, const Range& range, const Settings& wanted,
             Candidate* candidates) {
  const bool by_count = cuts_by_count(wanted, call.size);
  const auto most = static_cast<int64_t>(wanted.top_k);
  const float from = by_count ? find_least(call.kernels, logits, call.size, range.largest, most)
                              : range.largest - static_cast<float>(reach_of(wanted, call.size));
  int64_t count = call.kernels.collect_from(logits, call.size, std::max(from, range.least), call.size, candidates);
  if (by_count && count > most) {
    std::nth_element(candidates, candidates + most, candidates + count, goes_first);
    count = most;
  }
  if (wanted.top_p >= 1.0) return count;
  std::sort(candidates, candidates + count, goes_first);
  const auto temperature = static_cast<float>(wanted.temperature);
  const double mass =
      by_count ? mass_of(wanted, range.largest, candidates, count)
               : call.kernels.sum_exp(logits, call.size, range.largest, temperature, range.least);
  return keep_mass(wanted, range.largest, mass, candidates, count);
}

struct Memory {
  Candidate* candidates;  // [size + 16]
  float* logits;          // [size + 16]
};

Memory take_memory(int64_t size) {
  const auto count = static_cast<size_t>(size + 16);
  auto* candidates = reinterpret_cast<Candidate*>(scratch(count * (sizeof(Candidate) + sizeof(float))));
  return {candidates, reinterpret_cast<float*>(candidates + count)};
}

// If at most one in this many ids is drawn from, they are collected. Otherwise functions process whole rows.
constexpr int64_t kFew = 8;

// The number of logits that reach a threshold, estimated from some of them.
int64_t estimate_from(const SampleKernels& kernels, const DrawCall& draw, float least) {
  constexpr int64_t kSpans = 16, kSpan = 256;
  if (draw.size <= kSpans * kSpan) return kernels.count_from(draw.logits, draw.size, least);
  int64_t count = 0;
  for (int64_t nth = 0; nth < kSpans; nth++)
    count += kernels.count_from(draw.logits + draw.size / kSpans * nth, kSpan, least);
  return count * draw.size / (kSpans * kSpan);
}

// Draws from the ids of a DrawCall, or from fewer of them.
class Drawing {
 public:
  Drawing(const SampleKernels& kernels, const DrawCall& draw, int64_t first, const Memory& memory)
      : kernels_(kernels), memory_(memory), first_{gumbel_score(0.0f, token_word(draw.noise, first)), first} {
    const int64_t limit = draw.size / kFew;
    const float from = std::max(draw.least, least_to_win(draw, first_));
    is_whole_ = estimate_from(kernels, draw, from) > limit + limit / 4;
    if (is_whole_) return;
    count_ = kernels.collect_from(draw.logits, draw.size, from, limit, memory.candidates);
    is_whole_ = count_ > limit;
  }

  int64_t find_winner(const DrawCall& draw) const {
    Winner winner = first_;
    if (is_whole_) kernels_.draw(draw, &winner);
    else kernels_.draw_candidates(draw, memory_.candidates, count_, &winner);
    return winner.id;
  }

  // The sum of exp((logit - largest) / temperature) over the ids that are likelier than one that was drawn.
  double sum_likelier(const DrawCall& draw, int64_t id) const {
    const float logit = draw.logits[id], next = std::nextafterf(logit, INFINITY);
    const double weight = weight_of(logit, draw.largest, draw.temperature);
    if (is_whole_) {
      const auto ties = static_cast<double>(kernels_.count_same(draw.logits, id, logit));
      return sum_from(draw, draw.logits, draw.size, next) + ties * weight;
    }
    int64_t ties = 0;
    for (int64_t nth = 0; nth < count_; nth++) {
      const Candidate& each = memory_.candidates[nth];
      memory_.logits[nth] = each.logit;
      ties += each.logit == logit && each.id < id;
    }
    return sum_from(draw, memory_.logits, count_, next) + static_cast<double>(ties) * weight;
  }

 private:
  double sum_from(const DrawCall& draw, const float* logits, int64_t size, float from) const {
    return kernels_.rough_sums(logits, size, draw.largest, draw.temperature, from, from).all;
  }

  const SampleKernels& kernels_;
  const Memory& memory_;
  Winner first_;  // the likeliest id
  int64_t count_ = 0;
  bool is_whole_;
};

// A threshold, not below draw.least, that few logits reach.
float find_few(const SampleKernels& kernels, const DrawCall& draw) {
  const int64_t most = draw.size / kFew * 3 / 4;
  if (estimate_from(kernels, draw, draw.least) <= most) return draw.least;
  float low = draw.least, high = draw.largest;
  for (int round = 0; round < 6; round++) {
    const float middle = low + (high - low) / 2;
    if (estimate_from(kernels, draw, middle) <= most) high = middle;
    else low = middle;
  }
  return high;
}

int64_t draw_from_kept(const SampleCall& call, const DrawCall& draw, const Range& range, const Settings& wanted,
                       Candidate* candidates) {
  const int64_t count = keep(call, draw.logits, range, wanted, candidates);
  Winner winner = {gumbel_score(0.0f, token_word(draw.noise, range.first)), range.first};
  call.kernels.draw_candidates(draw, candidates, count, &winner);
  return winner.id;
}

// Draws from a set that contains the ids that top-p keeps. If the winner is kept, it is the winner of these too. If
// not, the set is reduced to the ids that are likelier than it. So ids are not sorted, and few sets are drawn from. A
// set of few ids is large enough if its probability is above top-p. If it is below, top-p keeps all of them.
int64_t draw_top_p(const SampleCall& call, DrawCall draw, const Range& range, const Settings& wanted,
                   const Memory& memory) {
  const DrawCall all = draw;
  draw.least = std::max(range.least, range.largest - static_cast<float>(reach_of(wanted, call.size)));
  const float few = find_few(call.kernels, draw);
  const ExpSums sums =
      call.kernels.rough_sums(draw.logits, call.size, range.largest, draw.temperature, range.least, few);
  const double limit = wanted.top_p * sums.all, error = 2 * kRoughError * sums.all;
  if (sums.some > limit + error) draw.least = few;
  const bool keeps_few = sums.some < limit - error;
  const Drawing drawing(call.kernels, draw, range.first, memory);
  for (;;) {
    const int64_t winner = drawing.find_winner(draw);
    if (winner == range.first || (keeps_few && draw.logits[winner] >= few)) return winner;
    const double before = drawing.sum_likelier(draw, winner);
    if (before < limit - error) return winner;
    if (before < limit + error) return draw_from_kept(call, all, range, wanted, memory.candidates);
    draw.least = draw.logits[winner];
    draw.end = winner;
  }
}

}  // namespace

float find_least(const SampleKernels& kernels, const float* logits, int64_t size, float largest, int64_t count) {
  float above = largest, least = -INFINITY;  // fewer than `count` logits reach `above`, unless it is the largest
  int64_t found = size;
  for (double below = 4.0; below < 1e6 && least == -INFINITY; below *= 2) {
    const float next = largest - static_cast<float>(below);
    found = kernels.count_from(logits, size, next);
    if (found >= count) least = next;
    else above = next;
  }
  for (int round = 0; round < 8 && least > -INFINITY && found > 4 * count + 64; round++) {
    const float middle = least + (above - least) / 2;
    const int64_t reached = kernels.count_from(logits, size, middle);
    if (reached >= count) least = middle, found = reached;
    else above = middle;
  }
  return least;
}

void sample_row(const SampleCall& call, int64_t row) {
  const float* logits = call.logits + row * call.stride;
  const Settings wanted = settings_of(call, row);
  Range range = {};
  call.kernels.find_largest(logits, call.size, &range.first, &range.largest);
  call.tokens[row] = range.first;
  call.largest[row] = range.largest;
  if (wanted.temperature <= 0 || !std::isfinite(range.largest)) return;

  range.least = find_floor(range.largest, static_cast<float>(wanted.floor));
  const Memory memory = take_memory(call.size);
  const DrawCall draw = {logits, call.size, range.largest, static_cast<float>(wanted.temperature), range.least,
                         call.size, noise_of(call.seeds[row], call.positions[row])};
  if (cuts_by_count(wanted, call.size)) {
    call.tokens[row] = draw_from_kept(call, draw, range, wanted, memory.candidates);
  } else if (wanted.top_p < 1.0) {
    call.tokens[row] = draw_top_p(call, draw, range, wanted, memory);
  } else {
    call.tokens[row] = Drawing(call.kernels, draw, range.first, memory).find_winner(draw);
  }
}

}  // namespace quire
