// The working memory of one thread for attention, in its scratch. attention.inl calls it.
#pragma once

#include "attention_pages.inl"
#include "attention_plan.inl"
#include "attention_mask.inl"
#include "attention_softmax.inl"
#include "panels.h"
#include "scratch.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

// Rows that are computed together, and the keys of a chunk that at least one of them sees.
struct Bundle {
  int row, count;
  int begin, end;  // keys of the chunk; empty if end <= begin
  int read_end;    // those before it are read from the chunk, none if it is 0; own tokens of a tree come after it

  int first_vector() const { return begin / kLanes; }
  int last_vector() const { return (end + kLanes - 1) / kLanes; }
  int read_vector() const { return (read_end + kLanes - 1) / kLanes; }
};

constexpr int kOwnKeys = static_cast<int>(round_up(kMaxTreeTokens + kLanes, kCopyKeys));

struct Workspace {
  float* q;          // [stretch rows][head_dim]
  float* scores;     // [task rows][kChunkKeys]
  float* total;      // [stretch rows] states
  float* part;       // [task rows] states
  Copy copy;
  Query* queries;    // [task queries]
  Bundle* bundles;   // [task rows], the first num_bundles are set
  int num_bundles;
  float* own_scores;  // [task rows][kChunkKeys], for draft trees: of own tokens by slot
  Copy own_copy;      // of kOwnKeys keys
};

// Divides one buffer into arrays. Without a buffer it only counts bytes.
struct Carver {
  uint8_t* data;
  size_t used = 0;

  template <class Item>
  Item* take(int64_t count) {
    Item* piece = data == nullptr ? nullptr : reinterpret_cast<Item*>(data + used);
    used += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(Item)), 64));
    return piece;
  }
};

// The sizes of the arrays that a call needs.
struct Sizes {
  int task_queries, stretch_queries;  // upper bounds
  int group, head_dim, value_dim;
  bool trees;
};

static void carve_copy(Carver& carver, const Sizes& sizes, int64_t num_keys, Copy& copy) {
  copy.keys = carver.take<float>(sizes.head_dim * num_keys);
  copy.values = carver.take<float>(sizes.value_dim * num_keys);
  copy.key_scales = carver.take<float>(kChunkKeys);
  copy.value_scales = carver.take<float>(kChunkKeys);
}

static size_t carve(uint8_t* data, const Sizes& sizes, Workspace& space) {
  Carver carver{data};
  const int64_t task_rows = int64_t{sizes.task_queries} * sizes.group;
  const int64_t stretch_rows = int64_t{sizes.stretch_queries} * sizes.group;
  const int64_t stride = State{sizes.value_dim}.stride();
  space.q = carver.take<float>(stretch_rows * sizes.head_dim);
  space.scores = carver.take<float>(task_rows * kChunkKeys);
  space.total = carver.take<float>(stretch_rows * stride);
  space.part = carver.take<float>(task_rows * stride);
  carve_copy(carver, sizes, kChunkKeys, space.copy);
  space.queries = carver.take<Query>(sizes.task_queries);
  space.bundles = carver.take<Bundle>(task_rows);
  if (sizes.trees) {
    space.own_scores = carver.take<float>(task_rows * kChunkKeys);
    carve_copy(carver, sizes, kOwnKeys, space.own_copy);
  }
  return carver.used;
}

static void carve(const Sizes& sizes, Workspace& space) {
  size_t bytes = carve(nullptr, sizes, space);
  carve(scratch(bytes), sizes, space);
}

}  // namespace QUIRE_ISA
}  // namespace quire
