// Packing and unpacking of panels. Used while a model is loaded (from any thread, without the pool) and for embeddings.
#pragma once

#include <cstdint>

#include "panels.h"

namespace quire {

inline bool operator==(const Format& a, const Format& b) {
  return a.codes == b.codes && a.scales == b.scales && a.offset == b.offset && a.table == b.table &&
         a.shift == b.shift;
}

// Packs rows [first, first + count) from the blocks of a GGUF file, which are at `source`, row after row. `ggml_type`
// is the type's number in the file; format_of_gguf must map it to the panels' format. first is a multiple of 16. count
// is one too, except for the last rows. Panels that were not written before must be zero.
void pack_gguf(const Panels& panels, int ggml_type, const uint8_t* source, int64_t first, int64_t count);

// The same from dense rows [count, cols] in `type` (F32, BF16 or F16), `source_stride` values apart. For a quantized
// format the values are rounded: U8 D with d = max|x| / 127, U4 DM with 15 steps (levels.h). Throws
// std::invalid_argument if a value is not finite or needs a scale that is too large for float16.
void pack_dense(const Panels& panels, Codes type, const void* source, int64_t source_stride, int64_t first,
                int64_t count);

// Whether pack_dense supports a format.
bool dense_packable(const Format& format);

constexpr int kTableSize = 16;

// Rows of codes as a reader makes them (quire/quant/code_format.py): value = scale * (levels[code] - zero). Groups of
// columns share a scale and a zero; the last group may be shorter.
struct CodeRows {
  const uint8_t* codes;  // [rows][cols]
  int64_t cols;
  int code_limit;  // codes are below it
  int64_t group;
  const float* scales;   // [rows][groups]
  const uint8_t* zeros;  // [rows][groups], or null
  const float* levels;   // [256]
  const float* tables;   // [rows][16] in place of levels, or null

  int64_t groups() const { return (cols + group - 1) / group; }
};

// Packs rows [first, first + count) of panels, which are the rows from 0 on of `rows`. Throws std::invalid_argument for
// a scale that is not finite and for a code above the limit.
void pack_codes(const Panels& panels, const CodeRows& rows, int64_t first, int64_t count);

// Writes row `row` as `cols` float32 values.
void unpack_row(const Panels& panels, int64_t row, float* out);

// The panel format that holds a GGUF type without loss, or false if there is none.
bool format_of_gguf(int ggml_type, Format* format);

}  // namespace quire
