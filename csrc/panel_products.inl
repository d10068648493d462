// Products of a tile of rows with quantized panels, packed and unpacked. Codes are multiplied with int8 activations; the
// sums of a block are exact and are scaled in float32. matmul.inl divides a matrix into such products.
//
// Each (row, output) pair is summed in one lane over K from front to back, by the same operations for any number of
// rows. So a result does not depend on the batch. For few rows, codes are unpacked in registers. For more rows, a group
// of panels is first unpacked into a thread's scratch and then multiplied with all tiles.
#pragma once

#include <utility>

#include "kernels.h"
#include "simd.h"
#include "tables.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kPrefetchBytes = 64 * 1024;  // prefetch distance, for all panels that are read at once together

template <int value>
struct Number {
  static constexpr int v = value;
};

// Calls f(Number<0>()), ..., f(Number<n - 1>()): an unrolled loop with a constant index. One expression is compiled
// faster than a recursion over the indices.
template <int... at, class F>
QUIRE_INLINE void unroll_over(std::integer_sequence<int, at...>, F f) {
  (f(Number<at>()), ...);
}

template <int n, class F>
QUIRE_INLINE void unroll(F f) {
  unroll_over(std::make_integer_sequence<int, n>(), f);
}

template <Codes codes, int j>
QUIRE_INLINE i32 quad(const uint8_t* block) {
  if constexpr (codes == Codes::U8) {
    return load_bytes(block + 64 * j);
  } else if constexpr (codes == Codes::U2) {
    return take_two_bits<j % 4>(load_bytes(block + 64 * (j / 4)));
  } else if constexpr (codes == Codes::U3) {
    uint64_t bits;
    std::memcpy(&bits, block + 128 + 8 * j, 8);
    return add_fifth_bits<4>(quad<Codes::U2, j>(block), bits);
  } else {
    i32 packed = load_bytes(block + 64 * (j % 4));
    i32 nibbles = j < 4 ? low_nibbles(packed) : high_nibbles(packed);
    if constexpr (codes == Codes::U5) {
      uint64_t bits;
      std::memcpy(&bits, block + 256 + 8 * j, 8);
      return add_fifth_bits(nibbles, bits);
    } else if constexpr (codes == Codes::U6) {
      return add_two_bits<j % 4>(nibbles, load_bytes(block + 256 + 64 * (j / 4)));
    } else {
      return nibbles;
    }
  }
}

template <Scales kind>
constexpr bool kHasMinimum = kind == Scales::DM || kind == Scales::SUPER_DM || kind == Scales::GROUP_Z;
template <Scales kind>
constexpr int kParts = kind == Scales::SUPER_D16 || kind == Scales::HALVES ? 2 : 1;  // scales in a block
template <Scales kind>
constexpr bool kGrouped = kind == Scales::GROUP || kind == Scales::GROUP_Z || kind == Scales::HALVES;
template <Codes codes>
constexpr bool kWide = codes == Codes::U8 || codes == Codes::T4;  // codes of 8 bits, as they are multiplied

template <Scales kind>
QUIRE_INLINE f32 read_scale(const uint8_t* scales, int64_t block, int part) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(scales);
  if constexpr (kind == Scales::D) return load_f16(halves + 16 * block);
  if constexpr (kind == Scales::DM) return load_f16(halves + 32 * block);
  if constexpr (kind == Scales::SUPER_DM) {
    const uint8_t* super = scales + block / kSuper * 320;
    return load_f16(reinterpret_cast<const uint16_t*>(super)) * load_u8(super + 64 + block % kSuper * 32);
  }
  const uint8_t* super = scales + block / kSuper * 288;
  const int8_t* own = reinterpret_cast<const int8_t*>(super + 32 + (block % kSuper * 2 + part) * 16);
  return load_f16(reinterpret_cast<const uint16_t*>(super)) * load_i8(own);
}

template <Scales kind>
QUIRE_INLINE f32 read_minimum(const uint8_t* scales, int64_t block) {
  if constexpr (kind == Scales::DM) return load_f16(reinterpret_cast<const uint16_t*>(scales) + 32 * block + 16);
  const uint8_t* super = scales + block / kSuper * 320;
  const uint16_t* minima = reinterpret_cast<const uint16_t*>(super + 32);
  return zero() - load_f16(minima) * load_u8(super + 64 + block % kSuper * 32 + 16);
}

// Whether a sum of codes begins with the correction for the offset, `shifts` in activations.h.
template <Codes codes, Scales scales>
constexpr bool kCorrected = (!kHasMinimum<scales> || kWide<codes>) && !(kWide<codes> && kSignedBytes);

