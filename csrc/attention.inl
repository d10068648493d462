// Attention over the paged cache: any mix of rows, online softmax, heads that share a key head computed together.
// attention.h says what is asked; this file strings together who does what (attention_plan.inl), the way to the pages
// (attention_pages.inl), the products (attention_products.inl), what is seen (attention_sight.inl) and the merging of
// parts (attention_softmax.inl). Called by all threads of a team.
//
// Keys come in chunks of 256, counted from position 0. A chunk is computed for itself: scores, their highest, weights
// relative to it, weighted sum of values; then chunks are merged in their order. So the result of a query is the same
// bit by bit whoever shares its step, its task or its chunks, and keys or chunks that it does not see leave it as it
// is. Zeros may differ in their sign on the way, which is taken off at the end.
#pragma once

#include "attention.h"
#include "attention_pages.inl"
#include "attention_plan.inl"
#include "attention_products.inl"
#include "attention_sight.inl"
#include "attention_softmax.inl"
#include "kv_store.inl"
#include "pool.h"
#include "scratch.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int kDirectRows = 12;  // up to so many rows read from the pages, more share a copy

struct Workspace {
  float* q;        // [task rows][head_dim]
  float* scores;   // [task rows][kChunkKeys]
  float* total;    // [task rows] states
  float* part;     // the same
  Copy copy;
  Query* queries;  // [tile queries]
  int* depths;     // [row's queries] of a tree: how far below the context they stand
};

// Hands out pieces of one buffer; counts only, while there is none.
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

static size_t carve(uint8_t* data, int task_rows, int tile_queries, int head_dim, int depths, Workspace& space) {
  Carver carver{data};
  space.q = carver.take<float>(int64_t{task_rows} * head_dim);
  space.scores = carver.take<float>(int64_t{task_rows} * kChunkKeys);
  space.total = carver.take<float>(task_rows * State{head_dim}.stride());
  space.part = carver.take<float>(task_rows * State{head_dim}.stride());
  space.copy.items = carver.take<float>(int64_t{head_dim} * kCopyKeys);
  space.copy.key_scales = carver.take<float>(kChunkKeys);
  space.copy.value_scales = carver.take<float>(kChunkKeys);
  space.queries = carver.take<Query>(tile_queries);
  space.depths = carver.take<int>(depths);
  return carver.used;
}

// One thread's part of a call.
template <class Item>
struct Attention {
  const AttentionCall& call;
  State state;
  int group, head_dim;
  Workspace space;
  Sight sight;

  explicit Attention(const AttentionCall& call)
      : call(call), state{call.cache.shape.head_dim}, group(call.heads / call.cache.shape.kv_heads),
        head_dim(call.cache.shape.head_dim), sight{call, nullptr, nullptr} {
    int tile_queries = Tasks(call).tile_queries;
    int depths = 0;
    if (Sight::needs_depths(call)) {
      for (int row = 0; row < call.rows.num_rows; ++row) depths = larger(depths, queries_of(row));
    }
    size_t bytes = carve(nullptr, tile_queries * group, tile_queries, head_dim, depths, space);
    carve(scratch(bytes), tile_queries * group, tile_queries, head_dim, depths, space);
    sight.queries = space.queries;
    sight.depths = space.depths;
  }

  int queries_of(int row) const { return call.rows.query_starts[row + 1] - call.rows.query_starts[row]; }

  int64_t token_of(const Task& task, int query) const {
    return int64_t{call.rows.query_starts[task.row]} + task.first_query + query;
  }

  void run(const Unit& unit, const Unit* following) {
    const Task& task = unit.task;
    sight.face(task);
    const float* q = gather_queries(task);
    Pages pages = open_pages(call.cache, call.rows, task.row, task.head);
    int rows = task.num_queries * group;
    for (int chunk = unit.first_chunk; chunk < unit.last_chunk; ++chunk) {
      bool first = chunk == unit.first_chunk;
      float* into = first ? space.total : space.part;
      if (unit.parts != nullptr) into = unit.parts + (chunk - task.first_chunk()) * rows * state.stride();
      bool last = chunk == unit.last_chunk - 1;
      run_chunk(task, pages, q, chunk * kChunkKeys, into, last ? following : nullptr);
      if (unit.parts == nullptr && !first) merge(rows, space.total, into);
    }
    if (unit.parts == nullptr) finish(task);
  }

  // The rows of a shared task whose turn it is, put together from its parts.
  void join(const Unit& unit, int turn, int turns) {
    const Task& task = unit.task;
    int rows = task.num_queries * group;
    for (int row = turn; row < rows; row += turns) {
      float* total = unit.parts + row * state.stride();
      for (int chunk = 1; chunk < task.last_chunk() - task.first_chunk(); ++chunk) {
        state.merge(total, total + int64_t{chunk} * rows * state.stride());
      }
      state.finish(total, out_of(task, row));
    }
  }

