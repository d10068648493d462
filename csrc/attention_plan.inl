// Divides one call of attention among threads. The work consists of tasks: a task is one tile of a row's queries for
// one key head. The costs of all tasks are added up in order, and each thread gets an equal part of the sum. A long
// task that crosses a boundary is divided by chunks of its keys, if `partials` has space for the parts. Whole tasks of
// one thread that see the same keys form a stretch. All threads compute the same plan, so they do not communicate.
// attention.inl calls it.
#pragma once

#include "attention.h"
#include "attention_products.inl"
#include "pool.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int kTaskRows = 48;     // the number of rows that share keys in L1, if there are enough
constexpr int kStretchTasks = 16;  // at most; their rows share one copy of a chunk in L2

QUIRE_INLINE int smaller(int a, int b) { return a < b ? a : b; }
QUIRE_INLINE int larger(int a, int b) { return a > b ? a : b; }

struct Task {
  int row, head;                       // of the rows and of the key heads
  int first_query, num_queries;        // among the row's queries
  int context, seq_len;                // the row's length before its queries, and with them
  int first_key, last_key;             // positions that at least one query may see: [first_key, last_key)
  bool tree;                           // the row's queries are a draft tree

  int first_chunk() const { return first_key / kChunkKeys; }
  int last_chunk() const { return (last_key + kChunkKeys - 1) / kChunkKeys; }
};

// Iterates over the tasks of a call in order.
struct Tasks {
  const AttentionCall& call;
  int group, tile_queries;
  int row = 0, head = 0, query = 0;

  explicit Tasks(const AttentionCall& call) : call(call), group(call.heads / call.cache.shape.kv_heads) {
    tile_queries = larger(1, kTaskRows / group);
  }

  bool next(Task& task) {
    const Rows& rows = call.rows;
    for (; row < rows.num_rows; ++row, head = 0, query = 0) {
      int num_queries = rows.query_starts[row + 1] - rows.query_starts[row];
      if (query >= num_queries) {
        query = 0;
        ++head;
      }
      if (num_queries == 0 || head == call.cache.shape.kv_heads) continue;
      task = at(num_queries);
      query += task.num_queries;
      return true;
    }
    return false;
  }

  int64_t cost(const Task& task) const {
    constexpr int reading = 4;     // the fixed cost of a key, in rows
    constexpr int beginning = 32;  // the fixed cost of a row, in keys
    int64_t keys = task.last_key - task.first_key, rows = int64_t{task.num_queries} * group;
    return keys * reading + (keys + beginning) * rows;
  }

 private:
  Task at(int num_queries) const {
    Task task;
    task.row = row;
    task.head = head;
    task.first_query = query;
    task.num_queries = smaller(tile_queries, num_queries - query);
    task.seq_len = call.rows.seq_lens[row];
    task.context = task.seq_len - num_queries;
    task.tree = call.rows.has_tree(row);
    // Queries of a tree are at any depth up to the length of the longest path.
    int position = task.context + (task.tree ? 0 : query);
    int span = task.tree ? smaller(num_queries, static_cast<int>(call.rows.path_stride)) : task.num_queries;
    task.first_key = call.window > 0 ? larger(0, position - call.window + 1) : 0;
    task.last_key = position + span;
    return task;
  }
};

// A task, or some of its chunks, for one thread. `parts` is null for a whole task.
struct Unit {
  Task task;
  int first_chunk, last_chunk;
  float* parts;  // of the task's first chunk

  bool has(int chunk) const { return first_chunk <= chunk && chunk < last_chunk; }
};

// Units that one thread computes together, chunk by chunk: consecutive tiles of a row's queries for one key head.
struct Stretch {
  Unit units[kStretchTasks];
  int count = 0;

  // Shared units are not joined: their chunks may differ from those of their neighbours.
  bool takes(const Unit& unit) const {
    if (count == 0) return true;
    const Task &last = units[count - 1].task, &task = unit.task;
    bool whole = units[0].parts == nullptr && unit.parts == nullptr;
    return whole && count < kStretchTasks && last.row == task.row && last.head == task.head;
  }

  void add(const Unit& unit) { units[count++] = unit; }

  // The first and the last visible key do not decrease from one tile to the next.
  int first_chunk() const { return units[0].first_chunk; }
  int last_chunk() const { return units[count - 1].last_chunk; }
  int first_key() const { return units[0].task.first_key; }
  int last_key() const { return units[count - 1].task.last_key; }
};

// Iterates over the units of one thread.
struct Plan {
  Tasks tasks;
  int index, count;
  int64_t part_floats;  // for one row of one chunk
  int64_t total = 0, done = 0;
  int64_t used = 0;     // floats of call.partials

  Plan(const AttentionCall& call, const Worker& worker, int64_t part_floats)
      : tasks(call), index(worker.index), count(worker.count()), part_floats(part_floats) {
    Tasks all(call);
    for (Task task; all.next(task);) total += all.cost(task);
  }

  // Advances to the next task. Sets `mine` if this thread has a unit of it, and then the unit. False after the last
  // task.
  bool next(Unit& unit, bool& mine) {
    Task& task = unit.task;
    if (!tasks.next(task)) return false;
    int64_t cost = tasks.cost(task), start = done;
    done += cost;
    unit.parts = nullptr;
    unit.first_chunk = task.first_chunk();
    unit.last_chunk = task.last_chunk();
    if (owner(start) == owner(done - 1)) {
      mine = owner(start) == index;
    } else if (!take_room(unit, cost)) {
      mine = owner(start + cost / 2) == index;
    } else {
      int chunks = unit.last_chunk - unit.first_chunk;
      int first = unit.first_chunk + first_of(index, start, cost, chunks);
      unit.last_chunk = unit.first_chunk + first_of(index + 1, start, cost, chunks);
      unit.first_chunk = first;
      mine = unit.first_chunk < unit.last_chunk;
    }
    return true;
  }

 private:
  int owner(int64_t place) const { return static_cast<int>(place * count / total); }

  // The first of a task's chunks whose middle is in the part of thread `who` or of a later one.
  int first_of(int who, int64_t start, int64_t cost, int chunks) const {
    int chunk = 0;
    while (chunk < chunks && owner(start + cost * (2 * chunk + 1) / (2 * chunks)) < who) ++chunk;
    return chunk;
  }

  // Shares a task only if it is at least an eighth of a thread's work: the merge costs a barrier.
  bool take_room(Unit& unit, int64_t cost) {
    int chunks = unit.last_chunk - unit.first_chunk;
    int64_t floats = part_floats * chunks * unit.task.num_queries * tasks.group;
    if (chunks < 2 || cost * count * 8 < total || used + floats > tasks.call.num_partials) return false;
    unit.parts = tasks.call.partials + used;
    used += floats;
    return true;
  }
};

}  // namespace QUIRE_ISA
}  // namespace quire
