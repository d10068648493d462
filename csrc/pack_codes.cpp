// Packs codes that a reader has taken out of a file, one in a byte, with the scales of their groups. pack.cpp packs the
// blocks of GGUF files.
#include <cmath>
#include <cstring>
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

namespace {

void pack_nibbles(uint8_t* block, int lane, const uint8_t* q) {
  for (int i = 0; i < 16; ++i) block[i / 4 * 64 + 4 * lane + i % 4] = static_cast<uint8_t>(q[i] | q[i + 16] << 4);
}

void pack_bytes(uint8_t* block, int lane, const uint8_t* q) {
  for (int i = 0; i < kBlock; i += 4) std::memcpy(block + i * kLanes + 4 * lane, q + i, 4);
}

void pack_pairs(uint8_t* block, int lane, const uint8_t* q) {
  for (int h = 0; h < 2; ++h) {
    for (int i = 0; i < 4; ++i) {
      int byte = 0;
      for (int t = 0; t < 4; ++t) byte |= (q[16 * h + 4 * t + i] & 3) << 2 * t;
      block[64 * h + 4 * lane + i] = static_cast<uint8_t>(byte);
    }
  }
}

// Lanes are packed in ascending order into masks that were zero.
void pack_third_bits(uint8_t* masks, int lane, const uint8_t* q) {
  for (int i = 0; i < kBlock; ++i) {
    const int bit = 4 * lane + i % 4;
    masks[i / 4 * 8 + bit / 8] |= static_cast<uint8_t>((q[i] >> 2) << bit % 8);
  }
}

void pack_block(Codes codes, uint8_t* block, int lane, const uint8_t* q) {
  switch (codes) {
    case Codes::U2: return pack_pairs(block, lane, q);
    case Codes::U3: pack_pairs(block, lane, q); return pack_third_bits(block + 128, lane, q);
    case Codes::U8: return pack_bytes(block, lane, q);
    default: return pack_nibbles(block, lane, q);
  }
}

void pack_scales(const Panels& panels, const CodeRows& rows, int64_t row, uint8_t* scales, int lane) {
  uint8_t* zeros = scales + panels.groups() * 64;
  for (int64_t group = 0; group < panels.groups(); ++group) {
    const float scale = checked_scale(rows, row, group);
    std::memcpy(scales + group * 64 + 4 * lane, &scale, 4);
    if (panels.format.scales == Scales::GROUP_Z) zeros[group * kLanes + lane] = rows.zeros[row * rows.groups() + group];
  }
}

// Codes and scales as they are.
void pack_row(const Panels& panels, const CodeRows& rows, int64_t row, int64_t panel, int lane) {
  for (int64_t col = 0; col < rows.cols; ++col) check_code(rows, row, col);
  pack_scales(panels, rows, row, panels.scales(panel), lane);
  const uint8_t* codes = rows.codes + row * rows.cols;
  uint8_t* to = panels.codes(panel);
  if (panels.format.codes == Codes::F8) {
    for (int64_t col = 0; col < rows.cols; ++col) to[col * kLanes + lane] = codes[col];
    return;
  }
  for (int64_t block = 0; block < panels.blocks(); ++block, to += block_bytes(panels.format.codes))
    pack_block(panels.format.codes, to, lane, codes + block * kBlock);
}

}  // namespace

void pack_codes(const Panels& panels, const CodeRows& rows, int64_t first, int64_t count) {
  if (panels.format.grouped()) {
    for (int64_t row = 0; row < count; ++row)
      pack_row(panels, rows, row, (first + row) / kLanes, static_cast<int>((first + row) % kLanes));
    return;
  }
  std::vector<float> values(static_cast<size_t>(kLanes * rows.cols));
  for (int64_t row = 0; row < count; row += kLanes) {
    const int64_t live = count - row < kLanes ? count - row : kLanes;
    for (int64_t lane = 0; lane < live; ++lane) dequantize_codes(rows, row + lane, values.data() + lane * rows.cols);
    pack_dense(panels, Codes::F32, values.data(), rows.cols, first + row, live);
  }
}

}  // namespace quire
