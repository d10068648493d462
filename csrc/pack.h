// Into panels and out of them. Called while a model is loaded (any thread, no pool) and for embedding rows.
#pragma once

#include <cstdint>

#include "panels.h"

namespace quire {

inline bool operator==(const Format& a, const Format& b) {
  return a.codes == b.codes && a.scales == b.scales && a.offset == b.offset;
}

// Writes rows [first, first + count) from the blocks of a GGUF file (`ggml_type` is the number the file uses), row
// after row at `source`. first is a multiple of 16; count too, unless the rows are the last ones. The type is one that
// format_of_gguf maps to the panels' format; panels not written before are zeros.
void pack_gguf(const Panels& panels, int ggml_type, const uint8_t* source, int64_t first, int64_t count);

// The same from plain rows [count, cols] in `type` (F32, BF16 or F16), `source_stride` values apart. A quantized
// format is reached by rounding: U8 D with d = max|x| / 127, U4 DM with the range cut into 15 steps. Throws
// std::invalid_argument for a value that is not finite or needs a scale beyond float16.
void pack_dense(const Panels& panels, Codes type, const void* source, int64_t source_stride, int64_t first,
                int64_t count);

// Whether pack_dense can reach a format.
bool dense_packable(const Format& format);

// Row `row` as float32, cols of them.
void unpack_row(const Panels& panels, int64_t row, float* out);

// The panel format that holds a GGUF type without loss, or false if there is none.
bool format_of_gguf(int ggml_type, Format* format);

}  // namespace quire
