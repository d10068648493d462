// Copies keys and values of tokens to other slots of the cache, in the layout of attention.h. When a path of a draft
// tree is accepted, its tokens are moved to the front of the row.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

namespace quire {

// The moves of one cache group, in order.
struct Moves {
  const int64_t* sources;  // slots: block * block_size + offset
  const int64_t* targets;
  int64_t count;
};

struct LayerMoves {
  Cache cache;
  Moves moves;
};

void move_kv(int threads, const std::vector<LayerMoves>& layers);

}  // namespace quire
