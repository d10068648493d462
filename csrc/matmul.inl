// Matrix products with panels. Quantized products multiply codes with int8 activations; the sums of a block are exact
// and are scaled in float32. Dense products multiply floats. Each instruction set compiles this file in its own
// translation unit.
//
// Each (row, output) pair is summed in one lane over K from front to back, by the same operations for any number of
// rows. So a result does not depend on the batch. For few rows, codes are unpacked in registers. For more rows, a group
// of panels is first unpacked into a thread's scratch and then multiplied with all tiles.
#pragma once

#include <utility>

#include "kernels.h"
#include "scratch.h"
#include "simd.h"
#include "tables.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kUnit = 2 * kLanes;        // outputs that form one block of the next product
constexpr int64_t kPassBytes = 640 * 1024;   // of activations in one pass over a group of panels: they stay in L2
constexpr int64_t kPrefetchBytes = 64 * 1024;  // prefetch distance, for all panels that are read at once together

template <int value>
struct Number {
  static constexpr int v = value;
};

// Calls f(Number<0>()), ..., f(Number<n - 1>()): an unrolled loop with a constant index. One expression is compiled faster
// than a recursion over the indices.
template <int... at, class F>
QUIRE_INLINE void unroll_over(std::integer_sequence<int, at...>, F f) {
  (f(Number<at>()), ...);
}

template <int n, class F>
QUIRE_INLINE void unroll(F f) {
  unroll_over(std::make_integer_sequence<int, n>(), f);
}

// R rows at equal distances. Only every third row has a pointer, so that all pointers stay in registers.
template <class T, int R>
struct RowPointers {
  const T* base[(R + 2) / 3];
  int64_t stride;

  static RowPointers at(const T* first, int64_t stride) {
    RowPointers rows;
    rows.stride = stride;
    for (int i = 0; i < (R + 2) / 3; i++) rows.base[i] = first + 3 * i * stride;
    return rows;
  }
  const T* row(int r) const { return base[r / 3] + (r % 3) * stride; }
};

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

template <Codes codes>
QUIRE_INLINE f32 load_values(const uint8_t* p) {
  if constexpr (codes == Codes::F32) return load(reinterpret_cast<const float*>(p));
  if constexpr (codes == Codes::BF16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
  return load_f16(reinterpret_cast<const uint16_t*>(p));
}

// R rows of float32 x times two dense panels -> out [R][32].
template <Codes codes, int R>
static void multiply_dense(const Panels& weight, const int64_t* panels, const float* x, int64_t x_stride, float* out,
                           int64_t out_stride) {
  const uint8_t* left = weight.codes(panels[0]);
  const uint8_t* right = weight.codes(panels[1]);
  auto rows = RowPointers<float, R>::at(x, x_stride);
  f32 total[R][2];
  unroll<R>([&](auto r) { total[r.v][0] = total[r.v][1] = zero(); });
  for (int64_t k = 0; k < weight.cols; k++) {
    f32 w0 = load_values<codes>(left + k * kLanes * value_bytes(codes));
    f32 w1 = load_values<codes>(right + k * kLanes * value_bytes(codes));
    unroll<R>([&](auto r) {
      f32 a = set1(rows.row(r.v)[k]);
      total[r.v][0] = fma(a, w0, total[r.v][0]);
      total[r.v][1] = fma(a, w1, total[r.v][1]);
    });
  }
  unroll<R>([&](auto r) {
    store(out + r.v * out_stride, total[r.v][0]);
    store(out + r.v * out_stride + 16, total[r.v][1]);
  });
}

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

// The functions of a format. x is a tile's first record or, for dense panels, its first row. out is
// [rows][16 * group.count].
struct Multiplier {
  void (*packed)(const MatmulCall&, const Group&, const void* x, int64_t rows, float* out, int64_t out_stride);
  // `unpack` unpacks a group into unpacked_bytes of memory for each panel. `unpacked` multiplies a tile with it.
  void (*unpack)(const MatmulCall&, const Group&, uint8_t* memory);
  void (*unpacked)(const MatmulCall&, const Group&, uint8_t* memory, const void* x, int64_t rows, float* out,
                   int64_t out_stride);
};

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

// `codes` and `scales` are those of unpacked panels.
template <Codes codes, Scales scales>
static void multiply_unpacked(const MatmulCall& call, const Group& group, uint8_t* memory, const void* x, int64_t size,
                              float* out, int64_t out_stride) {
  using Unpacked = UnpackedPanel<scales>;
  const int64_t blocks = call.weight.blocks();
  Unpacked panels[4];
  for (int p = 0; p < group.count; p++) panels[p] = Unpacked::at(memory + p * unpacked_bytes(blocks), blocks);
  TileMultiplier<codes, scales, Unpacked>::run(panels, group.count, blocks, x, size, out, out_stride);
}

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
    return {packed, unpack, multiply_unpacked<kUnpackedCodes<codes, scales>, kUnpackedScales<scales>>};
  }
};

