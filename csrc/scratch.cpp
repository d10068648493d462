// Implements scratch.h: one buffer for each thread, freed when the thread ends.
#include "scratch.h"

#include <new>

namespace quire {
namespace {

constexpr size_t kAlignment = 64;

struct Buffer {
  uint8_t* data = nullptr;
  size_t size = 0;

  ~Buffer() { release(); }

  void release() { ::operator delete(data, std::align_val_t{kAlignment}); }

  // Grows by at least half, so that slowly growing requests do not allocate every time.
  void grow(size_t bytes) {
    size_t wish = bytes > size + size / 2 ? bytes : size + size / 2;
    release();
    data = nullptr;
    size = 0;
    data = static_cast<uint8_t*>(::operator new(wish, std::align_val_t{kAlignment}));
    size = wish;
  }
};

thread_local Buffer buffer;

}  // namespace

uint8_t* scratch(size_t bytes) {
  if (bytes > buffer.size || buffer.data == nullptr) buffer.grow(bytes > 0 ? bytes : 1);
  return buffer.data;
}

}  // namespace quire
