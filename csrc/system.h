// What depends on the operating system or the processor, apart from the kernels: memory, threads, signals, and sleeping
// until a number changes. Linux has calls of its own. With QUIRE_PORTABLE they are not used, so that Linux can test
// what other systems run.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#if defined(__linux__) && !defined(QUIRE_PORTABLE)
#define QUIRE_LINUX
#else
#include <condition_variable>
#include <mutex>
#endif

namespace quire {

// Tells the core that this thread spins.
inline void relax_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield` does nothing on most cores
#endif
}

// How this thread rounds and whether it flushes denormals: the processor's control register.
uint64_t float_mode();
void set_float_mode(uint64_t mode);

// Cores that this process may run on.
int count_cores();

// At most 15 characters.
void name_this_thread(const char* name);

// Calls f in the child after each fork.
void call_after_fork(void (*f)());

// Blocks all signals of the calling thread until it is destroyed. New threads inherit the signal mask.
class BlockedSignals {
 public:
  BlockedSignals();
  ~BlockedSignals();
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  alignas(16) unsigned char before_[128];  // holds a sigset_t
};

// Address space whose pages are zero and are allocated when they are first written. On Linux it uses huge pages if it
// can. Throws std::bad_alloc.
constexpr size_t kHugePage = size_t{2} << 20;
uint8_t* map_memory(size_t bytes);
void unmap_memory(uint8_t* base, size_t bytes);

// Frees the pages that lie completely in [data, data + bytes). Their content is lost.
void free_pages(uint8_t* data, size_t bytes);

// Threads that sleep until a number changes.
class Sleepers {
 public:
  void sleep_while(const std::atomic<uint32_t>& number, uint32_t value);

  // Called after the number has changed. A thread that is about to sleep is not missed.
  void wake_all(const std::atomic<uint32_t>& number);

#ifndef QUIRE_LINUX
 private:
  std::mutex mutex_;
  std::condition_variable changed_;
#endif
};

// The same for threads of several processes, for a number in pages that they share. A sleeper returns after a tenth of
// a second even if the number has not changed: a process that has died changes none.
class SharedSleepers {
 public:
  void sleep_while(const std::atomic<uint32_t>& number, uint32_t value);
  void wake_all(const std::atomic<uint32_t>& number);
};

// The kernel kills this process when the thread that started it ends. Only Linux does.
void end_with_parent();

}  // namespace quire
