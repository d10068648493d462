// Drafts from repeated text: where did the last tokens occur before, and what followed them?
//
// A SuffixIndex is a text in which each position is linked to the previous position with the same last n tokens, for a
// few n. So an appended token costs one hash table access for each n, and a query visits the most recent occurrences.
// Forgetting the oldest tokens costs nothing, because links lead to older positions only. quire/speculative/suffix.py
// calls this.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace quire {

constexpr uint32_t kMaxToken = 0x7FFFFFFF;
constexpr uint32_t kSeparator = 0xFFFFFFFF;  // between two documents; equals no token

constexpr int kNumOrders = 3;
constexpr std::array<uint32_t, kNumOrders> kOrders = {1, 2, 8};  // the n of n-grams; the first must be 1
constexpr uint32_t kMaxMatch = 32;                               // longer matches are not told apart
constexpr uint32_t kMaxFound = 32;                               // occurrences that a query uses
constexpr uint32_t kMaxDrafts = 64;

// An earlier place where the text's last `length` tokens occur. `next` is the position of the token that follows them.
struct Occurrence {
  uint32_t next;
  uint32_t length;
};

// The last tokens of a text, oldest first.
struct Tail {
  const uint32_t* tokens;
  uint32_t size;
};

class SuffixIndex {
 public:
  // With a limit, only the last `limit` tokens are kept, and memory is allocated once. Without one (0) all are kept.
  explicit SuffixIndex(uint32_t limit = 0);

  void reserve(uint32_t num_tokens);
  void append(uint32_t token);
  // Ends a document. No match extends over its end.
  void separate();

  uint32_t begin() const { return begin_; }
  uint32_t end() const { return end_; }
  uint32_t limit() const { return limit_; }
  uint32_t token(uint32_t position) const { return tokens_[position & mask_]; }
  // The tokens of the last document, at most kMaxMatch of them. Only without a limit: a ring's memory wraps around.
  Tail tail() const;
  size_t num_bytes() const;

  // Occurrences of this index's own tail, and of another text's. `found` is empty. Occurrences of long n-grams come
  // first, then the most recent ones. There are at most `max_found`, and so many links are followed for each order.
  void find_own(uint32_t max_found, std::vector<Occurrence>& found) const;
  void find(Tail tail, uint32_t max_found, std::vector<Occurrence>& found) const;

 private:
  using Links = std::array<uint32_t, kNumOrders>;  // a position + 1 for each order, or 0

  void link(uint32_t position);
  void grow_tables(uint32_t num_tokens);
  void make_room();
  size_t hash(uint32_t position, uint32_t order) const;
  void follow(Links starts, Tail tail, uint32_t max_found, std::vector<Occurrence>& found) const;
  uint32_t match(uint32_t position, Tail tail) const;

  std::vector<uint32_t> tokens_;                          // by position & mask_
  std::vector<Links> previous_;                           // by position & mask_
  std::array<std::vector<uint32_t>, kNumOrders> latest_;  // hash tables: the last position + 1 of an n-gram, or 0
  uint32_t limit_, mask_;
  uint32_t begin_ = 0, end_ = 0;  // positions that are kept
  uint32_t run_ = 0;              // tokens since the last separator
};

// Answers of one tenant's requests, the last `limit` tokens of them.
class TenantText {
 public:
  explicit TenantText(uint32_t limit);

  void append(uint64_t owner, const uint32_t* tokens, uint32_t size);
  // Occurrences in texts of other owners.
  void find(uint64_t owner, Tail tail, uint32_t max_found, std::vector<Occurrence>& found) const;

  // The owner of the last text; 0 if there is none.
  uint64_t last_owner() const { return pieces_.empty() ? 0 : pieces_.back().owner; }
  const SuffixIndex& index() const { return index_; }

 private:
  struct Piece {
    uint32_t begin;
    uint64_t owner;
  };

  uint64_t owner_of(uint32_t position) const;

  SuffixIndex index_;
  std::deque<Piece> pieces_;  // by position
};

// Nodes of a tree, parents first. The likeliest path comes first, then the others by their chance to be reached.
struct DraftTree {
  std::vector<uint32_t> tokens;
  std::vector<int32_t> parents;  // -1: the request's last token
  std::vector<float> odds;       // the chance that a node is right if its parent is
  bool is_chain = true;

  void clear();
};

// The text of one request: what the client predicts as its answer, the prompt, and the answer so far.
class RequestText {
 public:
  RequestText(uint64_t owner, std::vector<uint32_t> prediction, uint32_t num_prompt);

  uint64_t owner() const { return owner_; }
  uint32_t size() const { return index_.end() - base_; }
  uint32_t token(uint32_t nth) const { return index_.token(base_ + nth); }
  void append(const uint32_t* tokens, uint32_t size);
  void clear();

  // Appends those tokens of the answer to the tenant's text that were not yet appended.
  void publish(TenantText& tenant);
  // `tenant` may be null.
  void propose(const TenantText* tenant, uint32_t max_drafts, bool only_chains, DraftTree& drafts);

  const SuffixIndex& index() const { return index_; }

 private:
  void follow_prediction(uint32_t token);
  void realign(const std::vector<Occurrence>& found);

  SuffixIndex index_;  // the prediction, a separator, and the request's tokens
  uint64_t owner_;
  std::vector<uint32_t> prediction_;
  uint32_t num_prompt_;
  uint32_t base_ = 0;        // position of the prompt's first token
  uint32_t num_published_;   // tokens, counted from the prompt's first
  uint32_t cursor_ = 0;      // the prediction's token that is expected next
  uint32_t num_agreed_ = 0;  // tokens of the answer in a row that were expected
};

}  // namespace quire
