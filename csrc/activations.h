// Activations in int8, with one scale for each 32 values: x = scale * code. The op that computes them writes them, and
// products with quantized panels read them.
//
// Rows are stored in tiles of R rows. R is the number of rows that one kernel call multiplies. A tile consists of
// records, one for each block. Tiles of a step may differ in R; a row takes the same number of bytes in each. In a
// record the rows are interleaved, so a kernel reads everything at fixed offsets from one pointer:
//   R x 32   codes: [8 quads][R][4], or [R][32] for AMX tiles
//   R x 4    scales                                                                                          float32
//   R x 4    scale times the sum of codes                                                                    float32
//   R x 4    -128 times the sum of codes, then the same of the first 16 values (R), and of the last 16 (R)   int32
// Padding rows of the last tile are zero.
#pragma once

#include <cstdint>

#include "panels.h"

namespace quire {

struct Activations {
  uint8_t* data;
  int64_t cols;
  bool by_rows;  // with many rows, each worker writes and reads only its own rows
  int64_t first = 0, width = 0;  // an op writes columns [first, first + width); with width 0 all of them

  int64_t blocks_written() const { return (width > 0 ? width : cols) / kBlock; }
  static constexpr int64_t row_bytes(int64_t cols) { return cols / kBlock * 52; }
};

// One block of a tile of R rows.
template <int R>
struct Record {
  static constexpr int64_t bytes = 52 * R;
  static constexpr int64_t scales = 32 * R, sums = 36 * R, shifts = 40 * R, half_shifts = 44 * R;
};

}  // namespace quire
