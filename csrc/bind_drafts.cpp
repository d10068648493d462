// The tree of a draft head, grown from the best candidates of each place. quire/speculative/draft_tree.py has the
// reference, grow_tree, and quire/engine/heads.py calls this one: in Python it takes a tenth of a small model's step.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "sample.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace quire {
namespace {

struct Child {
  double chance;
  int64_t token;
};

// The candidates of one place. A score is a log probability, with its noise if tokens are sampled.
struct Place {
  std::vector<int64_t> tokens;
  std::vector<float> scores;
  double rest;  // chance of all other tokens
};

// Added to the score of a token behind another one: the product of two rows. Ids without a row have index -1.
struct Bigrams {
  const float *before, *after;  // [ids, rank]
  const int64_t* index;         // [vocab]
  int64_t rank, vocab_size;

  const float* row(const float* matrix, int64_t token) const {
    const int64_t at = token >= 0 && token < vocab_size ? index[token] : -1;
    return at < 0 ? nullptr : matrix + at * rank;
  }

  float product(const float* first, int64_t token) const {
    const float* second = row(after, token);
    float sum = 0.0f;
    for (int64_t i = 0; second && i < rank; i++) sum += first[i] * second[i];
    return sum;
  }
};

// A node that may be added: the `nth` best child of `parent`. The likeliest goes first.
struct Candidate {
  double survival;
  int64_t depth, nth, parent;
  const std::vector<Child>* siblings;

  bool operator<(const Candidate& other) const {
    if (survival != other.survival) return survival < other.survival;
    return std::tie(depth, nth, parent) > std::tie(other.depth, other.nth, other.parent);
  }
};

struct Limits {
  int64_t max_nodes, max_children;
  double min_survival;
};

struct Tree {
  int64_t *tokens, *parents;
  double* chances;
};

class Grower {
 public:
  Grower(const std::vector<Place>& places, const Bigrams& bigrams, const Limits& limits)
      : places_(places), bigrams_(bigrams), limits_(limits) {}

  int64_t grow(const Tree& tree) {
    int64_t count = 0;
    if (!places_.empty()) push(1.0, 0, 0, -1, children(0, -1));
    while (!heap_.empty() && count < limits_.max_nodes) {
      const Candidate best = heap_.top();
      heap_.pop();
      const Child& child = (*best.siblings)[best.nth];
      tree.tokens[count] = child.token;
      tree.parents[count] = best.parent;
      tree.chances[count] = child.chance;
      const int64_t node = count++;
      push(best.survival / child.chance, best.depth, best.nth + 1, best.parent, *best.siblings);
      const int64_t following = best.depth + 1;
      if (following < static_cast<int64_t>(places_.size()) && count < limits_.max_nodes)
        push(best.survival, following, 0, node, children(following, child.token));
    }
    return count;
  }

 private:
  void push(double reached, int64_t depth, int64_t nth, int64_t parent, const std::vector<Child>& siblings) {
    if (nth >= static_cast<int64_t>(siblings.size())) return;
    const double survival = reached * siblings[nth].chance;
    if (survival >= limits_.min_survival) heap_.push({survival, depth, nth, parent, &siblings});
  }

  // The best children of a node, best first. Without bigrams they are those of any node at that depth.
  const std::vector<Child>& children(int64_t depth, int64_t token) {
    const auto [at, is_new] = known_.try_emplace({depth, bigrams_.rank ? token : -1});
    if (is_new) at->second = rank(places_[depth], token);
    return at->second;
  }

