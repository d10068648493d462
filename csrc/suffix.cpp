#include "suffix.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace quire {

namespace {

constexpr uint32_t kNoLimit = 0;
constexpr uint32_t kMaxPosition = 0x7FFFFFFF;
constexpr uint32_t kMaxLimit = 1u << 30;
constexpr uint32_t kMinTable = 64;
constexpr uint32_t kOverlap = 8;  // tokens before a piece of an answer that are stored with it, so that they lead to it

uint32_t round_up(uint32_t size) {
  uint32_t rounded = kMinTable;
  while (rounded < size) rounded *= 2;
  return rounded;
}

}  // namespace

SuffixIndex::SuffixIndex(uint32_t limit) : limit_(limit), mask_(~0u) {
  if (limit == kNoLimit) return;
  const uint32_t size = round_up(limit);
  mask_ = size - 1;
  tokens_.resize(size);
  previous_.resize(size);
  for (auto& table : latest_) table.resize(size);
}

void SuffixIndex::reserve(uint32_t num_tokens) {
  if (limit_ != kNoLimit || num_tokens <= tokens_.capacity()) return;
  tokens_.reserve(num_tokens);
  previous_.reserve(num_tokens);
  grow_tables(num_tokens);
}

// A table has two entries for three tokens or more: a text has fewer different n-grams than tokens.
void SuffixIndex::grow_tables(uint32_t num_tokens) {
  const uint32_t size = round_up(num_tokens - num_tokens / 3);
  if (size <= latest_[0].size()) return;
  for (auto& table : latest_) table.assign(size, 0);
  const uint32_t end = end_;
  run_ = 0;
  for (end_ = 0; end_ < end; end_++) link(end_);
}

void SuffixIndex::make_room() {
  if (limit_ != kNoLimit) {
    if (end_ - begin_ == limit_) begin_++;
    return;
  }
  if (tokens_.size() == tokens_.capacity()) reserve(end_ + end_ / 4 + kMinTable);
  tokens_.push_back(0);
  previous_.push_back({});
}

void SuffixIndex::append(uint32_t token) {
  make_room();
  tokens_[end_ & mask_] = token;
  link(end_++);
}

void SuffixIndex::separate() {
  if (run_) append(kSeparator);
}

void SuffixIndex::link(uint32_t position) {
  Links& links = previous_[position & mask_];
  links = {};
  if (token(position) == kSeparator) {
    run_ = 0;
    return;
  }
  run_++;
  for (int nth = 0; nth < kNumOrders && kOrders[nth] <= run_; nth++) {
    uint32_t& latest = latest_[nth][hash(position, kOrders[nth])];
    links[nth] = latest;
    latest = position + 1;
  }
}

namespace {

uint64_t mix(uint64_t hash, uint32_t token) {
  hash = (hash ^ token) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 32);
}

}  // namespace

size_t SuffixIndex::hash(uint32_t position, uint32_t order) const {
  uint64_t hash = order;
  for (uint32_t back = order; back-- > 0;) hash = mix(hash, token(position - back));
  return hash & (latest_[0].size() - 1);
}

Tail SuffixIndex::tail() const {
  const uint32_t size = std::min(run_, kMaxMatch);
  return {tokens_.data() + end_ - size, size};
}

size_t SuffixIndex::num_bytes() const {
  return tokens_.capacity() * sizeof(uint32_t) + previous_.capacity() * sizeof(Links) +
         kNumOrders * latest_[0].capacity() * sizeof(uint32_t);
}

void SuffixIndex::find_own(uint32_t max_found, std::vector<Occurrence>& found) const {
  if (run_) follow(previous_[(end_ - 1) & mask_], tail(), max_found, found);
}

void SuffixIndex::find(Tail tail, uint32_t max_found, std::vector<Occurrence>& found) const {
  Links starts = {};
  if (begin_ == end_) return;
  for (int nth = 0; nth < kNumOrders && kOrders[nth] <= tail.size; nth++) {
    uint64_t hash = kOrders[nth];
    for (uint32_t back = kOrders[nth]; back-- > 0;) hash = mix(hash, tail.tokens[tail.size - 1 - back]);
    starts[nth] = latest_[nth][hash & (latest_[nth].size() - 1)];
  }
  follow(starts, tail, max_found, found);
}

