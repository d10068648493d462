// Packs codes that a reader has taken out of a file, one in a byte, with the scales of their groups. pack.cpp packs the
// blocks of GGUF files.
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "pack.h"

namespace quire {
namespace {

void check_code(const CodeRows& rows, int64_t row, int64_t col) {
  const int code = rows.codes[row * rows.cols + col];
  const bool number = rows.tables || rows.levels[code] == rows.levels[code];
  if (code < rows.code_limit && number) return;
  throw std::invalid_argument("row " + std::to_string(row) + " has code " + std::to_string(code) +
                              ", which is no number; the file is damaged.");
}

float checked_scale(const CodeRows& rows, int64_t row, int64_t group) {
  const float scale = rows.scales[row * rows.groups() + group];
  if (std::isfinite(scale)) return scale;
  throw std::invalid_argument("row " + std::to_string(row) +
                              " has a scale that is not a finite number; the file is damaged.");
}

}  // namespace

void dequantize_codes(const CodeRows& rows, int64_t row, float* out) {
  const float* levels = rows.tables ? rows.tables + row * kTableSize : rows.levels;
  for (int64_t group = 0, col = 0; col < rows.cols; ++group) {
    const float scale = checked_scale(rows, row, group);
    const float zero = rows.zeros ? rows.zeros[row * rows.groups() + group] : 0.0f;
    const int64_t end = rows.cols - col < rows.group ? rows.cols : col + rows.group;
    for (; col < end; ++col) {
      check_code(rows, row, col);
      out[col] = scale * (levels[rows.codes[row * rows.cols + col]] - zero);
    }
  }
}

void pack_codes(const Panels& panels, const CodeRows& rows, int64_t first, int64_t count) {
  std::vector<float> values(static_cast<size_t>(kLanes * rows.cols));
  for (int64_t row = 0; row < count; row += kLanes) {
    const int64_t live = count - row < kLanes ? count - row : kLanes;
    for (int64_t lane = 0; lane < live; ++lane) dequantize_codes(rows, row + lane, values.data() + lane * rows.cols);
    pack_dense(panels, Codes::F32, values.data(), rows.cols, first + row, live);
  }
}

}  // namespace quire
