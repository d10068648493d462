// Ranks: the processes that compute one model together. They map the same pages. In one of them they meet, and rank 0
// gives commands: it rings, the other ranks carry out what it has written, and rank 0 waits until they are done. Python
// writes and reads commands (kernels/cpu/ranks.py). When a rank has died, nobody waits any more.
#pragma once

#include <cstddef>
#include <cstdint>

#include "barrier.h"

namespace quire {

constexpr int kMaxRanks = 64;

// Shared. Zero is its first state.
struct RankPage {
  std::atomic<uint32_t> broken;  // 1: a rank has died
  alignas(kCacheLine) std::atomic<int> arrived;
  SharedSignal meetings;         // number of meetings that have ended
  SharedSignal commands;         // number of commands that rank 0 has given
  SharedSignal done[kMaxRanks];  // number of commands that each rank has carried out
};

class Ranks {
 public:
  // `crowded`: all ranks together have more threads than there are cores, so waiting threads sleep at once.
  Ranks(uintptr_t page, int rank, int size, bool crowded);
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // Waits until all ranks have called it.
  void meet();

  // Rank 0: gives a command, and waits until the other ranks have carried it out.
  void ring();
  void wait_until_done();

  // Other ranks: wait for the next command, and report that they have carried it out.
  void wait_for_command();
  void report_done();

  void set_broken() { page_->broken.store(1, std::memory_order_release); }
  bool broken() const { return page_->broken.load(std::memory_order_acquire) != 0; }

 private:
  void wait(SharedSignal& signal, uint32_t value, Patience patience);

  RankPage* page_;
  int rank_, size_;
  Patience within_command_, between_commands_;
  uint32_t num_commands_ = 0;
};

}  // namespace quire
