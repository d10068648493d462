// Sampling: a token for each row of logits. quire/kernels/sampling.py is the reference.
#pragma once

#include <cstdint>

#include "pool.h"

namespace quire {

struct Candidate {
  float logit;
  int32_t id;
};

// The noise of one position: the key and the first two words of the counter.
struct Noise {
  uint32_t key[2];
  uint32_t position[2];
};

// The ids that are sampled from: those whose logit is above `least`, and those below `end` whose logit is `least`.
struct DrawCall {
  const float* logits;
  int64_t size;
  float largest, temperature, least;
  int64_t end;
  Noise noise;
};

// The largest score so far, and its id.
struct Winner {
  float score;
  int64_t id;
};

struct ExpSums {
  double all, some;
};

constexpr double kRoughError = 4e-5;

// The functions of an instruction set. Each processes a whole row.
struct SampleKernels {
  // Index and value of the largest; of equals the first. NaN is larger than any number.
  void (*find_largest)(const float* x, int64_t size, int64_t* index, float* value);
  int64_t (*count_from)(const float* x, int64_t size, float least);
  int64_t (*count_same)(const float* x, int64_t size, float value);
  // Collects the ids whose logits are `least` or larger, in ascending order, and returns their number. Stops when it is
  // larger than `limit`. `out` has space for limit + 16.
  int64_t (*collect_from)(const float* x, int64_t size, float least, int64_t limit, Candidate* out);
  // The sum of exp((x - largest) / temperature) over all x that are `least` or larger.
  double (*sum_exp)(const float* x, int64_t size, float largest, float temperature, float least);
  // The same in fewer steps, and the sum over those that are `from` or larger. A sum differs from that of sum_exp, or
  // from the exact one, by less than kRoughError of it.
  ExpSums (*rough_sums)(const float* x, int64_t size, float largest, float temperature, float least, float from);
  // Computes the scores of all ids, or of some, and updates the winner, which must have a finite score.
  void (*draw)(const DrawCall&, Winner*);
  void (*draw_candidates)(const DrawCall&, const Candidate*, int64_t count, Winner*);
  // Copies x, with minus infinity where `banned` is minus infinity.
  void (*ban)(const float* x, const float* banned, int64_t size, float* out);
};

// Functions that change a span of a row in place. A span starts at a multiple of 16.
struct LogitsKernels {
  // Tokens whose bit is 0 become minus infinity. The lowest bit of a byte is first. Bits after the last byte are 0.
  void (*apply_bitmask)(float* x, const uint8_t* bits, int64_t num_bytes, Span);
  // x = cap * tanh(x / cap)
  void (*softcap)(float* x, float cap, Span);
};

struct SampleCall {
  const SampleKernels& kernels;
  const float* logits;  // [rows][size]
  int64_t stride, rows, size;
  const double* settings;  // [rows][4]: temperature, top-k, top-p, min-p's floor
  const int64_t *seeds, *positions;
  int64_t* tokens;
  float* largest;
};

// A threshold that at least `count` logits reach, and not many more. `largest` is the largest logit.
float find_least(const SampleKernels& kernels, const float* logits, int64_t size, float largest, int64_t count);

// Uses the thread's scratch memory.
void sample_row(const SampleCall& call, int64_t row);

// One row of logits and its request's token counts. `penalize` in quire/kernels/reference.py is the reference.
struct PenaltyCall {
  float* logits;
  const int32_t* counts;
  int64_t size;
  const int64_t* more;  // additional tokens to count; -1 is none
  int64_t num_more;
  float repetition, frequency, presence;
  int32_t in_prompt;
};

void penalize_row(const PenaltyCall& call);

Noise noise_of(int64_t seed, int64_t position);

// The random word of an id: see quire/kernels/philox.py.
uint32_t token_word(const Noise& noise, int64_t id);

constexpr float kMostNoise = 22.9f;  // the noise of the smallest uniform number, 2^-33, is a little less

// An id whose logit is lower has a score below the winner's.
float least_to_win(const DrawCall& call, const Winner& winner);
float gumbel_score(float scaled, uint32_t word);

}  // namespace quire
