// Log probabilities: of one token a row, of a row's likeliest tokens, and of the candidates of beams.
// quire/engine/sampler.py defines them.
#pragma once

#include <cstdint>

#include "sample.h"

namespace quire {

// The likeliest tokens of each row, [rows][count]: largest log probability first, of equals the lower id.
struct TopTokens {
  int64_t count;
  int64_t* tokens;
  float* logprobs;
};

// A row whose largest logit is not finite has no log probabilities: they are NaN, and ranks are 1.
struct LogprobsCall {
  const SampleKernels& kernels;
  const float* logits;  // [rows][size]
  int64_t stride, rows, size;
  const int64_t* tokens;  // [rows]
  float* logprobs;        // [rows]: of `tokens`
  int64_t* ranks;         // [rows]: 1 + the number of tokens with a larger log probability
  TopTokens top;
};

// `banned` are logits in which minus infinity bans a token, or null. Where a raw logit is minus infinity, they are too.
// Banned tokens are the last of the candidates, and their log probabilities are minus infinity. Ranks are from 1 to the
// number of candidates. With `banned` and `top`, they are ranks among the log probabilities of all tokens.
struct BeamCall {
  const SampleKernels& kernels;
  const float* logits;  // [rows][size]
  int64_t stride;
  const float* banned;  // [rows][size] or null
  int64_t banned_stride;
  int64_t rows, size;
  TopTokens candidates;
  int64_t* ranks;  // [rows][candidates]
  TopTokens top;
};

// Both use the thread's scratch memory.
void logprobs_row(const LogprobsCall& call, int64_t row);
void beam_row(const BeamCall& call, int64_t row);

}  // namespace quire
