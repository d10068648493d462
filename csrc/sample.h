// Sampling: a token for each row of logits. quire/kernels/sampling.py is the reference.
#pragma once

#include <cstdint>

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

// The arguments for sampling from all ids. Ids whose logit is below `least` are not sampled.
struct DrawCall {
  const float* logits;
  int64_t size;
  float largest, temperature, least;
  Noise noise;
};

// The largest score so far, and its id.
struct Winner {
  float score;
  int64_t id;
};

// The functions of an instruction set. Each processes a whole row.
struct SampleKernels {
  // Index and value of the largest; of equals the first. NaN is larger than any number.
  void (*find_largest)(const float* x, int64_t size, int64_t* index, float* value);
  int64_t (*count_from)(const float* x, int64_t size, float least);
  // Collects the ids whose logits are `least` or larger, in ascending order. `out` has space for `count_from` of them.
  void (*collect_from)(const float* x, int64_t size, float least, Candidate* out);
  // The sum of exp((x - largest) / temperature) over all x that are `least` or larger.
  double (*sum_exp)(const float* x, int64_t size, float largest, float temperature, float least);
  // Computes the scores of all ids and updates the winner.
  void (*draw)(const DrawCall&, Winner*);
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

// `candidates` has space for all ids of a row.
void sample_row(const SampleCall& call, int64_t row, Candidate* candidates);
bool needs_candidates(const SampleCall& call, int64_t row);

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

// The random word of an id: see quire/kernels/philox.py.
uint32_t token_word(const Noise& noise, int64_t id);
float gumbel_score(float scaled, uint32_t word);

}  // namespace quire
