// GGUF blocks as float32, on any processor. Used while a model is loaded, from any thread, without the pool.
#pragma once

#include <cstdint>

namespace quire {

// Values and bytes of a block of a GGUF type. Both are 0 if `dequantize_blocks` does not support the type.
struct BlockSize {
  int64_t values, bytes;
};

BlockSize block_size_of(int ggml_type);

// Writes the values of `count` blocks. Products and sums are rounded one by one, so the bits equal those of
// quire/quant/unpack.py.
void dequantize_blocks(int ggml_type, const uint8_t* blocks, int64_t count, float* out);

}  // namespace quire
