// The threads that kernels run on. A process has one pool, which all engines share. A team consists of the caller and
// the first workers of the pool. Workers spin for a short time after a job and then sleep in the kernel. Teams of
// different callers run one after another.
#pragma once

#include <cstdint>

#include "barrier.h"

namespace quire {

class Pool;

// The threads that run one job together. All of them call the same barriers in the same order.
class Team {
 public:
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Waits until all threads of the team have arrived. After it, all threads see what each wrote before it.
  void barrier();

  // Waits until the signal's value is not `value`.
  void wait_while(Signal& signal, uint32_t value);

 private:
  friend class Pool;
  Team(int size, Pool* pool) : size_(size), pool_(pool) {}

  int size_;
  Pool* pool_;
};

// The argument of a job: the team, and which of `parts` parts of the work is computed. A job is called with one part for
// each thread, and the caller has index 0. Only such a worker may wait at a barrier.
struct Worker {
  Team& team;
  int index, parts;

  int count() const { return parts; }
  void barrier() { team.barrier(); }
};

using Job = void (*)(void* argument, Worker worker);

// Runs a job on `threads` threads at once and returns when all are done. Concurrent calls run one after another. A job
// must not call this function, throw or fork. Throws std::invalid_argument if `threads` is not positive, and
// std::runtime_error if a thread cannot be started. With one thread the job runs in the caller, without a lock.
void run_team(int threads, Job job, void* argument);

// A worker's part of `count` equal items: [first, last). Parts differ by at most one `grain`.
struct Span {
  int64_t first, last;
};

// static: each instruction set must use its own compiled copy.
static inline Span share(const Worker& worker, int64_t count, int64_t grain = 1) {
  int64_t grains = (count + grain - 1) / grain;
  int64_t first = grains * worker.index / worker.count() * grain;
  int64_t last = grains * (worker.index + 1) / worker.count() * grain;
  return {first < count ? first : count, last < count ? last : count};
}

// Part `index` of `parts` of a span.
static inline Span part_of(Span all, int64_t index, int64_t parts) {
  const int64_t count = all.last - all.first;
  return {all.first + count * index / parts, all.first + count * (index + 1) / parts};
}

// With many rows, a part of the work is some rows, in every op of a program. Otherwise parts divide what is computed
// for each row.
constexpr int kOwnRows = 16;   // for each part, at least
constexpr int kMostRows = 64;  // for each part: their values stay in L2
static inline bool has_own_rows(const Worker& worker, int64_t rows) { return rows >= kOwnRows * worker.count(); }

// A worker's part of `rows` rows with `items` items each, in items.
static inline Span share_rows(const Worker& worker, int64_t rows, int64_t grain, int64_t items = 1) {
  if (!has_own_rows(worker, rows)) return share(worker, rows * items);
  const Span own = share(worker, rows, grain);
  return {own.first * items, own.last * items};
}

}  // namespace quire
