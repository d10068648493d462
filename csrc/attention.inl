// Attention over the paged cache: any mix of rows, online softmax. Query heads of one key head are computed together.
// attention.h has the arguments. All threads of a team call it. The steps are:
//   attention_plan.inl      divides the work among threads
//   attention_pages.inl     finds keys and values in the pages
//   attention_products.inl  computes the two products
//   attention_mask.inl      tells which keys a query sees
//   attention_weights.inl   turns scores into weights
//   attention_tree.inl      adds the own tokens of a draft tree
//   attention_softmax.inl   merges partial results
//
// Keys are processed in chunks of 256, counted from position 0. Each chunk is computed separately: scores, their
// maximum, weights relative to it, weighted sum of values. Then chunks are merged in order. So the result of a query is
// the same bit by bit for any batch, task and division into units. Keys and chunks that a query does not see do not
// change its result. Only the sign of a zero may differ in between; `finish` removes it.
#pragma once

#include "attention.h"
#include "attention_pages.inl"
#include "attention_plan.inl"
#include "attention_products.inl"
#include "attention_mask.inl"
#include "attention_softmax.inl"
#include "attention_tree.inl"
#include "attention_weights.inl"
#include "attention_workspace.inl"
#include "kv_store.inl"
#include "pool.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

// Where a stretch's keys and values come from.
struct Source {
  Pages pages;
  bool in_place;  // false: from the copy
};

// One thread's part of a call.
template <class Item>
struct Attention {
  const AttentionCall& call;
  State state;
  int group, head_dim, value_dim;
  Workspace space;
  AttentionMask mask;
  OwnTokens<Item> own;

  explicit Attention(const AttentionCall& call)
      : call(call), state{call.cache.shape.value_dim}, group(call.heads / call.cache.shape.kv_heads),
        head_dim(call.cache.shape.head_dim), value_dim(call.cache.shape.value_dim), mask{call, nullptr}, own(call, mask, space, group) {
    int task_queries = Tasks(call).tile_queries, most_queries = 0;
    for (int row = 0; row < call.rows.num_rows; ++row) most_queries = larger(most_queries, queries_of(row));
    int stretch_queries = smaller(task_queries * kStretchTasks, most_queries);
    carve({task_queries, stretch_queries, group, head_dim, value_dim, call.rows.paths != nullptr}, space);
    mask.queries = space.queries;
  }

  void run(const Stretch& stretch, const Unit* following) {
    const Task& first = stretch.units[0].task;
    const float* q = gather_queries(stretch);
    const Source source{open_pages(call.cache, call.rows, first.row, first.head), reads_pages(stretch)};
    if (first.tree) own.open(source.pages, first);
    for (int index = stretch.first_chunk(); index < stretch.last_chunk(); ++index) {
      Chunk chunk;
      open_chunk(stretch, source.pages, index * kChunkKeys, chunk);
      const Unit* next = index == stretch.last_chunk() - 1 ? following : nullptr;
      if (chunk.located) look_ahead(stretch, source.pages, next, chunk);
      for (int i = 0; i < stretch.count; ++i) {
        const Unit& unit = stretch.units[i];
        int row = (unit.task.first_query - first.first_query) * group;
        float* total = space.total + row * state.stride();
        if (unit.has(index)) run_unit(unit, index, source, q + row * head_dim, chunk, total);
      }
    }
  }

  // Merges the parts of a shared task, for every `turns`-th row from row `turn` on.
  void join(const Unit& unit, int turn, int turns) {
    const Task& task = unit.task;
    int rows = task.num_queries * group;
    for (int row = turn; row < rows; row += turns) {
      float* total = unit.parts + row * state.stride();
      for (int chunk = 1; chunk < task.last_chunk() - task.first_chunk(); ++chunk) {
        state.merge(1, total, total + int64_t{chunk} * rows * state.stride());
      }
      state.finish(total, out_of(task, row), sink_of(task, row));
    }
  }

 private:
  int queries_of(int row) const { return call.rows.query_starts[row + 1] - call.rows.query_starts[row]; }

  int64_t token_of(const Task& task, int query) const {
    return int64_t{call.rows.query_starts[task.row]} + task.first_query + query;
  }

  float* out_of(const Task& task, int row) const {
    int64_t head = int64_t{task.head} * group + row % group;
    return call.out + token_of(task, row / group) * call.out_stride + head * value_dim;
  }

  const float* sink_of(const Task& task, int row) const {
    return call.sinks ? call.sinks + int64_t{task.head} * group + row % group : nullptr;
  }

