// The working memory of a thread during a kernel. It grows to the largest size requested and is kept.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// At least `bytes` bytes of this thread's memory, aligned to 64. Invalidates the memory of earlier calls.
uint8_t* scratch(size_t bytes);

}  // namespace quire