 private:
  void merge(int rows, float* total, const float* part) const {
    for (int row = 0; row < rows; ++row) state.merge(total + row * state.stride(), part + row * state.stride());
  }

  void finish(const Task& task) const {
    for (int row = 0; row < task.num_queries * group; ++row) {
      state.finish(space.total + row * state.stride(), out_of(task, row));
    }
  }

  float* out_of(const Task& task, int row) const {
    int64_t head = int64_t{task.head} * group + row % group;
    return call.out + token_of(task, row / group) * call.out_stride + head * head_dim;
  }

  // The task's rows of q, [rows][head_dim]: one query's heads are that already.
  const float* gather_queries(const Task& task) {
    int64_t offset = int64_t{task.head} * group * head_dim;
    if (task.num_queries == 1) return call.q + token_of(task, 0) * call.q_stride + offset;
    int size = group * head_dim;
    for (int query = 0; query < task.num_queries; ++query) {
      const float* from = call.q + token_of(task, query) * call.q_stride + offset;
      for (int i = 0; i < size; i += kLanes) store(space.q + query * size + i, load(from + i));
    }
    return space.q;
  }

  void run_chunk(const Task& task, const Pages& pages, const float* q, int position, float* into,
                 const Unit* following) {
    Chunk chunk;
    set_wanted(chunk, position, task.first_key, task.last_key);
    bool whole = side_by_side(pages.block_size);
    if (whole) {
      locate(pages, chunk);
    } else if (Item::scaled) {
      copy_scales(pages, space.copy, chunk);
    }
    if (whole && task.num_queries * group <= kDirectRows) {
      look_ahead(task, pages, position + kChunkKeys, following, chunk);
      run_direct(task, q, chunk, into);
    } else {
      run_copied(task, pages, q, chunk, into);
    }
  }

  // What is fetched at a chunk's end: the task's next chunk, or the first one of the following unit.
  void look_ahead(const Task& task, const Pages& pages, int position, const Unit* following, Chunk& chunk) const {
    if (following != nullptr) {
      const Task& other = following->task;
      int first = larger(other.first_key, following->first_chunk * kChunkKeys);
      extend_stream(open_pages(call.cache, call.rows, other.row, other.head), first, other.last_key, chunk);
    } else {
      extend_stream(pages, position, task.last_key, chunk);
    }
  }

  void run_direct(const Task& task, const float* q, const Chunk& chunk, float* into) {
    score_rows<Item>(task, q, chunk, chunk.first_vector(), chunk.last_vector());
    soften_rows(task, chunk, into);
    weigh_rows<Item>(task, chunk, chunk.first_vector(), chunk.last_vector(), into);
  }

  void run_copied(const Task& task, const Pages& pages, const float* q, Chunk& chunk, float* into) {
    const int first = chunk.first_vector() / kCopyVectors * kCopyVectors, end = chunk.last_vector();
    for (int vector = first; vector < end; vector += kCopyVectors) {
      int from = larger(vector, chunk.first_vector()), to = smaller(vector + kCopyVectors, end);
      copy_keys<Item>(pages, space.copy, from, to, chunk);
      score_rows<CopiedItem>(task, q, chunk, from, to);
    }
    soften_rows(task, chunk, into);
    for (int vector = first; vector < end; vector += kCopyVectors) {
      int from = larger(vector, chunk.first_vector()), to = smaller(vector + kCopyVectors, end);
      copy_values<Item>(pages, space.copy, from, to, chunk);
      weigh_rows<CopiedItem>(task, chunk, from, to, into);
    }
  }

  // Rows that are computed together, and what of a chunk any of them sees.
  struct Bundle {
    int row, count;
    int begin, end;  // keys of the chunk; none if end <= begin

    int first_vector() const { return begin / kLanes; }
    int last_vector() const { return (end + kLanes - 1) / kLanes; }
  };

  Bundle bundle_at(const Task& task, int row, const Chunk& chunk) const {
    Bundle bundle{row, even_part(task.num_queries * group - row, kMaxRows), chunk.end, chunk.begin};
    for (int i = row / group; i <= (row + bundle.count - 1) / group; ++i) {
      bundle.begin = smaller(bundle.begin, sight.queries[i].first_key - chunk.position);
      bundle.end = larger(bundle.end, sight.queries[i].last_key - chunk.position);
    }
    bundle.begin = larger(bundle.begin, chunk.begin);
    bundle.end = smaller(bundle.end, chunk.end);
    return bundle;
  }

