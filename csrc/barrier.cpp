#include "barrier.h"

#include <chrono>
#include <thread>

namespace quire {

namespace {

constexpr int kPauses = 64;  // between two reads of the clock: a few microseconds

int64_t now() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

// No wake-up is lost. The setter writes the value and then reads the number of sleepers. A sleeper increments the
// number and then reads the value. With the fences at least one of them reads what the other wrote.
template <class AnySleepers>
void BasicSignal<AnySleepers>::wake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (num_sleepers_.load(std::memory_order_relaxed) != 0) sleepers_.wake_all(value_);
}

template <class AnySleepers>
void BasicSignal<AnySleepers>::sleep_while(uint32_t value) {
  num_sleepers_.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  sleepers_.sleep_while(value_, value);
  num_sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

template <class AnySleepers>
bool BasicSignal<AnySleepers>::changes_soon(uint32_t value) const {
  for (int i = 0; i < kPauses; ++i) {
    if (this->value() != value) return true;
    relax_core();
  }
  return false;
}

template <class AnySleepers>
void BasicSignal<AnySleepers>::wait_while(uint32_t value, Patience patience) {
  if (changes_soon(value)) return;
  int64_t begin = now();
  while (now() - begin < patience.spin) {
    if (changes_soon(value)) return;
  }
  while (now() - begin < patience.yield) {
    if (this->value() != value) return;
    std::this_thread::yield();
  }
  sleep_while(value);
}

template class BasicSignal<Sleepers>;
template class BasicSignal<SharedSleepers>;

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
