// The memory of packed matrices: regions in huge pages, filled in the order of construction. So the weights of a model
// are in the order in which a step reads them. Safe to call from any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

struct Region;

// A piece of a region, initially zero, aligned to 64 bytes. Its destructor returns its pages to the system. The region
// is unmapped with the last of its pieces.
class ArenaPiece {
 public:
  // Throws std::bad_alloc if the system has too little memory.
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

// The number of regions, and their bytes of address space.
struct ArenaUse {
  int64_t regions, bytes;
};

ArenaUse arena_use();

}  // namespace quire
