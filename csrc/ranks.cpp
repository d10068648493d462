#include "ranks.h"

namespace quire {

namespace {

// As those of the pool's threads.
constexpr Patience kBetweenCommands{200'000, 1'000'000};
constexpr Patience kWithinCommand{300'000, 300'000};
constexpr Patience kCrowded{0, 0};

}  // namespace

Ranks::Ranks(uintptr_t page, int rank, int size, bool crowded)
    : page_(reinterpret_cast<RankPage*>(page)),
      rank_(rank),
      size_(size),
      within_command_(crowded ? kCrowded : kWithinCommand),
      between_commands_(crowded ? kCrowded : kBetweenCommands) {}

void Ranks::wait(SharedSignal& signal, uint32_t value, Patience patience) {
  while (signal.value() == value && !broken()) signal.wait_while(value, patience);
}

void Ranks::meet() {
  const uint32_t meeting = page_->meetings.value();
  if (page_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < size_)
    return wait(page_->meetings, meeting, within_command_);
  page_->arrived.store(0, std::memory_order_relaxed);
  page_->meetings.set(meeting + 1);
  page_->meetings.wake();
}

void Ranks::ring() {
  page_->commands.set(++num_commands_);
  page_->commands.wake();
}

void Ranks::wait_until_done() {
  for (int rank = 1; rank < size_; ++rank) {
    SharedSignal& done = page_->done[rank];
    for (uint32_t count = done.value(); count != num_commands_ && !broken(); count = done.value())
      wait(done, count, within_command_);
  }
}

void Ranks::wait_for_command() {
  wait(page_->commands, num_commands_, between_commands_);
  ++num_commands_;
}

void Ranks::report_done() {
  page_->done[rank_].set(num_commands_);
  page_->done[rank_].wake();
}

}  // namespace quire
