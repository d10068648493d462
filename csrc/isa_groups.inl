// The products with packed panels of formats that quantization packages write.
#pragma once

#include "panel_products.inl"

namespace quire {
namespace QUIRE_ISA {

// Products of a table that has a rest: those with either table, added.
struct TwoTables {
  using One = QuantizedMultiplier<Codes::T4, Scales::GROUP>;
  static constexpr int kMaxWidth = 4 * kLanes;

  static MatmulCall with_rest(const MatmulCall& call) {
    MatmulCall rest = call;
    rest.weight.format.table = call.weight.format.table->rest;
    return rest;
  }
  static void add(const float* rest, int64_t rows, int64_t width, float* out, int64_t out_stride) {
    for (int64_t r = 0; r < rows; r++) {
      float* to = out + r * out_stride;
      for (int64_t i = 0; i < width; i += kLanes) store(to + i, load(to + i) + load(rest + r * kMaxWidth + i));
    }
  }
  static void packed(const MatmulCall& call, const Group& group, const void* x, int64_t size, float* out,
                     int64_t out_stride) {
    alignas(64) float rest[16 * kMaxWidth];
    One::packed(call, group, x, size, out, out_stride);
    One::packed(with_rest(call), group, x, size, rest, kMaxWidth);
    add(rest, size, group.count * kLanes, out, out_stride);
  }
  static uint8_t* rest_memory(const MatmulCall& call, const Group& group, uint8_t* memory) {
    return memory + group.count * unpacked_bytes(call.weight.blocks());
  }
  static void unpack(const MatmulCall& call, const Group& group, uint8_t* memory) {
    One::unpack(call, group, memory);
    One::unpack(with_rest(call), group, rest_memory(call, group, memory));
  }
  static void unpacked(const MatmulCall& call, const Group& group, uint8_t* memory, const void* x, int64_t size,
                       float* out, int64_t out_stride) {
    alignas(64) float rest[16 * kMaxWidth];
    const UnpackedProduct multiply = find_unpacked(Codes::U8, Scales::D);
    multiply(call, group, memory, x, size, out, out_stride);
    multiply(call, group, rest_memory(call, group, memory), x, size, rest, kMaxWidth);
    add(rest, size, group.count * kLanes, out, out_stride);
  }
  static Multiplier make() { return {packed, unpack, unpacked}; }
};

Multiplier find_grouped(const Format& format) {
  if (format.scales == Scales::HALVES) return QuantizedMultiplier<Codes::T4, Scales::HALVES>::make();
  if (format.scales == Scales::GROUP) {
    if (format.codes == Codes::U4) return QuantizedMultiplier<Codes::U4, Scales::GROUP>::make();
    if (format.codes == Codes::T4 && format.table->rest) return TwoTables::make();
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
