// The products with unpacked panels.
#pragma once

#include "panel_products.inl"

namespace quire {
namespace QUIRE_ISA {

template <Codes codes, Scales scales>
static void multiply_unpacked(const MatmulCall& call, const Group& group, uint8_t* memory, const void* x, int64_t size,
                              float* out, int64_t out_stride) {
  using Unpacked = UnpackedPanel<scales>;
  const int64_t blocks = call.weight.blocks();
  Unpacked panels[4];
  for (int p = 0; p < group.count; p++) panels[p] = Unpacked::at(memory + p * unpacked_bytes(blocks), blocks);
  TileMultiplier<codes, scales, Unpacked>::run(panels, group.count, blocks, x, size, out, out_stride);
}

UnpackedProduct find_unpacked(Codes codes, Scales scales) {
  const bool wide = codes == Codes::U8;
  if (scales == Scales::SUPER_D16)
    return wide ? multiply_unpacked<Codes::U8, Scales::SUPER_D16> : multiply_unpacked<Codes::U6, Scales::SUPER_D16>;
  if (scales == Scales::DM)
    return wide ? multiply_unpacked<Codes::U8, Scales::DM> : multiply_unpacked<Codes::U4, Scales::DM>;
  if (wide) return multiply_unpacked<Codes::U8, Scales::D>;
  return codes == Codes::U4 ? multiply_unpacked<Codes::U4, Scales::D> : multiply_unpacked<Codes::U5, Scales::D>;
}

}  // namespace QUIRE_ISA
}  // namespace quire