// An occurrence of a longer n-gram is one of a shorter n-gram too. It is taken where the longer one leads to it.
void SuffixIndex::follow(Links starts, Tail tail, uint32_t max_found, std::vector<Occurrence>& found) const {
  uint32_t too_long = kMaxMatch + 1;
  for (int nth = kNumOrders - 1; nth >= 0; nth--) {
    uint32_t at = starts[nth];
    for (uint32_t visit = 0; visit < max_found && at > begin_ && found.size() < max_found; visit++) {
      const uint32_t position = at - 1;
      const uint32_t length = match(position, tail);
      if (length >= kOrders[nth] && length < too_long) found.push_back({position + 1, length});
      at = previous_[position & mask_][nth];
    }
    too_long = kOrders[nth];
  }
}

uint32_t SuffixIndex::match(uint32_t position, Tail tail) const {
  const uint32_t most = std::min(tail.size, position - begin_ + 1);
  const uint32_t* last = tail.tokens + tail.size - 1;
  uint32_t length = 0;
  while (length < most && token(position - length) == *(last - length)) length++;
  return length;
}

TenantText::TenantText(uint32_t limit) : index_(std::clamp(limit, 1u, kMaxLimit)) {}

void TenantText::append(uint64_t owner, const uint32_t* tokens, uint32_t size) {
  if (index_.end() > kMaxPosition - size) *this = TenantText(index_.limit());  // positions are used up
  if (pieces_.empty() || pieces_.back().owner != owner) {
    index_.separate();
    pieces_.push_back({index_.end(), owner});
  }
  for (uint32_t nth = 0; nth < size; nth++) index_.append(tokens[nth]);
  while (pieces_.size() > 1 && pieces_[1].begin <= index_.begin()) pieces_.pop_front();
}

uint64_t TenantText::owner_of(uint32_t position) const {
  const auto after = std::upper_bound(pieces_.begin(), pieces_.end(), position,
                                      [](uint32_t position, const Piece& piece) { return position < piece.begin; });
  return after == pieces_.begin() ? 0 : (after - 1)->owner;
}

void TenantText::find(uint64_t owner, Tail tail, uint32_t max_found, std::vector<Occurrence>& found) const {
  index_.find(tail, max_found, found);
  const auto is_own = [&](const Occurrence& each) { return owner_of(each.next - 1) == owner; };
  found.erase(std::remove_if(found.begin(), found.end(), is_own), found.end());
}

void DraftTree::clear() {
  tokens.clear();
  parents.clear();
  odds.clear();
  is_chain = true;
}

RequestText::RequestText(uint64_t owner, std::vector<uint32_t> prediction, uint32_t num_prompt)
    : owner_(owner), prediction_(std::move(prediction)), num_prompt_(num_prompt), num_published_(num_prompt) {
  clear();
}

void RequestText::clear() {
  index_ = SuffixIndex();
  for (const uint32_t token : prediction_) index_.append(token);
  index_.separate();
  base_ = index_.end();
  num_published_ = num_prompt_;
  cursor_ = 0;
  num_agreed_ = kMaxMatch;  // a client that predicts is trusted until its first error
}

void RequestText::append(const uint32_t* tokens, uint32_t size) {
  // A long text is most likely a prompt. The answer may then be a quarter of it before memory grows.
  if (size > kMinTable) index_.reserve(index_.end() + size + size / 4);
  for (uint32_t nth = 0; nth < size; nth++) {
    if (cursor_ < prediction_.size() && this->size() >= num_prompt_) follow_prediction(tokens[nth]);
    index_.append(tokens[nth]);
  }
}

// A token that is not expected is taken for another one in its place. `realign` corrects that.
void RequestText::follow_prediction(uint32_t token) {
  num_agreed_ = prediction_[cursor_] == token ? num_agreed_ + 1 : 0;
  cursor_++;
}

// The answer is where its last tokens are in the prediction, if more of them match there than at the cursor.
void RequestText::realign(const std::vector<Occurrence>& found) {
  for (const Occurrence& each : found) {
    if (each.next > prediction_.size() || each.length <= num_agreed_) continue;
    cursor_ = each.next;
    num_agreed_ = each.length;
  }
}

