// The scales of formats that quantization packages write: float32, one for a group of blocks or for half a block.
// panel_products.inl includes this file.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "tables.h"

namespace quire {
namespace QUIRE_ISA {

// Formats of GGUF files have no groups.
template <Codes codes, Scales kind>
struct GroupScales {
  int shift;
  int64_t zeros;  // bytes from the scales to the zeros
  const CodeTable* table;

  static GroupScales of(const Panels& weight) {
    if constexpr (!kGrouped<kind>) return {};
    return {weight.format.shift, weight.groups() * 64, weight.format.table};
  }
  int64_t group(int64_t block, int part) const { return kind == Scales::HALVES ? 2 * block + part : block >> shift; }
  f32 stored(const uint8_t* scales, int64_t block, int part) const {
    return load(reinterpret_cast<const float*>(scales + group(block, part) * 64));
  }
  f32 scale(const uint8_t* scales, int64_t block, int part) const {
    f32 d = stored(scales, block, part);
    if constexpr (codes == Codes::T4) return d * set1(table->step);
    return d;
  }
  // Sums of wide codes are those of codes minus 128, whatever the instruction set multiplies.
  f32 minimum(const uint8_t* scales, int64_t block) const {
    f32 z = load_u8(scales + zeros + group(block, 0) * kLanes);
    if constexpr (kWide<codes>) z = z - set1(128.0f);
    return zero() - stored(scales, block, 0) * z;
  }
  void prefetch(const uint8_t* scales, int64_t block) const {
    prefetch_into_second(scales + group(block, 0) * 64);
    if constexpr (kind == Scales::HALVES) prefetch_into_second(scales + group(block, 1) * 64);
  }
};

}  // namespace QUIRE_ISA
}  // namespace quire
