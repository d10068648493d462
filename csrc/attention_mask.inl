// Which keys each query of a task sees: those from the start of its window up to its own position. Computed for 16 keys
// at a time. attention.inl calls it. In a draft tree a query's keys are the context and its path, see
// attention_tree.inl, so this holds there too.
#pragma once

#include "attention.h"
#include "attention_plan.inl"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

// The keys that one query of a task sees, by position: [first_key, last_key).
struct Query {
  int position;
  int first_key, last_key;
};

// [first, last); empty if last <= first.
struct Vectors {
  int first, last;
};

// Which keys the queries of one task see, and their distances.
struct AttentionMask {
  const AttentionCall& call;
  Query* queries;  // of the task
  Task task = {};

  bool has(const Task& other) const {
    return task.num_queries > 0 && task.row == other.row && task.head == other.head &&
           task.first_query == other.first_query;
  }

  // Sets the task and its queries. The other functions refer to it.
  void set_task(const Task& new_task) {
    task = new_task;
    for (int i = 0; i < task.num_queries; ++i) {
      Query& query = queries[i];
      query.position = task.context + depth_of(task.first_query + i);
      query.first_key = call.window > 0 ? larger(0, query.position - call.window + 1) : 0;
      query.last_key = query.position + 1;
    }
  }

  // The vectors of 16 keys, counted from `position`, of which the query sees all keys.
  Vectors whole_vectors(const Query& query, int position) const {
    int first = (larger(0, query.first_key - position) + kLanes - 1) / kLanes;
    return {first, larger(0, query.last_key - position) / kLanes};
  }

  // The positions of 16 keys minus the query's position.
  f32 distances(const Query& query, int key) const { return set1(static_cast<float>(key - query.position)) + iota(); }

  // One bit for each of 16 keys: whether the query sees it.
  uint32_t visible(const Query& query, int key) const {
    int first = smaller(kLanes, larger(0, query.first_key - key));
    int last = smaller(kLanes, larger(0, query.last_key - key));
    return ((1u << last) - 1) & ~((1u << first) - 1);
  }

 private:
  int depth_of(int query) const {
    return task.tree ? call.rows.depth(call.rows.query_starts[task.row] + query) : query;
  }
};

}  // namespace QUIRE_ISA
}  // namespace quire