  // The stretch's rows of q, [rows][head_dim]. The heads of a single query have this layout and are not copied.
  const float* gather_queries(const Stretch& stretch) {
    const Task &first = stretch.units[0].task, &last = stretch.units[stretch.count - 1].task;
    const int num_queries = last.first_query + last.num_queries - first.first_query, size = group * head_dim;
    const float* from = call.q + token_of(first, 0) * call.q_stride + int64_t{first.head} * size;
    if (num_queries == 1) return from;
    for (int query = 0; query < num_queries; ++query, from += call.q_stride) {
      for (int i = 0; i < size; i += kLanes) store(space.q + query * size + i, load(from + i));
    }
    return space.q;
  }

  // The rows of one task read the pages in place: their keys stay in the core's cache. More rows share a copy.
  bool reads_pages(const Stretch& stretch) const {
    return side_by_side(call.cache.shape.block_size) && stretch.count == 1;
  }

  void open_chunk(const Stretch& stretch, const Pages& pages, int position, Chunk& chunk) {
    const Task& task = stretch.units[0].task;
    int last_key = task.tree ? smaller(task.context, stretch.last_key()) : stretch.last_key();
    set_wanted(chunk, position, stretch.first_key(), last_key);
    chunk.located = side_by_side(pages.block_size) && chunk.begin < chunk.end;
    if (chunk.located) {
      locate(pages, chunk);
    } else if (Item::scaled) {
      copy_scales(pages, space.copy, chunk);
    }
    if (Item::scaled && task.tree) own.set_scales(task, chunk);
    space.copy.restart(chunk);
  }

  // Sets what is prefetched at the end of a chunk: the stretch's next chunk, or the first one of the following unit.
  void look_ahead(const Stretch& stretch, const Pages& pages, const Unit* following, Chunk& chunk) const {
    if (following != nullptr) {
      const Task& other = following->task;
      int first = larger(other.first_key, following->first_chunk * kChunkKeys);
      extend_stream(open_pages(call.cache, call.rows, other.row, other.head), first, other.last_key, chunk);
    } else {
      extend_stream(pages, chunk.position + kChunkKeys, stretch.last_key(), chunk);
    }
  }

  // Computes one chunk for the rows of one unit.
  void run_unit(const Unit& unit, int index, const Source& source, const float* q, Chunk& chunk, float* total) {
    const Task& task = unit.task;
    const int rows = task.num_queries * group;
    const bool first = index == unit.first_chunk, last = index == unit.last_chunk - 1;
    if (!mask.has(task)) mask.set_task(task);
    set_bundles(rows, chunk);
    if (unit.parts != nullptr) {
      float* part = unit.parts + int64_t{index - task.first_chunk()} * rows * state.stride();
      return run_chunk(source, q, chunk, part);
    }
    run_chunk(source, q, chunk, first ? total : space.part);
    if (!first) state.merge(rows, total, space.part);
    if (!last) return;
    for (int row = 0; row < rows; ++row) {
      state.finish(total + row * state.stride(), out_of(task, row), sink_of(task, row));
    }
  }

  void set_bundles(int rows, const Chunk& chunk) {
    space.num_bundles = 0;
    for (int row = 0; row < rows;) {
      Bundle& bundle = space.bundles[space.num_bundles++];
      bundle = {row, even_part(rows - row, kMaxRows), kChunkKeys, 0, 0};
      row += bundle.count;
      for (int i = bundle.row / group; i <= (row - 1) / group; ++i) {
        bundle.begin = smaller(bundle.begin, mask.queries[i].first_key - chunk.position);
        bundle.end = larger(bundle.end, mask.queries[i].last_key - chunk.position);
      }
      bundle.begin = larger(bundle.begin, chunk.begin);
      bundle.end = smaller(bundle.end, kChunkKeys);
      bundle.read_end = chunk.end > bundle.begin ? smaller(bundle.end, chunk.end) : 0;
    }
  }

  // Computes one chunk for some rows, from scores to states.
  void run_chunk(const Source& source, const float* q, Chunk& chunk, float* into) {
    const bool has_own = own.are_in(chunk);
    score_chunk(source, q, chunk);
    if (has_own) own.add_products(q, chunk);
    soften_rows(chunk, into);
    weigh_chunk(source, chunk, into);
    if (has_own) own.add_values(chunk, into);
  }

  // All rows use a copied vector before the next one is copied.
  void score_chunk(const Source& source, const float* q, Chunk& chunk) {
    if (source.in_place) return score_rows<Item>(q, chunk, {0, kChunkVectors});
    const Vectors wanted = wanted_vectors();
    for (int vector = wanted.first; vector < wanted.last; vector += kCopyVectors) {
      copy_keys<Item>(source.pages, space.copy, smaller(vector + kCopyVectors, wanted.last), chunk);
      score_rows<CopiedItem>(q, chunk, {vector, vector + kCopyVectors});
    }
  }

