// The own tokens of a row whose queries are a draft tree. A query sees the context and its path as if both were one
// sequence: the score of an ancestor is at the index of its position, whatever its slot. So chunks, lanes and the order
// of sums are those of a chain, and so are the bits. attention.inl computes the context for all queries together, as
// for a chain. This file adds the own tokens:
//   1. Products of all queries with all own keys, by slot. These are few vectors, and a bundle of rows reads them once.
//   2. The products of each query's path are copied to the positions of the path. Other products are ignored.
//   3. When the scores have become weights, those of the path are copied back to the slots.
//   4. The values of the path are added in order. Other values are not read.
#pragma once

#include "attention.h"
#include "attention_mask.inl"
#include "attention_pages.inl"
#include "attention_plan.inl"
#include "attention_products.inl"
#include "attention_softmax.inl"
#include "attention_workspace.inl"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

struct Depths {
  int first, last;  // [first, last)
};

// `Item` is the type of the cache. `mask` has the task.
template <class Item>
struct OwnTokens {
  const AttentionCall& call;
  const AttentionMask& mask;
  Workspace& space;
  State state;
  int group, head_dim, value_dim;
  bool in_place;  // false: from a copy
  Chunk slots;    // keys and values by slot; `position` is the multiple of 16 before the first own token

  // Scales of a chunk's vectors that have own tokens. Weights of own tokens are scaled by slot, so their lanes are 1.
  float key_scales[kLanes], value_scales[kLanes], ones[kLanes];

  OwnTokens(const AttentionCall& call, const AttentionMask& mask, Workspace& space, int group)
      : call(call), mask(mask), space(space), state{call.cache.shape.value_dim}, group(group),
        head_dim(call.cache.shape.head_dim), value_dim(call.cache.shape.value_dim) {}

  // Finds the keys and values of a row's own tokens.
  void open(const Pages& pages, const Task& task) {
    set_wanted(slots, task.context / kLanes * kLanes, task.context, task.seq_len);
    in_place = side_by_side(pages.block_size);
    if (in_place) return locate(pages, slots);
    Copy& copy = space.own_copy;
    if (Item::scaled) copy_scales(pages, copy, slots);
    copy.restart(slots);
    copy_keys<Item>(pages, copy, slots.last_vector(), slots);
    copy_values<Item>(pages, copy, slots.last_vector(), slots);
  }

  // Whether a query of the task may see own tokens in the chunk.
  bool are_in(const Chunk& chunk) const { return mask.task.tree && base(chunk) < kChunkKeys; }

  // Sets the scales of an INT8 or FP8 chunk's vectors that have own tokens. The first one may have keys of the context too.
  void set_scales(const Task& task, Chunk& chunk) {
    const int end = larger(0, task.context - chunk.position), mixed = end / kLanes;
    if (mixed >= kChunkVectors) return;
    store(ones, set1(1.0f));
    store(key_scales, set1(1.0f));
    store(value_scales, set1(1.0f));
    for (int i = 0; i < end % kLanes && chunk.begin < chunk.end; ++i) {
      key_scales[i] = chunk.key_scales[mixed][i];
      value_scales[i] = chunk.value_scales[mixed][i];
    }
    for (int vector = mixed; vector < kChunkVectors; ++vector) {
      chunk.key_scales[vector] = vector == mixed ? key_scales : ones;
      chunk.value_scales[vector] = vector == mixed ? value_scales : ones;
    }
  }

  // Adds the products with the own keys in the chunk to those of the context.
  void add_products(const float* q, const Chunk& chunk) const {
    for (int i = 0; i < space.num_bundles; ++i) {
      const Bundle& bundle = space.bundles[i];
      if (in_place) {
        score_slots<Item>(bundle, q);
      } else {
        score_slots<CopiedItem>(bundle, q);
      }
      for (int row = bundle.row; row < bundle.row + bundle.count; ++row) move_to_positions(row, chunk);
    }
  }

  // Adds the weighted own values in the chunk to those of the context. Rows of one query have the same path.
  void add_values(const Chunk& chunk, float* into) const {
    const int rows = mask.task.num_queries * group;
    for (int row = 0, count; row < rows; row += count) {
      count = even_part(group - row % group, kMaxRows);
      for (int i = 0; i < count; ++i) move_to_slots(row + i, chunk);
      if (in_place) {
        weigh_path<Item>(row, count, chunk, into);
      } else {
        weigh_path<CopiedItem>(row, count, chunk, into);
      }
    }
  }

 private:
  int base(const Chunk& chunk) const { return mask.task.context - chunk.position; }  // of depth 0; may be negative

  // One row's products or weights by slot, counted from the first own token.
  float* by_slot(int row) const { return space.own_scores + row * kChunkKeys + slots.begin; }

  const int32_t* path_of(int row) const {
    return call.rows.path(call.rows.query_starts[mask.task.row] + mask.task.first_query + row / group);
  }

  // The depths of the tokens of its path that a row sees in the chunk.
  Depths depths_in(int row, const Chunk& chunk) const {
    const Query& query = mask.queries[row / group];
    const int first = larger(query.first_key, chunk.position);
    const int last = smaller(query.last_key, chunk.position + kChunkKeys);
    return {larger(0, first - mask.task.context), last - mask.task.context};
  }

  template <class SlotItem>
  void score_slots(const Bundle& bundle, const float* q) const {
    // A query has no ancestors behind it.
    const int last_query = mask.task.first_query + (bundle.row + bundle.count - 1) / group;
    const int last = (slots.begin + last_query) / kLanes + 1;
    float* products = space.own_scores + bundle.row * kChunkKeys;
    score<SlotItem>(bundle.count, q + bundle.row * head_dim, head_dim, slots, 0, last, products);
  }

  void move_to_positions(int row, const Chunk& chunk) const {
    const int32_t* path = path_of(row);
    const float* from = by_slot(row);
    float* to = space.scores + row * kChunkKeys + base(chunk);
    const Depths depths = depths_in(row, chunk);
    for (int depth = depths.first; depth < depths.last; ++depth) {
      to[depth] = scaled(from[path[depth]], slots.key_scales, path[depth]);
    }
  }

  void move_to_slots(int row, const Chunk& chunk) const {
    const int32_t* path = path_of(row);
    const float* from = space.scores + row * kChunkKeys + base(chunk);
    float* to = by_slot(row);
    const Depths depths = depths_in(row, chunk);
    for (int depth = depths.first; depth < depths.last; ++depth) {
      to[path[depth]] = scaled(from[depth], slots.value_scales, path[depth]);
    }
  }

  float scaled(float x, const float* const* scales, int token) const {
    const int slot = slots.begin + token;
    return Item::scaled ? x * scales[slot / kLanes][slot % kLanes] : x;
  }

  template <class SlotItem>
  void weigh_path(int row, int count, const Chunk& chunk, float* into) const {
    const int32_t* path = path_of(row);
    const Depths depths = depths_in(row, chunk);
    const float* weights = space.own_scores + row * kChunkKeys;
    float* sums = into + row * state.stride();
    for (int first = depths.first, last; first < depths.last; first = last) {
      for (last = first + 1; last < depths.last && path[last] == path[last - 1] + 1;) ++last;
      const int begin = slots.begin + path[first], end = slots.begin + path[last - 1] + 1;
      weigh<SlotItem>(count, weights, value_dim, slots, begin, end, sums, state.stride());
    }
  }
};

}  // namespace QUIRE_ISA
}  // namespace quire