template <Codes codes>
constexpr int kShift = kWide<codes> ? 0 : codes == Codes::U6 ? 2 : codes == Codes::U5 ? 3 : 4;  // 128 / offset

// The panel that a thread reads after the current one. It is prefetched meanwhile.
struct Ahead {
  const uint8_t *codes, *scales;

  static Ahead at(const Panels& weight, int64_t panel) { return {weight.codes(panel), weight.scales(panel)}; }
};

}  // namespace QUIRE_ISA
}  // namespace quire

#include "matmul_groups.inl"

namespace quire {
namespace QUIRE_ISA {

// A panel as it is stored. Codes are unpacked in registers.
template <Codes codes, Scales scales>
struct PackedPanel {
  const uint8_t* codes_at;
  const uint8_t* scales_at;
  int64_t blocks;
  int64_t codes_to_next, scales_to_next;  // bytes from the end of this panel to the thread's next one
  GroupScales<codes, scales> groups;
  static constexpr int64_t step = block_bytes(codes);
  static constexpr int64_t scale_step = scale_bytes_of(scales, kSuper) / kSuper;  // a block, on average
  static constexpr bool packed = true;

  static PackedPanel of(const Panels& weight, int64_t panel, Ahead ahead) {
    const uint8_t *codes_at = weight.codes(panel), *scales_at = weight.scales(panel);
    const int64_t blocks = weight.blocks();
    return {codes_at, scales_at, blocks, ahead.codes - codes_at - blocks * step,
            ahead.scales - scales_at - blocks * scale_step, GroupScales<codes, scales>::of(weight)};
  }
  template <int j>
  i32 quad_of(int64_t at) const {
    if constexpr (codes == Codes::T4) return look_up(quad<Codes::U4, j>(codes_at + at), groups.table->levels);
    return quad<codes, j>(codes_at + at);
  }
  f32 scale(int64_t block, int part) const {
    if constexpr (kGrouped<scales>) return groups.scale(scales_at, block, part);
    return read_scale<scales>(scales_at, block, part);
  }
  f32 minimum(int64_t block) const {
    if constexpr (kGrouped<scales>) return groups.minimum(scales_at, block);
    return read_minimum<scales>(scales_at, block);
  }
  template <int num_panels>
  void prefetch(int64_t block) const {
    const int64_t distance = kPrefetchBytes / (num_panels * (step + scale_step));
    const int64_t wanted = block + (distance < blocks ? distance : blocks);
    const uint8_t* ahead = codes_at + wanted * step + (wanted < blocks ? 0 : codes_to_next);
    unroll<step / 64>([&](auto line) { prefetch_into_second(ahead + 64 * line.v); });
    if constexpr (kGrouped<scales>) {
      const uint8_t* at = wanted < blocks ? scales_at : scales_at + scales_to_next + blocks * scale_step;
      groups.prefetch(at, wanted < blocks ? wanted : wanted - blocks);
    } else {
      prefetch_into_second(scales_at + wanted * scale_step + (wanted < blocks ? 0 : scales_to_next));
    }
  }
};

// Codes as they are kept in an unpacked panel. AMX tiles and SMMLA multiply signed codes, which need no correction for
// the offset.
template <Codes codes, Scales scales>
QUIRE_INLINE i32 kept(i32 quad) {
#if defined(__AMX_INT8__) || defined(__ARM_FEATURE_MATMUL_INT8)
  if constexpr (!kHasMinimum<scales> || kWide<codes>) return subtract_bytes(quad, 128 >> kShift<codes>);
#endif
  return quad;
}

}  // namespace QUIRE_ISA
}  // namespace quire

#include "matmul_i8mm.inl"

namespace quire {
namespace QUIRE_ISA {

// Formats that are alike once they are unpacked share the products with unpacked panels: a tile's operations depend on
// the parts of a block, on whether there are minima, on the width of codes and, without minima, on their shift.
template <Scales scales>
constexpr Scales kUnpackedScales = kParts<scales> == 2   ? Scales::SUPER_D16
                                   : kHasMinimum<scales> ? Scales::DM
                                                         : Scales::D;
template <Codes codes, Scales scales>
constexpr Codes kUnpackedCodes = kWide<codes> ? Codes::U8 : kHasMinimum<scales> ? Codes::U4 : codes;

// A panel in a thread's scratch, with one byte for each code and float32 scales.
template <Scales scales>
struct UnpackedPanel {
  uint8_t* codes_at;   // [blocks][8][64]; with i8mm in the order of store_pair
  float* scales_at;    // [blocks][parts][16]
  float* minima_at;    // [blocks][16]
  static constexpr int64_t step = 512;
  static constexpr bool packed = false;

