// The steps between the two products of attention. Products with the keys become scores: scaled, softcapped, with
// ALiBi, masked. Scores become weights relative to the largest score of their chunk. attention.inl calls it.
#pragma once

#include "attention.h"
#include "attention_products.inl"
#include "attention_mask.inl"
#include "attention_softmax.inl"
#include "attention_workspace.inl"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

template <class Item>
struct Weights {
  const AttentionCall& call;
  const AttentionMask& mask;
  State state;
  int group;

  // Turns the products of a bundle's rows into weights, and initializes the state of each row with their sum. All rows
  // are scored before any is weighted: finding a row's largest score has a long latency, which the other rows hide.
  void soften(const Bundle& bundle, const Chunk& chunk, float* scores, float* states) const {
    float tops[kMaxRows];
    for (int r = 0; r < bundle.count; ++r) {
      f32 best = shape_row(bundle.row + r, chunk, bundle, scores + r * kChunkKeys);
      tops[r] = largest(max(best, set1(kLowest)));
    }
    for (int r = 0; r < bundle.count; ++r) {
      float* softmax = states + r * state.stride();
      store(state.weight(softmax), weigh_row(chunk, bundle, tops[r], scores + r * kChunkKeys));
      *state.highest(softmax) = tops[r];
      state.clear_sums(softmax);
    }
  }

 private:
  // Turns one row's scores into weights and returns their sum.
  f32 weigh_row(const Chunk& chunk, const Bundle& bundle, float top, float* scores) const {
    const int first = bundle.first_vector(), last = bundle.last_vector();
    f32 total = zero();
    for (int vector = first; vector < last; ++vector) {
      f32 weight = exp_of_negative(load(scores + vector * kLanes) - set1(top));
      total = total + weight;
      if (Item::scaled) weight = weight * load(chunk.value_scales[vector]);
      store(scores + vector * kLanes, weight);
    }
    return total;
  }

  // Turns one row's products into scores and returns the largest of each lane. Scores of masked keys are -infinity.
  f32 shape_row(int row, const Chunk& chunk, const Bundle& bundle, float* scores) const {
    const Query& query = mask.queries[row / group];
    const int first = bundle.first_vector(), last = bundle.last_vector();
    const float scale = call.scale;
    const Vectors plain = plain_vectors(query, chunk.position, first, last);
    f32 best = minus_infinity();
    for (int vector = first; vector < plain.first; ++vector) best = max(best, bend(query, row, chunk, vector, scores));
    for (int vector = plain.first; vector < plain.last; ++vector) {
      f32 x = scaled(chunk, vector, scores, scale);
      store(scores + vector * kLanes, x);
      best = max(best, x);
    }
    for (int vector = plain.last; vector < last; ++vector) best = max(best, bend(query, row, chunk, vector, scores));
    return best;
  }

  // The vectors among [first, last) whose products are only scaled.
  Vectors plain_vectors(const Query& query, int position, int first, int last) const {
    if (call.softcap > 0 || call.slopes != nullptr) return {first, first};
    Vectors whole = mask.whole_vectors(query, position);
    int begin = smaller(larger(whole.first, first), last);
    return {begin, larger(smaller(whole.last, last), begin)};
  }

  QUIRE_INLINE f32 scaled(const Chunk& chunk, int vector, const float* scores, float scale) {
    f32 x = load(scores + vector * kLanes);
    if (Item::scaled) x = x * load(chunk.key_scales[vector]);
    return x * set1(scale);
  }

  f32 bend(const Query& query, int row, const Chunk& chunk, int vector, float* scores) const {
    const int key = chunk.position + vector * kLanes;
    f32 x = scaled(chunk, vector, scores, call.scale);
    if (call.softcap > 0) x = set1(call.softcap) * tanh(x / set1(call.softcap));
    if (call.slopes != nullptr) {
      float slope = call.slopes[mask.task.head * group + row % group];
      x = fma(set1(slope), mask.distances(query, key), x);
    }
    x = select(mask.visible(query, key), x, minus_infinity());
    store(scores + vector * kLanes, x);
    return x;
  }
};

}  // namespace QUIRE_ISA
}  // namespace quire