  void weigh_chunk(const Source& source, Chunk& chunk, float* into) {
    if (source.in_place) return weigh_rows<Item>(chunk, {0, kChunkVectors}, into);
    const Vectors wanted = wanted_vectors();
    for (int vector = wanted.first; vector < wanted.last; vector += kCopyVectors) {
      copy_values<Item>(source.pages, space.copy, smaller(vector + kCopyVectors, wanted.last), chunk);
      weigh_rows<CopiedItem>(chunk, {vector, vector + kCopyVectors}, into);
    }
  }

  // The chunk's vectors that any of the bundles needs, from a multiple of kCopyVectors on.
  Vectors wanted_vectors() const {
    Vectors wanted{kChunkVectors, 0};
    for (int i = 0; i < space.num_bundles; ++i) {
      wanted.first = smaller(wanted.first, space.bundles[i].first_vector());
      wanted.last = larger(wanted.last, space.bundles[i].read_vector());
    }
    wanted.first = wanted.first / kCopyVectors * kCopyVectors;
    return wanted;
  }

  template <class ChunkItem>
  void score_rows(const float* q, const Chunk& chunk, Vectors vectors) {
    for (int i = 0; i < space.num_bundles; ++i) {
      const Bundle& bundle = space.bundles[i];
      int from = larger(vectors.first, bundle.first_vector()), to = smaller(vectors.last, bundle.read_vector());
      float* scores = space.scores + bundle.row * kChunkKeys;
      score<ChunkItem>(bundle.count, q + bundle.row * head_dim, head_dim, chunk, from, to, scores);
    }
  }

  void soften_rows(const Chunk& chunk, float* into) const {
    Weights<Item> weights{call, mask, state, group};
    for (int i = 0; i < space.num_bundles; ++i) {
      const Bundle& bundle = space.bundles[i];
      weights.soften(bundle, chunk, space.scores + bundle.row * kChunkKeys, into + bundle.row * state.stride());
    }
  }

  template <class ChunkItem>
  void weigh_rows(const Chunk& chunk, Vectors vectors, float* into) {
    for (int i = 0; i < space.num_bundles; ++i) {
      const Bundle& bundle = space.bundles[i];
      int begin = larger(vectors.first * kLanes, bundle.begin), end = smaller(vectors.last * kLanes, bundle.read_end);
      const float* weights = space.scores + bundle.row * kChunkKeys;
      float* sums = into + bundle.row * state.stride();
      weigh<ChunkItem>(bundle.count, weights, value_dim, chunk, begin, end, sums, state.stride());
    }
  }
};

template <class Item>
static bool attend(const AttentionCall& call, Worker& worker) {
  Attention<Item> attention(call);
  Plan plan(call, worker, attention.state.stride());
  Unit unit;
  Stretch stretch;
  bool shared = false, mine;
  while (plan.next(unit, mine)) {
    shared |= unit.parts != nullptr;
    if (!mine) continue;
    if (!stretch.takes(unit)) {
      attention.run(stretch, &unit);
      stretch.count = 0;
    }
    stretch.add(unit);
  }
  if (stretch.count > 0) attention.run(stretch, nullptr);
  return shared;
}

template <class Item>
static void join(const AttentionCall& call, Worker& worker) {
  Attention<Item> attention(call);
  Plan plan(call, worker, attention.state.stride());
  Unit unit;
  bool mine;
  while (plan.next(unit, mine)) {
    if (unit.parts != nullptr) attention.join(unit, worker.index, worker.count());
  }
}

// Writes `out` for every token, except for those whose contexts several workers share. Returns true if there are any:
// then join_attention must be called when all workers are done. All workers return the same.
bool attention(const AttentionCall& call, Worker& worker) {
  switch (call.cache.shape.type) {
    case CacheType::F32: return attend<F32Item>(call, worker);
    case CacheType::BF16: return attend<BF16Item>(call, worker);
    case CacheType::INT8: return attend<INT8Item>(call, worker);
    case CacheType::FP8: break;
  }
  return attend<FP8Item>(call, worker);
}

void join_attention(const AttentionCall& call, Worker& worker) {
  switch (call.cache.shape.type) {
    case CacheType::F32: return join<F32Item>(call, worker);
    case CacheType::BF16: return join<BF16Item>(call, worker);
    case CacheType::INT8: return join<INT8Item>(call, worker);
    case CacheType::FP8: return join<FP8Item>(call, worker);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