// A piece that is not directly behind this request's previous one begins with a few tokens that precede it.
void RequestText::publish(TenantText& tenant) {
  const uint32_t end = size();
  if (end <= num_published_) return;
  const bool continues = num_published_ > num_prompt_ && tenant.last_owner() == owner_;
  const uint32_t overlap = continues ? 0 : std::min(kOverlap, num_published_);
  std::vector<uint32_t> piece;
  for (uint32_t nth = num_published_ - overlap; nth < end; nth++) piece.push_back(token(nth));
  tenant.append(owner_, piece.data(), static_cast<uint32_t>(piece.size()));
  num_published_ = end;
}

namespace {

constexpr int32_t kRoot = -1;
constexpr float kMinOdds = 0.02f;
constexpr size_t kMaxChildren = 3;
constexpr uint32_t kFullWeight = 16;      // a longer match has no more weight
constexpr uint32_t kPredictionBonus = 2;  // tokens that a match with the prediction counts for, beyond its length
// A vote from another answer of the tenant decides only where the request's own text says little.
constexpr float kTenantWeight = 0.03f, kTenantCount = 0.25f;

// An occurrence, and the text that it is in.
struct Vote {
  const SuffixIndex* index;
  uint32_t next, length;
};

// The votes for one token.
struct Choice {
  uint32_t token;
  float weight, count;
  uint32_t length;  // of the longest match
};

// A token that may become a node.
struct Branch {
  int32_t parent;
  uint32_t token;
  float odds, survival;
};

struct Span {
  size_t begin, end;
};

struct Node {
  uint32_t token;
  int32_t parent;
  uint32_t depth;
  float odds, survival;
  Span votes;  // those that continue with this node's path
};

// A longer match counts more: its continuation is right more often.
float weigh(uint32_t length) {
  const float capped = static_cast<float>(std::min(length, kFullWeight));
  return capped * capped * capped;
}

// The chance that a token is right, by its longest match, the number of its votes and its share of all weight. The
// constants are a logistic regression over 24,000 tokens of greedy answers (`benchmarks/suffix.py fit`).
float estimate(const Choice& choice, float total) {
  const float share = choice.weight / total;
  const float logit = -1.67f + 0.53f * std::log(static_cast<float>(std::min(choice.length, kMaxMatch))) +
                      0.65f * std::log(choice.count) + 0.59f * std::log(share / (1.0f - share + 0.02f));
  return 1.0f / (1.0f + std::exp(-logit));
}

// Grows a tree from the votes: the branch that is most likely reached becomes a node, until there are enough.
class Growth {
 public:
  Growth(const SuffixIndex& own, std::vector<Vote> votes, bool only_chains)
      : own_(own), votes_(std::move(votes)), num_votes_(votes_.size()), max_children_(only_chains ? 1 : kMaxChildren) {}

  void grow(uint32_t max_drafts) {
    branch(kRoot);
    while (nodes_.size() < max_drafts && !branches_.empty()) {
      const auto best = std::max_element(branches_.begin(), branches_.end(), [](const Branch& a, const Branch& b) {
        return a.survival < b.survival;
      });
      const Branch chosen = *best;
      branches_.erase(best);
      add(chosen);
    }
  }

  void write(DraftTree& drafts) const {
    std::vector<int32_t> new_index(nodes_.size(), kRoot);
    int32_t count = 0, last = kRoot;
    const auto take = [&](int32_t node) {
      const Node& each = nodes_[node];
      new_index[node] = count++;
      drafts.tokens.push_back(each.token);
      drafts.odds.push_back(each.odds);
      drafts.parents.push_back(each.parent == kRoot ? kRoot : new_index[each.parent]);
    };
    // Nodes are in the order of survival. So the first child of a node is its likeliest.
    for (int32_t node = 0; node < static_cast<int32_t>(nodes_.size()); node++) {
      if (nodes_[node].parent != last) continue;
      take(node);
      last = node;
    }
    drafts.is_chain = count == static_cast<int32_t>(nodes_.size());
    for (int32_t node = 0; node < static_cast<int32_t>(nodes_.size()); node++) {
      if (new_index[node] == kRoot) take(node);
    }
  }

