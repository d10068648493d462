// The arguments of attention and store_kv, and the layout of the KV cache. attention.inl reads the cache, kv_store.inl
// writes it, and Python uses only the sizes.
//
// A block of keys is [kv_heads][head_dim][lanes]. A vector holds one dimension of 16 tokens, so the scores of 16 keys
// are computed in one register. `lanes` is the block size rounded up to 16. A block of values is
// [kv_heads][block_size][value_dim]. INT8 and FP8 blocks hold, for each head, the codes in that order and then `lanes`
// float32 scales, one for each token: x = scale * code. FP8 codes are float8 e4m3, and stand for 2^-8 of their value.
#pragma once

#include <cstdint>

#include "panels.h"

namespace quire {

enum class CacheType : uint8_t { F32, BF16, INT8, FP8 };

struct CacheShape {
  CacheType type;
  int block_size, kv_heads, head_dim;
  int value_dim;  // of a value's head; head_dim, but for latents

  bool has_scales() const { return type == CacheType::INT8 || type == CacheType::FP8; }
  int lanes() const { return static_cast<int>(round_up(block_size, kLanes)); }
  int item() const { return type == CacheType::F32 ? 4 : type == CacheType::BF16 ? 2 : 1; }
  int64_t scale_bytes() const { return has_scales() ? 4 * lanes() : 0; }
  int64_t key_head_bytes() const { return int64_t{head_dim} * lanes() * item() + scale_bytes(); }
  int64_t value_head_bytes() const { return int64_t{value_dim} * block_size * item() + scale_bytes(); }
};

constexpr int kMaxTreeTokens = 96;  // of one row, the root included; Python's limit is lower

// One layer's cache and the rows of a step. They are described in `kernels/paging.py`.
struct Cache {
  CacheShape shape;
  uint8_t* keys;
  uint8_t* values;
  int64_t key_stride, value_stride;  // bytes from one block to the next; other layers may be in between
};

struct Rows {
  int num_rows, num_tokens;
  const int32_t* query_starts;  // [num_rows + 1]
  const int32_t* seq_lens;      // [num_rows]
  const int32_t* tables;        // [num_rows, table_stride]
  int64_t table_stride;
  const int64_t* slots;         // [num_tokens]
  const int32_t* paths;         // [num_tokens, path_stride] or null if no row has a tree; paging.py describes them
  int64_t path_stride;

  const int32_t* path(int64_t token) const { return paths + token * path_stride; }
  bool has_tree(int row) const { return paths != nullptr && path(query_starts[row])[0] >= 0; }

  // The length of a token's path, itself not counted.
  int depth(int64_t token) const {
    const int32_t* own = path(token);
    int length = 1;
    while (length < path_stride && own[length] >= 0) ++length;
    return length - 1;
  }
};

struct AttentionCall {
  Cache cache;
  Rows rows;
  const float* q;        // [num_tokens][heads][head_dim], tokens q_stride floats apart
  int64_t q_stride;
  float* out;            // [num_tokens][heads][value_dim], out_stride apart
  int64_t out_stride;
  int heads;
  float scale;
  int window;            // 0: none
  float softcap;         // 0: none
  const float* slopes;   // [heads] or null
  const float* sinks;    // [heads] or null: the scores of one more key, whose value is zero
  float* partials;       // shared by the team: partial results of contexts that several threads share
  int64_t num_partials;  // size of `partials` in floats
};

}  // namespace quire
