// The memory layout of a matrix. It consists of panels of 16 outputs: a vector holds the same column of 16 rows, and
// each row is summed in its own lane. pack.cpp writes this layout, and panel_products.inl reads it.
//
// A panel is its codes for all of K and then, aligned to 64 bytes, its scales. Quantized codes are in blocks of 32
// values of K. "Quad j" is the four values 4j to 4j + 3 of K. Lane n of a vector holds a quad of output n:
//   U4   4 vectors: the low nibbles of vector j are quad j, the high ones quad j + 4                  256 bytes a block
//   U5   U4, then 8 masks of 64 bits: bit i of mask j is bit 4 of byte i of quad j                     320
//   U6   U4, then 2 vectors: bits 2t and 2t + 1 of byte i of vector h are bits 4 and 5 of byte i of
//        quad 4h + t                                                                                  384
//   U8   8 vectors: quad j                                                                            512
//   U2   2 vectors: bits 2t and 2t + 1 of byte i of vector h are value i of quad 4h + t               128
//   U3   U2, then 8 masks of 64 bits: bit i of mask j is bit 2 of byte i of quad j                    192
//   T4   as U4; a code is an index into the format's table (tables.h)                                 256
//   F8   16 bytes for each of K: float8 e4m3                                                          16 a value
//   F32, BF16, F16   16 values for each of K                                                          64 or 32 a value
// Scales have 16 lanes, in float16 unless noted otherwise. Right of the arrow is the value of code q:
//   D          d a block                                                          -> d * (q - offset)
//   DM         d, then m, a block                                                 -> d * q + m
//   SUPER_DM   for 8 blocks: D, then M, then 8 times (uint8 s, uint8 t)           -> (D * s) * q - (M * t)
//   SUPER_D16  for 8 blocks: D, then 16 times int8 s, one for each 16 of K        -> (D * s) * (q - offset)
//   GROUP      d for 2^shift blocks, float32                                      -> d * (q - offset), d * table[q]
//   GROUP_Z    the same; then, for all groups, uint8 z                            -> d * (q - z)
//   HALVES     d for each 16 of K, float32                                        -> d * table[q]
// A last panel with fewer than 16 outputs is padded with zeros.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

constexpr int kLanes = 16;       // outputs in a panel
constexpr int kBlock = 32;       // values of K that share an activation's scale
constexpr int kSuper = 8;        // blocks that share a super-scale

constexpr int kWholeRow = 40;    // the shift of formats with one scale for a row

enum class Codes : uint8_t { U4, U5, U6, U8, F32, BF16, F16, U2, U3, T4, F8 };
enum class Scales : uint8_t { NONE, D, DM, SUPER_DM, SUPER_D16, GROUP, GROUP_Z, HALVES };

struct Format {
  Codes codes;
  Scales scales;
  int offset;  // subtracted from a code, in formats without a minimum
  const struct CodeTable* table = nullptr;  // of T4
  int shift = 0;                            // GROUP, GROUP_Z: a scale is for 2^shift blocks

  // Whether codes are multiplied with int8 activations. Otherwise floats are.
  bool quantized() const { return scales != Scales::NONE && codes != Codes::F8; }
  bool grouped() const { return scales == Scales::GROUP || scales == Scales::GROUP_Z || scales == Scales::HALVES; }
};

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Bytes of codes for one block of 32 K (quantized formats).
constexpr int64_t block_bytes(Codes codes) {
  switch (codes) {
    case Codes::U2: return 128;
    case Codes::U3: return 192;
    case Codes::U4:
    case Codes::T4: return 256;
    case Codes::U5: return 320;
    case Codes::U6: return 384;
    default: return 512;
  }
}

// Bytes of scales for `blocks` blocks, with a scale for each in formats with groups.
constexpr int64_t scale_bytes_of(Scales scales, int64_t blocks) {
  switch (scales) {
    case Scales::NONE: return 0;
    case Scales::D: return blocks * 32;
    case Scales::DM: return blocks * 64;
    case Scales::SUPER_DM: return blocks / kSuper * (64 + kSuper * 32);
    case Scales::SUPER_D16: return blocks / kSuper * (32 + kSuper * 32);
    case Scales::GROUP: return blocks * 64;
    case Scales::GROUP_Z: return blocks * 80;
    case Scales::HALVES: return blocks * 128;
  }
  return 0;
}

constexpr int64_t value_bytes(Codes codes) { return codes == Codes::F32 ? 4 : codes == Codes::F8 ? 1 : 2; }

// A matrix of `rows` outputs and `cols` inputs in panels.
struct Panels {
  Format format;
  int64_t rows, cols;
  uint8_t* data;

  int64_t count() const { return (rows + kLanes - 1) / kLanes; }
  int64_t blocks() const { return cols / kBlock; }
  int64_t groups() const {
    return format.scales == Scales::HALVES ? 2 * blocks() : (((cols - 1) / kBlock) >> format.shift) + 1;
  }

  int64_t code_bytes() const {
    if (!format.quantized()) return cols * kLanes * value_bytes(format.codes);
    return blocks() * block_bytes(format.codes);
  }

  int64_t scale_bytes() const {
    const int64_t blocks_with_scales = format.scales == Scales::HALVES || !format.grouped() ? blocks() : groups();
    return scale_bytes_of(format.scales, blocks_with_scales);
  }

  int64_t stride() const { return round_up(code_bytes(), 64) + round_up(scale_bytes(), 64); }
  int64_t nbytes() const { return count() * stride(); }
  uint8_t* codes(int64_t panel) const { return data + panel * stride(); }
  uint8_t* scales(int64_t panel) const { return codes(panel) + round_up(code_bytes(), 64); }
};

}  // namespace quire