template <Codes codes>
struct DenseMultiplier {
  static void packed(const MatmulCall& call, const Group& group, const void* x, int64_t size, float* out,
                     int64_t out_stride) {
    for (int p = 0; p < group.count; p += 2) {
      with_tile<kMaxDenseTile>(size, [&](auto rows) {
        multiply_dense<codes, rows.v>(call.weight, group.panels + p, static_cast<const float*>(x), call.x.stride,
                                      out + p * kLanes, out_stride);
      });
    }
  }
  static Multiplier make() { return {packed, nullptr, nullptr}; }
};

}  // namespace QUIRE_ISA
}  // namespace quire

#include "matmul_float8.inl"

namespace quire {
namespace QUIRE_ISA {

static Multiplier find_multiplier(const Format& format) {
  if (format.codes == Codes::F8) return Float8Multiplier::make();
  if (format.grouped()) return find_grouped(format);
  switch (format.scales) {
    case Scales::NONE:
      if (format.codes == Codes::F32) return DenseMultiplier<Codes::F32>::make();
      if (format.codes == Codes::BF16) return DenseMultiplier<Codes::BF16>::make();
      return DenseMultiplier<Codes::F16>::make();
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

// Writes a tile's products, outputs [output, output + width).
static void finish_plain(const MatmulCall& call, const Tile& tile, const float* products, int64_t stride,
                         int64_t output, int64_t width) {
  for (int64_t part = 0; part < width; part += kLanes) {
    const int64_t at = output + part;
    const int lanes = width - part < kLanes ? static_cast<int>(width - part) : kLanes;
    f32 bias = call.bias ? load_part(call.bias + at, lanes) : zero();
    for (int64_t r = 0; r < tile.rows; r++) {
      f32 value = load(products + r * stride + part);
      if (call.bias) value = value + bias;
      float* to = call.y + (tile.first + r) * call.y_stride + at;
      if (lanes == kLanes) {
        store(to, value);
      } else {
        store_part(to, value, lanes);
      }
    }
  }
}

// Updates the largest product of each row and its index. Of equals the first is kept. NaN is larger than any number.
static void finish_best(const MatmulCall& call, const Tile& tile, const float* products, int64_t stride,
                        int64_t output, int64_t width, int thread) {
  for (int64_t r = 0; r < tile.rows; r++) {
    Best& best = call.best[thread * call.rows + tile.first + r];
    const float* row = products + r * stride;
    f32 most = set1(-__builtin_inff());
    uint32_t numbers = 0xffff;
    for (int64_t part = 0; part < width; part += kLanes) {
      const int lanes = width - part < kLanes ? static_cast<int>(width - part) : kLanes;
      f32 value = select((1u << lanes) - 1, load(row + part), set1(-__builtin_inff()));
      numbers &= same(value, value);
      most = max(most, value);
    }
    if (best.value != best.value || (numbers == 0xffff && less(set1(best.value), most) == 0)) continue;
    for (int64_t i = 0; i < width; i++) {
      if (best.value != best.value || row[i] <= best.value) continue;
      best = {row[i], output + i};
    }
  }
}

// x * Phi(x), with Phi the normal distribution function, to within 2e-7 * |x| (Abramowitz and Stegun 7.1.26).
QUIRE_INLINE f32 gelu(f32 x) {
  f32 size = max(x, zero() - x);
  f32 t = set1(1.0f) / fma(set1(0.3275911f * 0.7071067812f), size, set1(1.0f));
  f32 p = fma(set1(1.061405429f), t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  f32 beyond = set1(0.5f) * p * t * exp(set1(-0.5f) * x * x);
  return x * select(less(x, zero()), beyond, set1(1.0f) - beyond);
}

QUIRE_INLINE f32 activate(f32 x, Activation activation) {
  if (activation == Activation::SILU) return x * sigmoid(x);
  if (activation == Activation::GELU) return gelu(x);
  if (activation == Activation::RELU) return select(less(x, zero()), zero(), x);
  f32 inner = set1(0.7978845608f) * fma(set1(0.044715f) * x * x, x, x);
  return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}

QUIRE_INLINE f32 gate_with(f32 gate, f32 up, const MatmulCall& call) {
  if (call.activation != Activation::CLAMPED_SILU) return activate(gate, call.activation) * up;
  const f32 limit = set1(call.limit);
  gate = min(gate, limit);
  up = min(max(up, zero() - limit), limit);
  return gate * sigmoid(set1(1.702f) * gate) * (up + set1(1.0f));
}

// Columns 0 to 31 of the tile are the gate, columns 32 to 63 are what it multiplies. All rows are gated before any is
// quantized: both have a long latency, which the other rows hide.
static void finish_gated(const MatmulCall& call, const Tile& tile, float* products, int64_t stride, int64_t output) {
  const int64_t half = call.weight.rows / 2;
  for (int64_t r = 0; r < tile.rows; r++) {
    float* row = products + r * stride;
    for (int64_t part = 0; part < 2; part++) {
      const int64_t at = output + part * kLanes;
      f32 gate = load(row + part * kLanes), up = load(row + kUnit + part * kLanes);
      if (call.bias) {
        gate = gate + load(call.bias + at);
        up = up + load(call.bias + half + at);
      }
      const f32 value = gate_with(gate, up, call);
      if (call.y) store(call.y + (tile.first + r) * call.y_stride + at, value);
      store(row + part * kLanes, value);
    }
  }
  if (!call.gated.data) return;
  uint8_t* record = record_of(call.gated, tile, output / kBlock);
  for (int64_t r = 0; r < tile.rows; r++)
    quantize_block(load(products + r * stride), load(products + r * stride + kLanes), record, tile.size, r);
  for (int64_t r = tile.rows; r < tile.size; r++) clear_row(record, tile.size, r);
}

// Prefetches the cache lines that a tile's products will be written to.
QUIRE_INLINE void expect_writes(const MatmulCall& call, const Tile& tile, int64_t output, int64_t width) {
  for (int64_t r = 0; r < tile.rows; r++) {
    const float* to = call.y + (tile.first + r) * call.y_stride + output;
    for (int64_t part = 0; part < width; part += kLanes) __builtin_prefetch(to + part, 1);
  }
}

// Outputs are computed in units of 32, which is a block of the next product. A worker computes all units of its own
// rows, or a part of the units of all rows. It computes two units at once if it has two left, and in gated products one
// unit of each half.
struct Units {
  const MatmulCall& call;
  bool gated;
  Span own;

  static Units of(const MatmulCall& call, const Activations& x, int64_t rows, const Worker& worker) {
    const bool gated = call.activation != Activation::NONE;
    const int64_t outputs = gated ? call.weight.rows / 2 : call.weight.rows;
    const int64_t count = (outputs + kUnit - 1) / kUnit;
    return {call, gated, has_own_rows(x, rows, worker) ? Span{0, count} : share(worker, count)};
  }
  int64_t outputs() const { return gated ? call.weight.rows / 2 : call.weight.rows; }
  int64_t taken_at(int64_t unit) const { return gated || own.last - unit < 2 ? 1 : 2; }
  int panels_at(int64_t unit) const { return gated ? 4 : 2 * static_cast<int>(taken_at(unit)); }

  int64_t panel(int64_t unit, int p) const {
    const int64_t half = call.weight.rows / 2 / kLanes, last = call.weight.count() - 1;
    const int64_t panel = gated && p >= 2 ? half + 2 * unit + p - 2 : 2 * unit + p;
    return panel < last ? panel : last;
  }
};

// A worker's share of one product.
struct Product {
  const MatmulCall& call;
  Units units, following;  // of this product, and of the next one (if there is none, of this one again)
  Multiplier multiplier;
  Tiling tiling;
  bool unpack;
  int thread;
  float* products;    // of a tile: [rows][64]
  uint8_t* unpacked;  // a group of panels

  static constexpr int64_t stride = 2 * kUnit;

  Group group_at(int64_t unit) const {
    const int64_t next = unit + units.taken_at(unit);
    const Units& then = next < units.own.last ? units : following;
    const int64_t then_unit = next < units.own.last ? next : following.own.first;
    Group group{units.panels_at(unit), {}, {}};
    for (int p = 0; p < group.count; p++) {
      group.panels[p] = units.panel(unit, p);
      group.ahead[p] = Ahead::at(then.call.weight, then.panel(then_unit, p));
    }
    return group;
  }

  const void* rows_of(const Tile& tile) const {
    if (call.weight.format.quantized()) return record_of(call.x.quantized, tile, 0);
    return call.x.values + tile.first * call.x.stride;
  }

  void run(const Group& group, int64_t output, int64_t width, const Tile& tile) const {
    if (call.y) expect_writes(call, tile, output, width);
    if (unpack) {
      multiplier.unpacked(call, group, unpacked, rows_of(tile), tile.size, products, stride);
    } else {
      multiplier.packed(call, group, rows_of(tile), tile.size, products, stride);
    }
    if (units.gated) return finish_gated(call, tile, products, stride, output);
    if (call.y) finish_plain(call, tile, products, stride, output, width);
    if (call.best) finish_best(call, tile, products, stride, output, width, thread);
  }

  // Multiplies tiles [begin, end) with the one or two units at `unit`.
  void pass(int64_t unit, int64_t begin, int64_t end) const {
    const Group group = group_at(unit);
    const int64_t output = unit * kUnit, left = units.outputs() - output, most = units.taken_at(unit) * kUnit;
    const int64_t width = most < left ? most : left;
    if (unpack) multiplier.unpack(call, group, unpacked);
    for (int64_t tile = begin; tile < end; tile++) run(group, output, width, tiling.tile(tile));
  }
};

// How many tiles are multiplied with a group of panels before the next group: as many as stay in L2.
QUIRE_INLINE int64_t tiles_in_pass(const MatmulCall& call, const Tile& tile) {
  const int64_t row_bytes =
      call.weight.format.quantized() ? Activations::row_bytes(call.weight.cols) : call.x.stride * 4;
  return kPassBytes / (row_bytes * tile.size) + 1;
}

// Merges the results of all workers. Workers have ascending outputs, so of equals the first worker's is kept.
static void merge_best(const MatmulCall& call, int workers) {
  for (int64_t row = 0; row < call.rows; row++) {
    for (int worker = 1; worker < workers; worker++) {
      const Best& other = call.best[worker * call.rows + row];
      if (call.best[row].value == call.best[row].value && !(other.value <= call.best[row].value)) call.best[row] = other;
    }
  }
}

// `rows` share what a worker unpacks.
QUIRE_INLINE bool stores_unpacked(const MatmulCall& call, [[maybe_unused]] Span rows) {
  if (!call.weight.format.quantized()) return false;
#ifdef QUIRE_TILES
  return call.rows >= kTileRows;
#else
  return rows.last - rows.first > call.few_rows;
#endif
}

// The tiles of a product's rows, as the op that made its activations cut them.
QUIRE_INLINE Tiling tiles_of(const MatmulCall& call, const Worker& worker) {
  const Activations& x = call.x.quantized;
  if (call.weight.format.quantized()) return cut_activations(x, call.rows, worker);
  return cut_into_tiles(worker_rows(x, call.rows, worker), kMaxDenseTile);
}

static void multiply_units(const MatmulCall& call, const Units& units, const Units& following, const Worker& worker) {
  const Tiling tiling = tiles_of(call, worker);
  Product product{call, units, following, find_multiplier(call.weight.format), tiling,
                  stores_unpacked(call, tiling.rows), worker.index, nullptr, nullptr};
  const int64_t product_bytes = 16 * Product::stride * 4;
  uint8_t* memory = scratch(product_bytes + (product.unpack ? 4 * unpacked_bytes(call.weight.blocks()) : 0));
  product.products = reinterpret_cast<float*>(memory);
  product.unpacked = memory + product_bytes;
  const int64_t tiles = tiles_in_pass(call, tiling.tile(0));
#ifdef __AMX_INT8__
  if (product.unpack) begin_tiles();
#endif
  for (int64_t begin = 0; begin < tiling.count(); begin += tiles) {
    const int64_t end = begin + tiles < tiling.count() ? begin + tiles : tiling.count();
    for (int64_t unit = units.own.first; unit < units.own.last; unit += units.taken_at(unit))
      product.pass(unit, begin, end);
  }
#ifdef __AMX_INT8__
  if (product.unpack) end_tiles();
#endif
}

static void matmul(const MatmulCall& call, Worker& worker) {
  const Activations& x = call.x.quantized;
  for (int64_t row = 0; row < call.rows && call.best; row++)
    call.best[worker.index * call.rows + row] = {-__builtin_inff(), 0};
  const Units following = Units::of(call.following ? *call.following : call, x, call.rows, worker);
  multiply_units(call, Units::of(call, x, call.rows, worker), following, worker);
  if (!call.best) return;
  worker.barrier();
  if (worker.index == 0) merge_best(call, worker.count());
}

static void matmul_part(const MatmulPart& part, const MatmulPart* next, Worker& worker) {
  const Units units{part.call, part.call.activation != Activation::NONE, part.units};
  if (!next) return multiply_units(part.call, units, units, worker);
  multiply_units(part.call, units, {next->call, next->call.activation != Activation::NONE, next->units}, worker);
}

}  // namespace QUIRE_ISA
}  // namespace quire