  template <class ChunkItem>
  void score_rows(const Task& task, const float* q, const Chunk& chunk, int first, int last) {
    for (int row = 0; row < task.num_queries * group;) {
      Bundle bundle = bundle_at(task, row, chunk);
      int from = larger(first, bundle.first_vector()), to = smaller(last, bundle.last_vector());
      score<ChunkItem>(bundle.count, q + row * head_dim, head_dim, chunk, from, to, space.scores + row * kChunkKeys);
      row += bundle.count;
    }
  }

  template <class ChunkItem>
  void weigh_rows(const Task& task, const Chunk& chunk, int first, int last, float* into) {
    for (int row = 0; row < task.num_queries * group;) {
      Bundle bundle = bundle_at(task, row, chunk);
      int begin = larger(first * kLanes, bundle.begin), end = smaller(last * kLanes, bundle.end);
      const float* weights = space.scores + row * kChunkKeys;
      weigh<ChunkItem>(bundle.count, weights, head_dim, chunk, begin, end, into + row * state.stride(), state.stride());
      row += bundle.count;
    }
  }

  // Turns products with the keys into weights, and begins the state of each row with their sum.
  void soften_rows(const Task& task, const Chunk& chunk, float* into) const {
    for (int row = 0; row < task.num_queries * group;) {
      Bundle bundle = bundle_at(task, row, chunk);
      for (int last = row + bundle.count; row < last; ++row) {
        float* scores = space.scores + row * kChunkKeys;
        float* softmax = into + row * state.stride();
        f32 best = shape_row(task, row, chunk, bundle, scores);
        float top = largest(max(best, set1(kLowest)));
        store(state.weight(softmax), weigh_row(chunk, bundle, top, scores));
        *state.highest(softmax) = top;
        state.clear_sums(softmax);
      }
    }
  }

  // Turns one row's scores into weights and returns their sum.
  f32 weigh_row(const Chunk& chunk, const Bundle& bundle, float top, float* scores) const {
    const int first = bundle.first_vector(), last = bundle.last_vector();
    f32 total = zero();
    for (int vector = first; vector < last; ++vector) {
      f32 weight = exp(load(scores + vector * kLanes) - set1(top));
      total = total + weight;
      if (Item::scaled) weight = weight * load(chunk.value_scales[vector]);
      store(scores + vector * kLanes, weight);
    }
    return total;
  }

  // Turns one row's products into scores and returns the highest ones. What is not seen is lower than all.
  f32 shape_row(const Task& task, int row, const Chunk& chunk, const Bundle& bundle, float* scores) const {
    const Query& query = sight.queries[row / group];
    const int first = bundle.first_vector(), last = bundle.last_vector();
    const f32 scale = set1(call.scale);
    bool all_seen = sight.all_seen(query, chunk.position + first * kLanes, chunk.position + last * kLanes);
    bool plain = call.softcap == 0 && call.slopes == nullptr && all_seen;
    f32 best = minus_infinity();
    for (int vector = first; vector < last; ++vector) {
      f32 x = load(scores + vector * kLanes);
      if (Item::scaled) x = x * load(chunk.key_scales[vector]);
      x = x * scale;
      if (!plain) x = bend(task, query, row, chunk.position + vector * kLanes, x);
      store(scores + vector * kLanes, x);
      best = max(best, x);
    }
    return best;
  }

  f32 bend(const Task& task, const Query& query, int row, int key, f32 x) const {
    if (call.softcap > 0) x = set1(call.softcap) * tanh(x / set1(call.softcap));
    if (call.slopes != nullptr) {
      float slope = call.slopes[task.head * group + row % group];
      x = fma(set1(slope), sight.distances(query, key), x);
    }
    return select(sight.seen(query, key), x, minus_infinity());
  }
};

template <class Item>
static void attend(const AttentionCall& call, Worker& worker) {
  Attention<Item> attention(call);
  Plan plan(call, worker, attention.state.stride());
  Unit unit, waiting;
  bool any = false, shared = false, mine;
  while (plan.next(unit, mine)) {
    shared |= unit.parts != nullptr;
    if (!mine) continue;
    if (any) attention.run(waiting, &unit);
    waiting = unit;
    any = true;
  }
  if (any) attention.run(waiting, nullptr);
  if (!shared) return;
  worker.barrier();
  Plan again(call, worker, attention.state.stride());
  while (again.next(unit, mine)) {
    if (unit.parts != nullptr) attention.join(unit, worker.index, worker.count());
  }
}

// Writes `out` for every token. Returns without a barrier: whoever reads `out`, or uses `partials` again, needs one.
static void attention(const AttentionCall& call, Worker& worker) {
  switch (call.cache.shape.type) {
    case CacheType::F32: return attend<F32Item>(call, worker);
    case CacheType::BF16: return attend<BF16Item>(call, worker);
    case CacheType::INT8: return attend<INT8Item>(call, worker);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
