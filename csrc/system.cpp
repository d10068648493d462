#include "system.h"

#include <cstring>
#include <new>
#include <thread>

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifdef QUIRE_LINUX
#include <linux/futex.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <climits>
#endif

namespace quire {

uint64_t float_mode() {
  uint64_t mode = 0;
#if defined(__x86_64__)
  mode = __builtin_ia32_stmxcsr();
#elif defined(__aarch64__)
  asm volatile("mrs %0, fpcr" : "=r"(mode));
#endif
  return mode;
}

void set_float_mode([[maybe_unused]] uint64_t mode) {
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr(static_cast<unsigned>(mode));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" ::"r"(mode));
#endif
}

int count_cores() {
#ifdef QUIRE_LINUX
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
#endif
  const unsigned cores_of_machine = std::thread::hardware_concurrency();
  return cores_of_machine > 0 ? static_cast<int>(cores_of_machine) : 1;
}

void name_this_thread([[maybe_unused]] const char* name) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), name);
#elif defined(__APPLE__)
  pthread_setname_np(name);
#endif
}

void call_after_fork(void (*f)()) { pthread_atfork(nullptr, nullptr, f); }

static_assert(sizeof(sigset_t) <= 128, "BlockedSignals has space for a signal mask");

BlockedSignals::BlockedSignals() {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::memcpy(before_, &before, sizeof before);
}

BlockedSignals::~BlockedSignals() {
  sigset_t before;
  std::memcpy(&before, before_, sizeof before);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

uint8_t* map_memory(size_t bytes) {
  size_t mapped = bytes + kHugePage;
  void* start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) throw std::bad_alloc();
  auto* first = static_cast<uint8_t*>(start);
  size_t before = (kHugePage - reinterpret_cast<uintptr_t>(first) % kHugePage) % kHugePage;
  uint8_t* base = first + before;
  if (before > 0) munmap(first, before);
  munmap(base + bytes, kHugePage - before);
#ifdef QUIRE_LINUX
  // The result is not checked: a kernel without huge pages refuses, and small pages are used.
  madvise(base, bytes, MADV_HUGEPAGE);
#endif
  return base;
}

void unmap_memory(uint8_t* base, size_t bytes) { munmap(base, bytes); }

static size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

static void free_whole_pages(void* first, size_t bytes) {
#ifdef __APPLE__
  madvise(first, bytes, MADV_FREE);  // MADV_DONTNEED keeps the pages there
#else
  madvise(first, bytes, MADV_DONTNEED);
#endif
}

void free_pages(uint8_t* data, size_t bytes) {
  const size_t page = page_bytes(), at = reinterpret_cast<uintptr_t>(data);
  const size_t first = (at + page - 1) / page * page, last = (at + bytes) / page * page;
  if (last > first) free_whole_pages(data + (first - at), last - first);
}

#ifdef QUIRE_LINUX

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free,
              "the kernel reads the number behind the atomic");

static void call_futex(const std::atomic<uint32_t>& number, int operation, uint32_t value,
                       const timespec* patience = nullptr) {
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&number), operation, value, patience, nullptr, 0);
}

void Sleepers::sleep_while(const std::atomic<uint32_t>& number, uint32_t value) {
  while (number.load(std::memory_order_acquire) == value) call_futex(number, FUTEX_WAIT_PRIVATE, value);
}

void Sleepers::wake_all(const std::atomic<uint32_t>& number) { call_futex(number, FUTEX_WAKE_PRIVATE, INT_MAX); }

void SharedSleepers::sleep_while(const std::atomic<uint32_t>& number, uint32_t value) {
  const timespec patience{0, 100'000'000};
  if (number.load(std::memory_order_acquire) == value) call_futex(number, FUTEX_WAIT, value, &patience);
}

void SharedSleepers::wake_all(const std::atomic<uint32_t>& number) { call_futex(number, FUTEX_WAKE, INT_MAX); }

void end_with_parent() { prctl(PR_SET_PDEATHSIG, SIGKILL); }

#else

void Sleepers::sleep_while(const std::atomic<uint32_t>& number, uint32_t value) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return number.load(std::memory_order_acquire) != value; });
}

// A sleeper has the lock from its last look at the number until it sleeps. So it sees the change or is woken.
void Sleepers::wake_all(const std::atomic<uint32_t>&) {
  { std::lock_guard<std::mutex> lock(mutex_); }
  changed_.notify_all();
}

void SharedSleepers::sleep_while(const std::atomic<uint32_t>& number, uint32_t value) {
  const timespec pause{0, 50'000};
  if (number.load(std::memory_order_acquire) == value) nanosleep(&pause, nullptr);
}

void SharedSleepers::wake_all(const std::atomic<uint32_t>&) {}

void end_with_parent() {}

#endif

}  // namespace quire
