// The products with packed panels of formats of GGUF files.
#pragma once

#include "panel_products.inl"

namespace quire {
namespace QUIRE_ISA {

Multiplier find_gguf(const Format& format) {
  switch (format.scales) {
    case Scales::D:
      if (format.codes == Codes::U4) return QuantizedMultiplier<Codes::U4, Scales::D>::make();
      if (format.codes == Codes::U5) return QuantizedMultiplier<Codes::U5, Scales::D>::make();
      return QuantizedMultiplier<Codes::U8, Scales::D>::make();
    case Scales::DM:
      if (format.codes == Codes::U4) return QuantizedMultiplier<Codes::U4, Scales::DM>::make();
      return QuantizedMultiplier<Codes::U5, Scales::DM>::make();
    case Scales::SUPER_DM:
      if (format.codes == Codes::U4) return QuantizedMultiplier<Codes::U4, Scales::SUPER_DM>::make();
      return QuantizedMultiplier<Codes::U5, Scales::SUPER_DM>::make();
    default: break;
  }
  return QuantizedMultiplier<Codes::U6, Scales::SUPER_D16>::make();
}

}  // namespace QUIRE_ISA
}  // namespace quire
