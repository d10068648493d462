#include "bpe.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <queue>
#include <random>

namespace quire {
namespace {

uint64_t mix(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a ^ 0x9e3779b97f4a7c15u) * (b ^ 0xd1b54a32d192ed03u);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t hash_text(std::string_view text, uint64_t seed) {
  uint64_t hash = mix(seed, text.size());
  for (size_t at = 0; at < text.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min<size_t>(8, text.size() - at));
    hash = mix(hash, word);
  }
  return hash;
}

// At most half of the slots are used.
size_t count_slots(size_t num_entries) {
  size_t count = 16;
  while (count < 2 * num_entries) count *= 2;
  return count;
}

// The number of bytes of the character that begins with `lead`. The text is valid UTF-8.
size_t count_bytes(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

constexpr uint32_t NONE = std::numeric_limits<uint32_t>::max();

// A part of the word, in a linked list. A symbol that was merged into the one before it has no id.
struct Symbol {
  uint32_t id, previous, next;
};

// Two neighbours that may be merged. Ordered by rank, and by position among equals.
struct Candidate {
  uint32_t rank, left, left_id, right_id;

  bool operator<(const Candidate& other) const {
    return rank != other.rank ? rank > other.rank : left > other.left;  // std::priority_queue has the largest on top
  }
};

}  // namespace

bool Bpe::build(const std::vector<std::string_view>& tokens, const std::vector<std::string_view>& merges) {
  uint64_t num_bytes = 0;
  for (std::string_view token : tokens) num_bytes += token.size();
  if (num_bytes >= NONE || tokens.size() >= NONE || merges.size() >= NONE) return false;
  seed_ = (uint64_t{std::random_device{}()} << 32) | std::random_device{}();
  text_.reserve(num_bytes);
  ends_.reserve(tokens.size());
  id_slots_.assign(count_slots(tokens.size()), 0);
  for (std::string_view token : tokens) {
    size_t slot = hash_text(token, seed_) & (id_slots_.size() - 1);
    while (id_slots_[slot] && this->token(id_slots_[slot] - 1) != token) slot = (slot + 1) & (id_slots_.size() - 1);
    has_duplicates_ |= id_slots_[slot] != 0;
    text_.append(token);
    ends_.push_back(static_cast<uint32_t>(text_.size()));
    id_slots_[slot] = static_cast<uint32_t>(ends_.size());
  }
  merges_.reserve(merges.size());
  rank_slots_.assign(count_slots(merges.size()), 0);
  std::string joined;
  for (std::string_view merge : merges) {
    if (!add_merge(merge, joined)) return false;
  }
  return true;
}

bool Bpe::add_merge(std::string_view merge, std::string& joined) {
  const size_t space = merge.find(' ');
  if (space == std::string_view::npos || space == 0 || space + 1 == merge.size()) return false;
  const std::string_view left_text = merge.substr(0, space), right_text = merge.substr(space + 1);
  const auto left = find(left_text), right = find(right_text);
  if (!left || !right) return false;
  joined.assign(left_text).append(right_text);
  // Most vocabularies list the results in the order of the merges.
  std::optional<uint32_t> id = merges_.empty() ? 0 : merges_.back().id + 1;
  if (has_duplicates_ || *id >= size() || token(*id) != joined) id = find(joined);
  if (!id) return false;
  merges_.push_back({*left, *right, *id});
  rank_slots_[find_slot(*left, *right)] = static_cast<uint32_t>(merges_.size());
  return true;
}

std::string_view Bpe::token(uint32_t id) const {
  const uint32_t start = id ? ends_[id - 1] : 0;
  return std::string_view(text_).substr(start, ends_[id] - start);
}

std::optional<uint32_t> Bpe::find(std::string_view text) const {
  for (size_t slot = hash_text(text, seed_);; slot++) {
    const uint32_t entry = id_slots_[slot & (id_slots_.size() - 1)];
    if (!entry) return std::nullopt;
    if (token(entry - 1) == text) return entry - 1;
  }
}

std::vector<std::pair<uint32_t, uint32_t>> Bpe::merges() const {
  std::vector<std::pair<uint32_t, uint32_t>> pairs;
  pairs.reserve(merges_.size());
  for (const Merge& merge : merges_) pairs.emplace_back(merge.left, merge.right);
  return pairs;
}

// The slot of a merge, or the empty slot where it belongs.
size_t Bpe::find_slot(uint32_t left, uint32_t right) const {
  for (size_t slot = mix(seed_ ^ left, right);; slot++) {
    slot &= rank_slots_.size() - 1;
    const uint32_t entry = rank_slots_[slot];
    if (!entry || (merges_[entry - 1].left == left && merges_[entry - 1].right == right)) return slot;
  }
}

std::optional<uint32_t> Bpe::find_rank(uint32_t left, uint32_t right) const {
  const uint32_t entry = rank_slots_[find_slot(left, right)];
  return entry ? std::optional<uint32_t>(entry - 1) : std::nullopt;
}

// Merges the neighbours of the lowest rank, the leftmost of equals, until no neighbours can be merged. The queue may
// hold candidates whose symbols have changed since; their ids no longer fit.
void Bpe::encode(std::string_view word, bool ignore_merges, std::vector<uint32_t>& ids) const {
  if (ignore_merges) {
    if (const auto id = find(word)) return ids.push_back(*id);
  }
  std::vector<Symbol> symbols;
  for (size_t at = 0; at < word.size();) {
    const size_t length = std::min(count_bytes(word[at]), word.size() - at);
    const auto index = static_cast<uint32_t>(symbols.size());
    if (const auto id = find(word.substr(at, length))) symbols.push_back({*id, index - 1, index + 1});
    at += length;
  }
  if (symbols.empty()) return;
  symbols.front().previous = symbols.back().next = NONE;

  std::priority_queue<Candidate> candidates;
  const auto add = [&](uint32_t left, uint32_t right) {
    if (left == NONE || right == NONE) return;
    const uint32_t left_id = symbols[left].id, right_id = symbols[right].id;
    if (const auto rank = find_rank(left_id, right_id)) candidates.push({*rank, left, left_id, right_id});
  };
  for (uint32_t i = 0; i + 1 < symbols.size(); i++) add(i, i + 1);
  while (!candidates.empty()) {
    const Candidate best = candidates.top();
    candidates.pop();
    Symbol& left = symbols[best.left];
    if (left.id != best.left_id || left.next == NONE || symbols[left.next].id != best.right_id) continue;
    Symbol& right = symbols[left.next];
    left.id = merges_[best.rank].id;
    left.next = right.next;
    right.id = NONE;
    if (left.next != NONE) symbols[left.next].previous = best.left;
    add(left.previous, best.left);
    add(best.left, left.next);
  }
  for (const Symbol& symbol : symbols) {
    if (symbol.id != NONE) ids.push_back(symbol.id);
  }
}

void AddedTokens::add(std::string_view text, uint32_t id) {
  uint32_t node = 0;
  for (const char byte : text) {
    const uint64_t key = uint64_t{node} << 8 | static_cast<unsigned char>(byte);
    const auto [edge, is_new] = edges_.try_emplace(key, num_nodes_);
    num_nodes_ += is_new;
    node = edge->second;
  }
  if (node == 0) return;  // the text is empty
  ids_[node] = id;
  is_first_[static_cast<unsigned char>(text[0])] = true;
}

std::optional<AddedTokens::Match> AddedTokens::find(std::string_view text, uint64_t from) const {
  for (uint64_t start = from; start < text.size(); start++) {
    if (!is_first_[static_cast<unsigned char>(text[start])]) continue;
    std::optional<Match> longest;
    uint32_t node = 0;
    for (uint64_t at = start; at < text.size(); at++) {
      const auto edge = edges_.find(uint64_t{node} << 8 | static_cast<unsigned char>(text[at]));
      if (edge == edges_.end()) break;
      node = edge->second;
      if (const auto id = ids_.find(node); id != ids_.end()) longest = Match{start, at + 1, id->second};
    }
    if (longest) return longest;
  }
  return std::nullopt;
}

}  // namespace quire
