// A number that one thread sets and others wait for (Signal), and the barrier made of it. Waiting begins with spinning, goes on
// with yielding the core to whoever else wants it and ends asleep in the kernel; setting costs a system call only if
// somebody sleeps.
#pragma once

#include <atomic>
#include <cstdint>

namespace quire {

// Two lines, since processors fetch them in pairs.
constexpr int kCacheLine = 128;

// How long a thread waits for a signal in which way, in nanoseconds since it began to wait.
struct Patience {
  int64_t spin, yield;
};

class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  // What was written before is seen by those who see `value`. Those asleep notice only after `wake`.
  void set(uint32_t value) { value_.store(value, std::memory_order_release); }
  void wake();

  // Returns once the value is another one.
  void wait_while(uint32_t value, Patience patience);

 private:
  bool changes_soon(uint32_t value) const;
  void sleep_while(uint32_t value);

  alignas(kCacheLine) std::atomic<uint32_t> value_{0};
  alignas(kCacheLine) std::atomic<uint32_t> sleepers_{0};
};

class Barrier {
 public:
  // Comes to the barrier, which opens for the last of `size` threads, and goes on at once.
  void arrive(int size);

  // The same, and goes on when it is open.
  void arrive_and_wait(int size, Patience patience);

 private:
  alignas(kCacheLine) std::atomic<int> arrived_{0};
  Signal phase_;
};

}  // namespace quire
