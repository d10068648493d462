// Sampling: a token for each row of logits. The rule is that of quire/kernels/sampling.py.
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

// What a draw from all ids takes. Ids whose logit is below `least` are not drawn.
struct DrawCall {
  const float* logits;
  int64_t size;
  float largest, temperature, least;
  Noise noise;
};

// The best score so far, and whose it is.
struct Winner {
  float score;
  int64_t id;
};

// What an instruction set does over a whole row.
struct SampleKernels {
  // The first largest: index and value. NaN is larger than everything.
  void (*find_largest)(const float* x, int64_t size, int64_t* index, float* value);
  int64_t (*count_from)(const float* x, int64_t size, float least);
  // Ids of logits from `least` on, in their order; there is room for as many as `count_from` says.
  void (*collect_from)(const float* x, int64_t size, float least, Candidate* out);
  // The sum of exp((x - largest) / temperature) over x from `least` on.
  double (*sum_exp)(const float* x, int64_t size, float largest, float temperature, float least);
  // Scores of all ids against the winner so far.
  void (*draw)(const DrawCall&, Winner*);
};

struct SampleCall {
  const SampleKernels& kernels;
  const float* logits;  // [rows][size]
  int64_t stride, rows, size;
  const double* settings;  // [rows][4]: temperature, top-k, top-p, and by how much a kept logit may be below the largest
  const int64_t *seeds, *positions;
  int64_t* tokens;
  float* largest;
};

// `candidates` has room for a row's.
void sample_row(const SampleCall& call, int64_t row, Candidate* candidates);
bool needs_candidates(const SampleCall& call, int64_t row);

// One row of logits and what its request has said. The rule is that of quire/kernels/reference.py `penalize`.
struct PenaltyCall {
  float* logits;
  const int32_t* counts;
  int64_t size;
  const int64_t* more;  // tokens that are counted once more; -1 is none
  int64_t num_more;
  float repetition, frequency, presence;
  int32_t in_prompt;
};

void penalize_row(const PenaltyCall& call);

// The word of an id: see quire/kernels/philox.py.
uint32_t token_word(const Noise& noise, int64_t id);
float gumbel_score(float scaled, uint32_t word);

}  // namespace quire
