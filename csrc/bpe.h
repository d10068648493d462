// Byte pair encoding: a vocabulary with its merges, and the tokens that are matched in a text before it is split into
// words. quire/text/tokenizers/byte_level.py uses both. Splitting into words is not done here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace quire {

// A vocabulary and its merges. It owns its memory: 8 bytes a token and its text, and 20 bytes a merge.
// If a text occurs twice in the vocabulary, its id is the last one. The same holds for a merge and its rank.
class Bpe {
 public:
  // False if a merge is not two tokens with a space between them, or if its result is not a token.
  bool build(const std::vector<std::string_view>& tokens, const std::vector<std::string_view>& merges);

  uint32_t size() const { return static_cast<uint32_t>(ends_.size()); }
  std::string_view token(uint32_t id) const;
  std::optional<uint32_t> find(std::string_view text) const;
  // The tokens that each merge joins, in order.
  std::vector<std::pair<uint32_t, uint32_t>> merges() const;

  // Appends the tokens of a word. A character without a token is dropped. With `ignore_merges`, a word that is a token
  // becomes that token.
  void encode(std::string_view word, bool ignore_merges, std::vector<uint32_t>& ids) const;

 private:
  struct Merge {
    uint32_t left, right, id;
  };

  bool add_merge(std::string_view merge, std::string& joined);
  std::optional<uint32_t> find_rank(uint32_t left, uint32_t right) const;
  size_t find_slot(uint32_t left, uint32_t right) const;

  std::string text_;                  // all tokens, one after the other
  std::vector<uint32_t> ends_;        // where each of them ends
  std::vector<Merge> merges_;         // by rank
  std::vector<uint32_t> id_slots_;    // hash table of tokens: id + 1, or 0 if empty; the size is a power of 2
  std::vector<uint32_t> rank_slots_;  // hash table of merges: rank + 1, or 0 if empty; the size is a power of 2
  bool has_duplicates_ = false;       // whether a text occurs twice
  uint64_t seed_ = 0;                 // of both hash tables: a file cannot be made to collide
};

// Tokens that are matched in a text as they are: at each position the longest one, from left to right.
class AddedTokens {
 public:
  void add(std::string_view text, uint32_t id);

  struct Match {
    uint64_t start, end;
    uint32_t id;
  };
  // The first match at or after `from`.
  std::optional<Match> find(std::string_view text, uint64_t from) const;

 private:
  // A trie. The key of an edge is its node and a byte; node 0 is the root.
  std::unordered_map<uint64_t, uint32_t> edges_;
  std::unordered_map<uint32_t, uint32_t> ids_;  // of nodes where a token ends
  uint32_t num_nodes_ = 1;
  bool is_first_[256] = {};  // whether a token begins with this byte
};

}  // namespace quire
