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

  int first_vector() const { return begin / kLanes; }
  int last_vector() const { return (end + kLanes - 1) / kLanes; }
};

struct Workspace {
  float* q;          // [stretch rows][head_dim]
  float* scores;     // [task rows][kChunkKeys]
  float* total;      // [stretch rows] states
  float* part;       // [task rows] states
  Copy copy;
  Query* queries;    // [task queries]
  Bundle* bundles;   // [task rows], the first num_bundles are set
  int num_bundles;
  int* depths;       // [row's queries]: depths in a draft tree
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
  int group, head_dim, depths;
};

static size_t carve(uint8_t* data, const Sizes& sizes, Workspace& space) {
  Carver carver{data};
  const int64_t task_rows = int64_t{sizes.task_queries} * sizes.group;
  const int64_t stretch_rows = int64_t{sizes.stretch_queries} * sizes.group;
  const int64_t stride = State{sizes.head_dim}.stride();
  space.q = carver.take<float>(stretch_rows * sizes.head_dim);
  space.scores = carver.take<float>(task_rows * kChunkKeys);
  space.total = carver.take<float>(stretch_rows * stride);
  space.part = carver.take<float>(task_rows * stride);
  space.copy.keys = carver.take<float>(int64_t{sizes.head_dim} * kChunkKeys);
  space.copy.values = carver.take<float>(int64_t{sizes.head_dim} * kChunkKeys);
  space.copy.key_scales = carver.take<float>(kChunkKeys);
  space.copy.value_scales = carver.take<float>(kChunkKeys);
  space.queries = carver.take<Query>(sizes.task_queries);
  space.bundles = carver.take<Bundle>(task_rows);
  space.depths = carver.take<int>(sizes.depths);
  return carver.used;
}

static void carve(const Sizes& sizes, Workspace& space) {
  size_t bytes = carve(nullptr, sizes, space);
  carve(scratch(bytes), sizes, space);
}

}  // namespace QUIRE_ISA
}  // namespace quire
