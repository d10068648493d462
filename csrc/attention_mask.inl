// Which keys each query of a task sees: by position, by window, or by the mask of a draft tree. Computed for 16 keys at
// a time. attention.inl calls it.
#pragma once

#include "attention.h"
#include "attention_plan.inl"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

// The keys that one query of a task sees. In a draft tree a mask selects the row's own tokens. All other keys are
// selected by position.
struct Query {
  int position;
  int first_key, last_key;
  const uint8_t* own;  // mask of the row's own tokens, or null
};

// [first, last); empty if last <= first.
struct Vectors {
  int first, last;
};

// Which keys the queries of one task see, and their distances.
struct AttentionMask {
  const AttentionCall& call;
  Query* queries;        // of the task
  int* depths;           // of the row's tokens in the tree, if needs_depths
  int depths_row = -1;   // the row of `depths`
  Task task = {};

  // Depths in a tree are needed only for windows and slopes, which depend on positions.
  static bool needs_depths(const AttentionCall& call) {
    return call.rows.ancestors != nullptr && (call.window > 0 || call.slopes != nullptr);
  }

  // Sets the task and its queries. The other functions refer to it.
  void set_task(const Task& new_task) {
    task = new_task;
    if (needs_depths(call) && depths_row != task.row) set_depths();
    for (int i = 0; i < task.num_queries; ++i) {
      Query& query = queries[i];
      query.position = task.context + task.first_query + i;
      query.last_key = query.position + 1;
      query.own = nullptr;
      if (call.rows.ancestors != nullptr) set_tree_query(i, query);
      query.first_key = call.window > 0 ? larger(0, query.position - call.window + 1) : 0;
      if (query.own != nullptr) query.first_key = smaller(query.first_key, task.context);
    }
  }

  // The vectors of 16 keys, counted from `position`, of which the query sees all keys.
  Vectors whole_vectors(const Query& query, int position) const {
    int last_key = query.own != nullptr ? smaller(task.context, query.last_key) : query.last_key;
    int first = (larger(0, query.first_key - position) + kLanes - 1) / kLanes;
    return {first, larger(0, last_key - position) / kLanes};
  }

  // The positions of 16 keys minus the query's position.
  f32 distances(const Query& query, int key) const {
    if (!among_own(query, key)) return set1(static_cast<float>(key - query.position)) + iota();
    float lanes[kLanes] = {};
    int last = smaller(kLanes, task.seq_len - key);
    for (int i = 0; i < last; ++i) lanes[i] = static_cast<float>(position_of(key + i) - query.position);
    return load(lanes);
  }

  // One bit for each of 16 keys: whether the query sees it.
  uint32_t visible(const Query& query, int key) const {
    int first = smaller(kLanes, larger(0, query.first_key - key));
    int last = smaller(kLanes, larger(0, query.last_key - key));
    uint32_t bits = ((1u << last) - 1) & ~((1u << first) - 1);
    if (!among_own(query, key)) return bits;
    for (int i = larger(first, task.context - key); i < last; ++i) {
      bool hidden = query.own[key + i - task.context] == 0;
      if (call.window > 0) hidden |= position_of(key + i) <= query.position - call.window;
      if (hidden) bits &= ~(1u << i);
    }
    return bits;
  }

 private:
  const uint8_t* mask_of(int query) const {
    return call.rows.ancestors + (call.rows.query_starts[task.row] + query) * call.rows.ancestors_stride;
  }

  void set_tree_query(int i, Query& query) {
    query.own = mask_of(task.first_query + i);
    if (needs_depths(call)) query.position = task.context + depths[task.first_query + i];
    query.last_key = task.seq_len;
    while (query.last_key > task.context && query.own[query.last_key - 1 - task.context] == 0) --query.last_key;
  }

  void set_depths() {
    int num_queries = task.seq_len - task.context;
    for (int i = 0; i < num_queries; ++i) {
      const uint8_t* own = mask_of(i);
      int depth = -1;
      for (int j = 0; j < num_queries; ++j) depth += own[j] != 0;
      depths[i] = depth;
    }
    depths_row = task.row;
  }

  // Whether any of 16 keys is a token of a tree.
  bool among_own(const Query& query, int key) const {
    return query.own != nullptr && key + kLanes > task.context;
  }

  int position_of(int key) const {
    return key < task.context || !needs_depths(call) ? key : task.context + depths[key - task.context];
  }
};

}  // namespace QUIRE_ISA
}  // namespace quire
