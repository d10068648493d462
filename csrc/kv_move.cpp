// Implements kv_move.h. A thread takes some key heads of the layers and makes all their moves, so that moves are in
// order and no two threads write to one block's head.
#include "kv_move.h"

#include <cstring>

#include "pool.h"

namespace quire {
namespace {

struct Slot {
  uint8_t* keys;  // of one head in the slot's block
  uint8_t* values;
  int offset;
};

Slot find_slot(const Cache& cache, int head, int64_t slot) {
  const CacheShape& shape = cache.shape;
  const int64_t block = slot / shape.block_size;
  return {cache.keys + block * cache.key_stride + head * shape.key_head_bytes(),
          cache.values + block * cache.value_stride + head * shape.value_head_bytes(),
          static_cast<int>(slot % shape.block_size)};
}

template <class Item>
void copy_keys(const CacheShape& shape, const Slot& from, const Slot& to) {
  const Item* source = reinterpret_cast<const Item*>(from.keys) + from.offset;
  Item* target = reinterpret_cast<Item*>(to.keys) + to.offset;
  const int64_t lanes = shape.lanes();
  for (int64_t d = 0; d < shape.head_dim; ++d) target[d * lanes] = source[d * lanes];
}

void copy_token(const CacheShape& shape, const Slot& from, const Slot& to) {
  switch (shape.item()) {
    case 4: copy_keys<uint32_t>(shape, from, to); break;
    case 2: copy_keys<uint16_t>(shape, from, to); break;
    default: copy_keys<uint8_t>(shape, from, to);
  }
  const int64_t bytes = int64_t{shape.value_dim} * shape.item();
  std::memmove(to.values + to.offset * bytes, from.values + from.offset * bytes, static_cast<size_t>(bytes));
  if (shape.scale_bytes() == 0) return;
  const int64_t key_codes = shape.key_head_bytes() - shape.scale_bytes();
  const int64_t value_codes = shape.value_head_bytes() - shape.scale_bytes();
  std::memmove(to.keys + key_codes + 4 * to.offset, from.keys + key_codes + 4 * from.offset, 4);
  std::memmove(to.values + value_codes + 4 * to.offset, from.values + value_codes + 4 * from.offset, 4);
}

void move_on_team(void* argument, Worker worker) {
  const auto& layers = *static_cast<const std::vector<LayerMoves>*>(argument);
  int64_t num_heads = 0, nth = 0;
  for (const LayerMoves& layer : layers) num_heads += layer.cache.shape.kv_heads;
  const Span own = share(worker, num_heads);
  for (const LayerMoves& layer : layers) {
    for (int head = 0; head < layer.cache.shape.kv_heads; ++head, ++nth) {
      if (nth < own.first || nth >= own.last) continue;
      for (int64_t i = 0; i < layer.moves.count; ++i) {
        copy_token(layer.cache.shape, find_slot(layer.cache, head, layer.moves.sources[i]),
                   find_slot(layer.cache, head, layer.moves.targets[i]));
      }
    }
  }
}

}  // namespace

void move_kv(int threads, const std::vector<LayerMoves>& layers) {
  run_team(threads, move_on_team, const_cast<std::vector<LayerMoves>*>(&layers));
}

}  // namespace quire