  static UnpackedPanel at(uint8_t* memory, int64_t blocks) {
    float* floats = reinterpret_cast<float*>(memory + blocks * 512);
    return {memory, floats, floats + blocks * 32};
  }
  template <int j>
  i32 quad_of(int64_t at) const {
    return load_bytes(codes_at + at + 64 * j);
  }
  f32 scale(int64_t block, int part) const { return load(scales_at + (block * kParts<scales> + part) * 16); }
  f32 minimum(int64_t block) const { return load(minima_at + block * 16); }
  template <int num_panels>
  void prefetch(int64_t) const {}
};

template <Codes codes, Scales scales>
static void unpack_panel(const PackedPanel<codes, scales>& from, const UnpackedPanel<kUnpackedScales<scales>>& to) {
  for (int64_t block = 0; block < from.blocks; block++) {
    const int64_t at = block * from.step;
    from.template prefetch<4>(block);
#ifdef __ARM_FEATURE_MATMUL_INT8
    unroll<4>([&](auto pair) {
      store_pair<pair.v>(to.codes_at + block * 512, kept<codes, scales>(from.template quad_of<2 * pair.v>(at)),
                         kept<codes, scales>(from.template quad_of<2 * pair.v + 1>(at)));
    });
#else
    unroll<8>([&](auto j) {
      store_bytes(to.codes_at + block * 512 + 64 * j.v, kept<codes, scales>(from.template quad_of<j.v>(at)));
    });
#endif
    unroll<kParts<scales>>([&](auto part) {
      store(to.scales_at + (block * kParts<scales> + part.v) * 16, from.scale(block, part.v));
    });
    if constexpr (kHasMinimum<scales>) store(to.minima_at + block * 16, from.minimum(block));
  }
}

constexpr int64_t unpacked_bytes(int64_t blocks) { return blocks * (512 + 128 + 64); }

// A tile of R rows times P panels -> out [R][16 * P], rows out_stride apart. `x` is the tile's first record.
template <Codes codes, Scales scales, int R, int P, class Panel>
static void multiply(const Panel* given, int64_t blocks, const uint8_t* x, float* out, int64_t out_stride) {
  Panel panels[P];
  unroll<P>([&](auto p) { panels[p.v] = given[p.v]; });
  using Own = Record<R>;
  constexpr int parts = kParts<scales>;
  f32 total[R][P];
  unroll<R>([&](auto r) { unroll<P>([&](auto p) { total[r.v][p.v] = zero(); }); });
  for (int64_t block = 0; block < blocks; block++, x += Own::bytes) {
    const int64_t at = block * Panel::step;
    unroll<P>([&](auto p) { panels[p.v].template prefetch<P>(block); });
    unroll<parts>([&](auto part) {
      i32 sum[R][P];
      unroll<R>([&](auto r) {
        i32 start = zero_i32();
        if constexpr (kCorrected<codes, scales>) {
          int32_t shift;
          std::memcpy(&shift, x + (parts == 2 ? Own::half_shifts + part.v * 4 * R : Own::shifts) + 4 * r.v, 4);
          start = set1_i32(shift >> kShift<codes>);
        }
        unroll<P>([&](auto p) { sum[r.v][p.v] = start; });
      });
      unroll<8 / parts>([&](auto step) {
        constexpr int j = parts == 2 ? part.v * 4 + step.v : step.v / 2 + step.v % 2 * 4;
        i32 w[P];
        unroll<P>([&](auto p) { w[p.v] = panels[p.v].template quad_of<j>(at); });
        unroll<R>([&](auto r) {
          i32 own = broadcast_quad(x + 4 * (j * R + r.v));
          unroll<P>([&](auto p) {
            sum[r.v][p.v] = kWide<codes> ? dot_wide(sum[r.v][p.v], w[p.v], own) : dot(sum[r.v][p.v], w[p.v], own);
          });
        });
      });
      f32 scale[P];
      unroll<P>([&](auto p) { scale[p.v] = panels[p.v].scale(block, part.v); });
      unroll<R>([&](auto r) {
        f32 own = set1(reinterpret_cast<const float*>(x + Own::scales)[r.v]);
        unroll<P>([&](auto p) {
          total[r.v][p.v] = fma(to_float(sum[r.v][p.v]), scale[p.v] * own, total[r.v][p.v]);
        });
      });
    });
    if constexpr (kHasMinimum<scales>) {
      f32 minimum[P];
      unroll<P>([&](auto p) { minimum[p.v] = panels[p.v].minimum(block); });
      unroll<R>([&](auto r) {
        f32 own = set1(reinterpret_cast<const float*>(x + Own::sums)[r.v]);
        unroll<P>([&](auto p) { total[r.v][p.v] = fma(minimum[p.v], own, total[r.v][p.v]); });
      });
    }
  }
  unroll<R>([&](auto r) {
    unroll<P>([&](auto p) { store(out + r.v * out_stride + p.v * kLanes, total[r.v][p.v]); });
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire

#include "matmul_amx.inl"

namespace quire {
namespace QUIRE_ISA {

// Calls f with the size of a tile as a constant.
template <int limit, class F>
QUIRE_INLINE void with_tile(int64_t size, F f) {
  if (size == 1) return f(Number<1>());
  if (size == 2) return f(Number<2>());
  if (size == 3) return f(Number<3>());
  if constexpr (limit >= 6) {
    if (size == 4) return f(Number<4>());
    if (size == 6) return f(Number<6>());
  }
  if constexpr (limit >= 12) return f(Number<12>());
}

// Two or four panels that are multiplied together, and the panel after each.
struct Group {
  int count;
  int64_t panels[4];
  Ahead ahead[4];
};

// Multiplies a tile with a group that `Multiplier::unpack` has unpacked.
using UnpackedProduct = void (*)(const MatmulCall&, const Group&, uint8_t* memory, const void* x, int64_t rows,
                                 float* out, int64_t out_stride);

// The functions of a format. x is a tile's first record or, for dense panels, its first row. out is
// [rows][16 * group.count].
struct Multiplier {
  void (*packed)(const MatmulCall&, const Group&, const void* x, int64_t rows, float* out, int64_t out_stride);
  // Unpacks a group into unpacked_bytes of memory for each panel.
  void (*unpack)(const MatmulCall&, const Group&, uint8_t* memory);
  UnpackedProduct unpacked;
};

// These take the longest to compile. So each is in a translation unit of its own.
Multiplier find_gguf(const Format& format);                  // isa_gguf.inl
Multiplier find_grouped(const Format& format);               // isa_groups.inl
UnpackedProduct find_unpacked(Codes codes, Scales scales);   // isa_unpacked.inl; of kUnpackedCodes, kUnpackedScales

// Tiles of one format times up to four panels, packed or unpacked.
template <Codes codes, Scales scales, class Panel>
struct TileMultiplier {
  template <int R, int P>
  static void pass(const Panel* panels, int count, int64_t blocks, const uint8_t* x, float* out, int64_t out_stride) {
    if constexpr (P == 4) {
      if (count < 4) return pass<R, 2>(panels, count, blocks, x, out, out_stride);
    }
    for (int p = 0; p < count; p += P)
      multiply<codes, scales, R, P>(panels + p, blocks, x, out + p * kLanes, out_stride);
  }

  static void run(const Panel* panels, int count, int64_t blocks, const void* x, int64_t size, float* out,
                  int64_t out_stride) {
    const uint8_t* records = static_cast<const uint8_t*>(x);
#ifdef __AMX_INT8__
    if constexpr (!Panel::packed) {
      for (int p = 0; p < count && size == 16; p++)
        multiply_tiles<scales>(panels[p], blocks, records, out + p * kLanes, out_stride);
      if (size == 16) return;
    }
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
    if constexpr (!Panel::packed) {
      for (int p = 0; p < count; p++) {
        if (size == 4) multiply_pairs<scales, 4>(panels[p], blocks, records, out + p * kLanes, out_stride);
        if (size == 2) multiply_pairs<scales, 2>(panels[p], blocks, records, out + p * kLanes, out_stride);
      }
      return;
    }
#endif
    with_tile<kMaxTile>(size, [&](auto rows) {
      pass<rows.v, panels_at_once(rows.v)>(panels, count, blocks, records, out, out_stride);
    });
  }
};

template <Codes codes, Scales scales>
struct QuantizedMultiplier {
  using Packed = PackedPanel<codes, scales>;

  static void packed(const MatmulCall& call, const Group& group, const void* x, int64_t size, float* out,
                     int64_t out_stride) {
    Packed panels[4];
    for (int p = 0; p < group.count; p++) panels[p] = Packed::of(call.weight, group.panels[p], group.ahead[p]);
    TileMultiplier<codes, scales, Packed>::run(panels, group.count, call.weight.blocks(), x, size, out, out_stride);
  }
  static void unpack(const MatmulCall& call, const Group& group, uint8_t* memory) {
    const int64_t blocks = call.weight.blocks();
    for (int p = 0; p < group.count; p++) {
      unpack_panel(Packed::of(call.weight, group.panels[p], group.ahead[p]),
                   UnpackedPanel<kUnpackedScales<scales>>::at(memory + p * unpacked_bytes(blocks), blocks));
    }
  }
  static Multiplier make() {
    return {packed, unpack, find_unpacked(kUnpackedCodes<codes, scales>, kUnpackedScales<scales>)};
  }
};

}  // namespace QUIRE_ISA
}  // namespace quire
