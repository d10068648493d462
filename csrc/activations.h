// Activations in int8, one scale for each 32 values: x = scale * code. Written by the op that computes them, read by
// products on quantized panels.
//
// Rows lie in tiles of R, the number that one kernel call multiplies, and a tile in records of one block each. Tiles of a
// step may differ in R; a row takes the same number of bytes in each. In a record the rows are interleaved, so that a
// kernel finds all it needs at fixed distances from one pointer:
//   R x 32   codes: [8 quads][R][4], or [R][32] where tiles of AMX read them
//   R x 4    scales                                                                                          float32
//   R x 4    scale times the sum of codes                                                                    float32
//   R x 4    -128 times the sum of codes, then the same of the first 16 values (R), and of the last 16 (R)   int32
// Rows that fill up a last tile are zero.
#pragma once

#include <cstdint>

#include "panels.h"

namespace quire {

struct Activations {
  uint8_t* data;
  int64_t cols;

  static constexpr int64_t row_bytes(int64_t cols) { return cols / kBlock * 52; }
};

// One block of a tile of R rows.
template <int R>
struct Record {
  static constexpr int64_t bytes = 52 * R;
  static constexpr int64_t scales = 32 * R, sums = 36 * R, shifts = 40 * R, half_shifts = 44 * R;
};

}  // namespace quire
