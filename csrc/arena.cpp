// A bump allocator over regions of address space (map_memory in system.h). A lock protects the state.
// Memory is allocated while a model is loaded and freed when Python frees a matrix, never during a step.
#include "arena.h"

#include <mutex>

#include "system.h"

namespace quire {

// Memory is never reused, so memory that is not written yet is zero.
struct Region {
  uint8_t* base;
  size_t bytes, used, pieces;
};

namespace {

constexpr size_t kRegionBytes = size_t{64} << 20;
constexpr size_t kAlignment = 64;

size_t align_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

class Arena {
 public:
  Region* take(size_t bytes, uint8_t** data) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (current_ == nullptr || bytes > current_->bytes - current_->used) current_ = add_region(bytes);
    *data = current_->base + current_->used;
    current_->used += align_up(bytes, kAlignment);
    ++current_->pieces;
    return current_;
  }

  void give_back(Region* region, uint8_t* data, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--region->pieces > 0) return free_pages(data, bytes);
    if (region == current_) current_ = nullptr;
    unmap_memory(region->base, region->bytes);
    use_ = {use_.regions - 1, use_.bytes - static_cast<int64_t>(region->bytes)};
    delete region;
  }

  ArenaUse use() {
    std::lock_guard<std::mutex> lock(mutex_);
    return use_;
  }

 private:
  Region* add_region(size_t bytes) {
    size_t size = bytes < kRegionBytes ? kRegionBytes : align_up(bytes, kHugePage);
    auto* region = new Region{nullptr, size, 0, 0};
    try {
      region->base = map_memory(size);
    } catch (...) {
      delete region;
      throw;
    }
    use_ = {use_.regions + 1, use_.bytes + static_cast<int64_t>(size)};
    return region;
  }

  std::mutex mutex_;
  Region* current_ = nullptr;
  ArenaUse use_{0, 0};
};

// Never destroyed: Python may free a matrix after the destructors of static objects have run.
Arena& arena() {
  static Arena& instance = *new Arena;
  return instance;
}

}  // namespace

ArenaPiece::ArenaPiece(size_t bytes) : data_(nullptr), bytes_(bytes) { region_ = arena().take(bytes, &data_); }

ArenaPiece::~ArenaPiece() { arena().give_back(region_, data_, bytes_); }

ArenaUse arena_use() { return arena().use(); }

}  // namespace quire
