// The products with packed panels of formats that quantization packages write.
#pragma once

#include "panel_products.inl"

namespace quire {
namespace QUIRE_ISA {

Multiplier find_grouped(const Format& format) {
  if (format.scales == Scales::HALVES) return QuantizedMultiplier<Codes::T4, Scales::HALVES>::make();
  if (format.scales == Scales::GROUP) {
    if (format.codes == Codes::U4) return QuantizedMultiplier<Codes::U4, Scales::GROUP>::make();
    if (format.codes == Codes::T4) return QuantizedMultiplier<Codes::T4, Scales::GROUP>::make();
    return QuantizedMultiplier<Codes::U8, Scales::GROUP>::make();
  }
  switch (format.codes) {
    case Codes::U2: return QuantizedMultiplier<Codes::U2, Scales::GROUP_Z>::make();
    case Codes::U3: return QuantizedMultiplier<Codes::U3, Scales::GROUP_Z>::make();
    case Codes::U4: return QuantizedMultiplier<Codes::U4, Scales::GROUP_Z>::make();
    default: return QuantizedMultiplier<Codes::U8, Scales::GROUP_Z>::make();
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
