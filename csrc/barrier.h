// Signal: a number that one thread sets and other threads wait for. Barrier is built on it. A waiting thread first
// spins, then yields its core, then sleeps in the kernel. Setting needs a system call only if a thread sleeps.
// SharedSignal is the same for threads of several processes.
#pragma once

#include <atomic>
#include <cstdint>

#include "system.h"

namespace quire {

// Two cache lines: processors fetch them in pairs.
constexpr int kCacheLine = 128;

// When a waiting thread stops spinning and when it stops yielding, in nanoseconds since it began to wait.
struct Patience {
  int64_t spin, yield;
};

template <class AnySleepers>
class BasicSignal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  // A thread that reads `value` also sees all earlier writes. Sleeping threads continue only after `wake`.
  void set(uint32_t value) { value_.store(value, std::memory_order_release); }
  void wake();

  // Returns when the value has changed. A SharedSignal may return earlier.
  void wait_while(uint32_t value, Patience patience);

 private:
  bool changes_soon(uint32_t value) const;
  void sleep_while(uint32_t value);

  alignas(kCacheLine) std::atomic<uint32_t> value_{0};
  alignas(kCacheLine) std::atomic<uint32_t> num_sleepers_{0};
  AnySleepers sleepers_;
};

using Signal = BasicSignal<Sleepers>;
using SharedSignal = BasicSignal<SharedSleepers>;  // in pages that the processes share, which are zero at first

class Barrier {
 public:
  // Arrives without waiting. The barrier opens when the last of `size` threads arrives.
  void arrive(int size);

  // Arrives and waits until the barrier opens.
  void arrive_and_wait(int size, Patience patience);

 private:
  alignas(kCacheLine) std::atomic<int> arrived_{0};
  Signal phase_;
};

}  // namespace quire