  std::vector<Child> rank(const Place& place, int64_t before) const {
    const int64_t size = static_cast<int64_t>(place.tokens.size());
    const float* first = bigrams_.rank && before >= 0 ? bigrams_.row(bigrams_.before, before) : nullptr;
    std::vector<float> scores = place.scores;
    for (int64_t i = 0; first && i < size; i++) scores[i] += bigrams_.product(first, place.tokens[i]);
    const float largest = size ? *std::max_element(scores.begin(), scores.end()) : -INFINITY;
    if (!std::isfinite(largest)) return {};
    double total = place.rest * std::exp(std::min(80.0, -static_cast<double>(largest)));
    std::vector<int64_t> order(size);
    for (int64_t i = 0; i < size; i++) {
      order[i] = i;
      scores[i] = std::exp(scores[i] - largest);
      total += scores[i];
    }
    if (!std::isfinite(total)) return {};
    const int64_t most = std::min(limits_.max_children, size);
    std::partial_sort(order.begin(), order.begin() + most, order.end(), [&](int64_t a, int64_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
    std::vector<Child> best;
    for (int64_t i = 0; i < most && scores[order[i]] > 0; i++)
      best.push_back({scores[order[i]] / total, place.tokens[order[i]]});
    return best;
  }

  const std::vector<Place>& places_;
  const Bigrams& bigrams_;
  Limits limits_;
  std::priority_queue<Candidate> heap_;
  std::map<std::pair<int64_t, int64_t>, std::vector<Child>> known_;
};

// Minus infinity leaves a candidate out. A place with no candidate or with a value that is not a number ends the tree.
std::vector<Place> read_places(const int64_t* tokens, const float* logprobs, int64_t depth, int64_t count,
                               double temperature, int64_t seed, int64_t length) {
  std::vector<Place> places;
  for (int64_t nth = 0; nth < depth; nth++) {
    Place place{{}, {}, temperature > 0 ? 0.0 : 1.0};
    const Noise noise = noise_of(seed, length + nth);
    for (int64_t at = nth * count; at < (nth + 1) * count; at++) {
      if (std::isnan(logprobs[at])) return places;
      if (!std::isfinite(logprobs[at])) continue;
      float score = logprobs[at];
      if (temperature > 0)
        score += static_cast<float>(temperature) * gumbel_score(0.0f, token_word(noise, tokens[at]));
      else
        place.rest -= std::exp(static_cast<double>(score));
      place.tokens.push_back(tokens[at]);
      place.scores.push_back(score);
    }
    if (place.tokens.empty()) return places;
    place.rest = std::max(0.0, place.rest);
    places.push_back(std::move(place));
  }
  return places;
}

using Candidates = std::tuple<Address, Address, int64_t, int64_t>;        // tokens, logprobs [depth, count]
using Drawing = std::tuple<double, int64_t, int64_t>;                     // temperature, seed, tokens before the first
using BigramArrays = std::tuple<Address, Address, Address, int64_t, int64_t>;  // before, after, index, rank, vocab size
using Outputs = std::tuple<Address, Address, Address>;                    // tokens, parents, chances [max_nodes]

int64_t grow_tree(Candidates candidates, Drawing drawing, BigramArrays arrays, int64_t max_nodes, int64_t max_children,
                  double min_survival, Outputs outputs) {
  const auto [tokens, logprobs, depth, count] = candidates;
  const auto [temperature, seed, length] = drawing;
  const auto [before, after, index, rank, vocab_size] = arrays;
  const auto [out_tokens, out_parents, out_chances] = outputs;
  ReleasedGil released;
  const std::vector<Place> places =
      read_places(reinterpret_cast<const int64_t*>(tokens), reinterpret_cast<const float*>(logprobs), depth, count,
                  temperature, seed, length);
  const Bigrams bigrams{reinterpret_cast<const float*>(before), reinterpret_cast<const float*>(after),
                        reinterpret_cast<const int64_t*>(index), rank, vocab_size};
  return Grower(places, bigrams, {max_nodes, max_children, min_survival})
      .grow({reinterpret_cast<int64_t*>(out_tokens), reinterpret_cast<int64_t*>(out_parents),
             reinterpret_cast<double*>(out_chances)});
}

}  // namespace

void bind_drafts(nb::module_& module) {
  module.def("grow_tree", grow_tree, "candidates"_a, "drawing"_a, "bigrams"_a, "max_nodes"_a, "max_children"_a,
             "min_survival"_a, "outputs"_a);
}

}  // namespace quire
