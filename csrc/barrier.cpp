#include "barrier.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace quire {

namespace {

constexpr int kPauses = 64;  // between two reads of the clock: a few microseconds

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free,
              "the kernel reads the number behind the atomic");

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

void call_futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, nullptr, nullptr, 0);
}

}  // namespace

// No wake-up is lost. The setter writes the value and then reads the number of sleepers. A sleeper increments the
// number and then reads the value. With the fences at least one of them reads what the other wrote.
void Signal::wake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_relaxed) != 0) call_futex(&value_, FUTEX_WAKE_PRIVATE, INT_MAX);
}

void Signal::sleep_while(uint32_t value) {
  sleepers_.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  while (this->value() == value) call_futex(&value_, FUTEX_WAIT_PRIVATE, value);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

bool Signal::changes_soon(uint32_t value) const {
  for (int i = 0; i < kPauses; ++i) {
    if (this->value() != value) return true;
    _mm_pause();
  }
  return false;
}

void Signal::wait_while(uint32_t value, Patience patience) {
  if (changes_soon(value)) return;
  int64_t begin = now();
  while (now() - begin < patience.spin) {
    if (changes_soon(value)) return;
  }
  while (now() - begin < patience.yield) {
    if (this->value() != value) return;
    sched_yield();
  }
  sleep_while(value);
}

void Barrier::arrive(int size) {
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size) return;
  arrived_.store(0, std::memory_order_relaxed);
  phase_.set(phase_.value() + 1);
  phase_.wake();
}

void Barrier::arrive_and_wait(int size, Patience patience) {
  uint32_t phase = phase_.value();
  arrive(size);
  phase_.wait_while(phase, patience);
}

}  // namespace quire
