// The threads that kernels run on. One pool a process, shared by all engines: a team is the caller and the first
// workers of the pool, who spin between two calls that follow closely and sleep in the kernel otherwise. Teams of
// different callers take turns. Nothing here knows what is computed.
#pragma once

#include <cstdint>

#include "barrier.h"

namespace quire {

class Pool;

// The threads that run one job together. Every one of them calls the same barriers in the same order.
class Team {
 public:
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Waits until all threads of the team have come here; what they wrote before is seen by all after it.
  void barrier();

  // Waits until the signal has another value.
  void wait_while(Signal& signal, uint32_t value);

 private:
  friend class Pool;
  Team(int size, Pool* pool) : size_(size), pool_(pool) {}

  int size_;
  Pool* pool_;
};

// What a job is called with: which thread of the team this is, 0 being the caller.
struct Worker {
  Team& team;
  int index;

  int count() const { return team.size(); }
  void barrier() { team.barrier(); }
};

using Job = void (*)(void* argument, Worker worker);

// Runs a job on `threads` threads at once and returns when all are done. Calls from several threads wait for each
// other. A job must not call this itself, nor throw, nor fork. Throws std::invalid_argument if `threads` is not
// positive and std::runtime_error if the system refuses a thread. With one thread the job runs in the caller alone and
// waits for nobody.
void run_team(int threads, Job job, void* argument);

// The part of `count` equal items that falls to a worker: [first, last). Parts differ by at most one `grain`.
struct Span {
  int64_t first, last;
};

// static: instruction sets are compiled apart, and none may run another's copy.
static inline Span share(const Worker& worker, int64_t count, int64_t grain = 1) {
  int64_t grains = (count + grain - 1) / grain;
  int64_t first = grains * worker.index / worker.count() * grain;
  int64_t last = grains * (worker.index + 1) / worker.count() * grain;
  return {first < count ? first : count, last < count ? last : count};
}

}  // namespace quire
