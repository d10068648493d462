#include "logprobs.h"

#include <algorithm>
#include <cmath>

#include "half.h"
#include "scratch.h"

namespace quire {
namespace {

// Floats as integers of the same order.
int32_t to_order(float value) {
  const auto bits = static_cast<int32_t>(float_bits(value));
  return bits >= 0 ? bits : INT32_MIN - bits;
}

float from_order(int32_t order) { return bits_float(static_cast<uint32_t>(order >= 0 ? order : INT32_MIN - order)); }

// A row and the logarithm of the sum of its exponentials. A log probability is rounded to float32 once, so it does not
// decrease where the logit increases, but different logits can have the same one.
struct Row {
  const SampleKernels& kernels;
  const float* logits;
  int64_t size;
  float largest;
  double log_sum;  // NaN if the largest logit is not finite

  float logprob(float logit) const { return static_cast<float>(static_cast<double>(logit) - log_sum); }

  // The smallest logit for whose log probability `reaches` is true. That of the largest logit must be true.
  template <class F>
  float least_logit(F reaches) const {
    int64_t low = to_order(-INFINITY), high = to_order(largest);
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (reaches(logprob(from_order(static_cast<int32_t>(middle))))) high = middle;
      else low = middle + 1;
    }
    return from_order(static_cast<int32_t>(high));
  }

  int64_t rank(float value) const {
    const auto is_larger = [=](float other) { return other > value; };
    if (!is_larger(logprob(largest))) return 1;
    return 1 + kernels.count_from(logits, size, least_logit(is_larger));
  }
};

Row make_row(const SampleKernels& kernels, const float* logits, int64_t size) {
  Row row{kernels, logits, size, 0, NAN};
  int64_t index;
  kernels.find_largest(logits, size, &index, &row.largest);
  if (std::isfinite(row.largest))
    row.log_sum = row.largest + std::log(kernels.sum_exp(logits, size, row.largest, 1.0f, -INFINITY));
  return row;
}

// The same log probabilities over a copy of the logits in which banned ones are minus infinity.
Row ban(const Row& row, const float* banned, float* copy) {
  Row rest = row;
  int64_t index;
  row.kernels.ban(row.logits, banned, row.size, copy);
  row.kernels.find_largest(copy, row.size, &index, &rest.largest);
  rest.logits = copy;
  return rest;
}

// A token and its log probability as one number: larger log probabilities first, of equals the lower id. The bits of a
// log probability without its sign increase as it decreases. NaN is last.
uint64_t sort_key(float logprob, int32_t id) {
  const uint32_t order = std::isnan(logprob) ? 0x7fc00000u : float_bits(logprob) & 0x7fffffffu;
  return uint64_t{order} << 32 | static_cast<uint32_t>(id);
}

float logprob_of_key(uint64_t key) { return 0.0f - bits_float(static_cast<uint32_t>(key >> 32)); }

// A logit that at least `count` tokens reach. Tokens with the log probability of the last of these reach it too.
float find_cutoff(const Row& row, int64_t count) {
  if (!std::isfinite(row.largest) || std::isnan(row.log_sum) || count >= row.size) return -INFINITY;
  const float least = row.logprob(find_least(row.kernels, row.logits, row.size, row.largest, count));
  return row.least_logit([=](float other) { return other >= least; });
}

struct Memory {
  Candidate* candidates;  // [size + 16]
  uint64_t* keys;         // [size]
  float* logits;          // [size]
};

Memory take_memory(int64_t size) {
  const auto count = static_cast<size_t>(size + 16);
  auto* keys = reinterpret_cast<uint64_t*>(scratch(count * (sizeof(uint64_t) + sizeof(Candidate) + sizeof(float))));
  auto* candidates = reinterpret_cast<Candidate*>(keys + count);
  return {candidates, keys, reinterpret_cast<float*>(candidates + count)};
}

// `is_banned` states that minus infinity is a ban, which is known even if no log probability is.
void find_top(const Row& row, bool is_banned, const TopTokens& top, int64_t at, const Memory& memory) {
  if (top.count == 0) return;
  const float least = find_cutoff(row, top.count);
  const int64_t count = row.kernels.collect_from(row.logits, row.size, least, row.size, memory.candidates);
  for (int64_t nth = 0; nth < count; nth++) {
    const Candidate& each = memory.candidates[nth];
    const bool is_out = is_banned && each.logit == -INFINITY;
    memory.keys[nth] = sort_key(is_out ? -INFINITY : row.logprob(each.logit), each.id);
  }
  std::nth_element(memory.keys, memory.keys + top.count - 1, memory.keys + count);
  std::sort(memory.keys, memory.keys + top.count);
  for (int64_t nth = 0; nth < top.count; nth++) {
    top.tokens[at * top.count + nth] = static_cast<int64_t>(memory.keys[nth] & 0xffffffffu);
    top.logprobs[at * top.count + nth] = logprob_of_key(memory.keys[nth]);
  }
}

}  // namespace

void logprobs_row(const LogprobsCall& call, int64_t at) {
  const Row row = make_row(call.kernels, call.logits + at * call.stride, call.size);
  const float own = row.logprob(row.logits[call.tokens[at]]);
  call.logprobs[at] = own;
  call.ranks[at] = row.rank(own);
  find_top(row, false, call.top, at, take_memory(call.size));
}

void beam_row(const BeamCall& call, int64_t at) {
  const Memory memory = take_memory(call.size);
  const Row row = make_row(call.kernels, call.logits + at * call.stride, call.size);
  const bool is_banned = call.banned != nullptr;
  const Row allowed = is_banned ? ban(row, call.banned + at * call.banned_stride, memory.logits) : row;
  find_top(allowed, is_banned, call.candidates, at, memory);
  const int64_t first = at * call.candidates.count;
  for (int64_t nth = 0; nth < call.candidates.count; nth++) {
    const bool counts_all = is_banned && call.top.count > 0;
    call.ranks[first + nth] = counts_all ? row.rank(call.candidates.logprobs[first + nth]) : nth + 1;
  }
  find_top(row, false, call.top, at, memory);
}

}  // namespace quire
