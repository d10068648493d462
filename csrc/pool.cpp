#include "pool.h"

#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "barrier.h"
#include "system.h"

namespace quire {

namespace {

// Between jobs: longer than the gap between two steps of an engine, and short enough not to slow down other processes.
constexpr Patience kBetweenJobs{200'000, 1'000'000};
constexpr Patience kWithinJob{20'000, 1'000'000};

// With more threads than cores: a thread that spins or yields would occupy the core of a thread that it waits for.
constexpr Patience kCrowded{0, 0};

}  // namespace

// Never destroyed: workers are detached and may still read it while the process exits.
class Pool {
 public:
  void run(int threads, Job job, void* argument);
  static void run_alone(Job job, void* argument);
  void wait_for_team() { barrier_.arrive_and_wait(team_.size_, patience()); }
  Patience patience() const { return crowded_ ? kCrowded : kWithinJob; }

 private:
  // A worker's signal. A worker waits until the number of calls increases.
  struct Seat {
    Pool* pool;
    int index;
    Signal calls;
  };

  void start_workers(int count);
  void start_worker(int index);
  static void work(Seat* seat);
  Patience take_part(int index);

  std::mutex turn_;
  std::vector<Seat*> seats_;
  int num_cores_ = 1;  // counted when workers are started: the process's affinity may change before that

  // The caller writes these before it calls the workers. The team's workers read them until the last one is done.
  Job job_ = nullptr;
  void* argument_ = nullptr;
  uint64_t float_mode_ = 0;
  bool crowded_ = false;
  Team team_{1, this};
  Barrier barrier_;
};

void Team::barrier() {
  if (size_ > 1) pool_->wait_for_team();
}

void Team::wait_while(Signal& signal, uint32_t value) {
  signal.wait_while(value, pool_ ? pool_->patience() : kWithinJob);
}

void Pool::run_alone(Job job, void* argument) {
  Team team(1, nullptr);
  job(argument, Worker{team, 0, 1});
}

void Pool::run(int threads, Job job, void* argument) {
  std::lock_guard<std::mutex> turn(turn_);
  start_workers(threads - 1);
  job_ = job;
  argument_ = argument;
  float_mode_ = float_mode();
  team_.size_ = threads;
  crowded_ = threads > num_cores_;
  for (int i = 0; i < threads - 1; ++i) seats_[i]->calls.set(seats_[i]->calls.value() + 1);
  for (int i = 0; i < threads - 1; ++i) seats_[i]->calls.wake();
  job(argument, Worker{team_, 0, threads});
  wait_for_team();
}

// A worker uses the caller's floating-point mode, so that a result does not depend on which thread computes it. Returns
// the patience for the next job. It is read first: after the last worker has arrived, the next caller may change the
// members.
Patience Pool::take_part(int index) {
  Patience patience = crowded_ ? kCrowded : kBetweenJobs;
  set_float_mode(float_mode_);
  job_(argument_, Worker{team_, index, team_.size_});
  barrier_.arrive(team_.size_);
  return patience;
}

void Pool::work(Seat* seat) {
  char name[16];
  std::snprintf(name, sizeof name, "quire-%d", seat->index);
  name_this_thread(name);
  Patience patience = kBetweenJobs;
  for (uint32_t calls = 0;; ++calls) {
    seat->calls.wait_while(calls, patience);
    patience = seat->pool->take_part(seat->index);
  }
}

// Workers block all signals, so that Ctrl-C reaches the main thread.
void Pool::start_workers(int count) {
  if (static_cast<int>(seats_.size()) >= count) return;
  num_cores_ = count_cores();
  BlockedSignals blocked;
  while (static_cast<int>(seats_.size()) < count) start_worker(static_cast<int>(seats_.size()) + 1);
}

void Pool::start_worker(int index) {
  seats_.reserve(index);
  Seat* seat = new Seat{this, index, {}};
  try {
    std::thread(work, seat).detach();
  } catch (const std::system_error& error) {
    delete seat;
    throw std::runtime_error("Thread " + std::to_string(index) + " of the pool could not be started: " +
                             error.code().message() + ". Use fewer threads or raise the limit on processes.");
  }
  seats_.push_back(seat);
}

namespace {

Pool* pool = new Pool;

// After a fork the child has no workers, and a thread that does not exist in it may hold the lock. So it gets a new
// pool.
void renew_pool() { pool = new Pool; }

const bool kRegistered = (call_after_fork(renew_pool), true);

}  // namespace

void run_team(int threads, Job job, void* argument) {
  if (threads < 1) throw std::invalid_argument("A team has at least 1 thread, not " + std::to_string(threads) + ".");
  if (threads == 1) return Pool::run_alone(job, argument);
  pool->run(threads, job, argument);
}

}  // namespace quire
