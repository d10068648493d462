// Where packed matrices live: regions of memory in huge pages, filled in the order of construction, so that the weights
// of a model lie in the order in which a step reads them. Nothing here knows what is stored. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

struct Region;

// A piece of a region, zeros at first, at a multiple of 64. Its pages go back to the system with it, the region with
// the last of its pieces.
class ArenaPiece {
 public:
  // Throws std::bad_alloc if the system has no such memory.
  explicit ArenaPiece(size_t bytes);
  ~ArenaPiece();
  ArenaPiece(const ArenaPiece&) = delete;
  ArenaPiece& operator=(const ArenaPiece&) = delete;

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  Region* region_;
  uint8_t* data_;
  size_t bytes_;
};

// Regions that exist, and the bytes of address space they take.
struct ArenaUse {
  int64_t regions, bytes;
};

ArenaUse arena_use();

}  // namespace quire