 private:
  void add(const Branch& chosen) {
    const uint32_t depth = depth_of(chosen.parent);
    const Span from = votes_of(chosen.parent);
    const size_t begin = votes_.size();
    for (size_t nth = from.begin; nth < from.end; nth++) {
      if (read(votes_[nth], depth, chosen.parent) == chosen.token) votes_.push_back(Vote(votes_[nth]));
    }
    nodes_.push_back({chosen.token, chosen.parent, depth + 1, chosen.odds, chosen.survival, {begin, votes_.size()}});
    branch(static_cast<int32_t>(nodes_.size()) - 1);
  }

  Span votes_of(int32_t node) const { return node == kRoot ? Span{0, num_votes_} : nodes_[node].votes; }
  uint32_t depth_of(int32_t node) const { return node == kRoot ? 0 : nodes_[node].depth; }

  // What follows an occurrence and `depth` more tokens. Behind the end of the request's text its drafts follow, so a
  // text that repeats itself goes on.
  uint32_t read(const Vote& vote, uint32_t depth, int32_t node) const {
    const uint32_t position = vote.next + depth;
    if (position < vote.index->end()) return vote.index->token(position);
    if (vote.index != &own_) return kSeparator;
    for (uint32_t back = depth - (position - own_.end()); back > 1; back--) node = nodes_[node].parent;
    return nodes_[node].token;
  }

  void branch(int32_t parent) {
    const uint32_t depth = depth_of(parent);
    const Span from = votes_of(parent);
    choices_.clear();
    float total = 0.0f;
    for (size_t nth = from.begin; nth < from.end; nth++) {
      const Vote& vote = votes_[nth];
      const uint32_t token = read(vote, depth, parent);
      const uint32_t length = vote.length + depth;
      const bool is_own = vote.index == &own_;
      const float weight = weigh(length) * (is_own ? 1.0f : kTenantWeight);
      total += weight;
      if (token != kSeparator) count(token, weight, is_own ? 1.0f : kTenantCount, length);
    }
    const float survival = parent == kRoot ? 1.0f : nodes_[parent].survival;
    for (size_t nth = std::min(choices_.size(), max_children_); nth > 0; nth--) {
      // Of equal weights the first is taken: votes with long n-grams come first, and then the most recent ones.
      Choice& best = *std::max_element(choices_.begin(), choices_.end(), [](const Choice& left, const Choice& right) {
        return left.weight < right.weight;
      });
      const float odds = estimate(best, total);
      if (odds >= kMinOdds) branches_.push_back({parent, best.token, odds, odds * survival});
      best.weight = 0.0f;
    }
  }

  void count(uint32_t token, float weight, float count, uint32_t length) {
    for (Choice& choice : choices_) {
      if (choice.token != token) continue;
      choice.weight += weight;
      choice.count += count;
      choice.length = std::max(choice.length, length);
      return;
    }
    choices_.push_back({token, weight, count, length});
  }

  const SuffixIndex& own_;
  std::vector<Vote> votes_;  // all votes, and behind them those of each node
  const size_t num_votes_, max_children_;
  std::vector<Choice> choices_;
  std::vector<Branch> branches_;
  std::vector<Node> nodes_;
};

}  // namespace

void RequestText::propose(const TenantText* tenant, uint32_t max_drafts, bool only_chains, DraftTree& drafts) {
  drafts.clear();
  const Tail tail = index_.tail();
  if (!tail.size || !max_drafts) return;
  std::vector<Vote> votes;
  std::vector<Occurrence> found;
  found.reserve(kMaxFound);
  votes.reserve(4 * kMaxFound);
  index_.find_own(kMaxFound, found);
  const bool is_predicted = size() >= num_prompt_ && !prediction_.empty();
  if (is_predicted) realign(found);
  if (is_predicted && cursor_ < prediction_.size()) {
    votes.push_back({&index_, cursor_, std::min(num_agreed_ + kPredictionBonus, kMaxMatch)});
  }
  for (const Occurrence& each : found) {
    if (!is_predicted || each.next != cursor_) votes.push_back({&index_, each.next, each.length});
  }
  found.clear();
  if (tenant) tenant->find(owner_, tail, kMaxFound, found);
  for (const Occurrence& each : found) votes.push_back({&tenant->index(), each.next, each.length});
  Growth growth(index_, std::move(votes), only_chains);
  growth.grow(std::min(max_drafts, kMaxDrafts));
  growth.write(drafts);
}

}  // namespace quire
