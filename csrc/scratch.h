// Working memory of a thread, for as long as a kernel runs. It grows to the largest wish and stays.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// At least `bytes` bytes at a multiple of 64, this thread's own; an earlier call's memory is given up by this one.
uint8_t* scratch(size_t bytes);

}  // namespace quire
