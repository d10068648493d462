// Makes GGUF blocks of float32 values, on any processor. `quire quantize` calls this from its own threads.
#pragma once

#include <cstdint>

namespace quire {

// Whether `quantize_blocks` makes blocks of a type.
bool can_quantize(int ggml_type);

// Quantizes rows of `cols` values. `importance` [cols] are the mean squares of the inputs that a column is multiplied
// with; null: all columns count alike. `cols` is a multiple of the block's values.
void quantize_blocks(int ggml_type, const float* values, int64_t rows, int64_t cols, const float* importance,
                     uint8_t* out);

// The grid of each run of blocks: value = scale * code + base. Writes one of each for every value.
void read_grids(int ggml_type, const uint8_t* blocks, int64_t count, float* scales, float* bases);

// The smallest and the largest code of a type.
void code_limits(int ggml_type, float* low, float* high);

// Replaces the codes of blocks, and keeps their scales.
void write_codes(int ggml_type, uint8_t* blocks, int64_t count, const float* codes);

}  // namespace quire
