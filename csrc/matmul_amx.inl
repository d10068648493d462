// Products of 16 rows at a time with AMX tiles. panel_products.inl includes this file. Without AMX it is empty.
//
// A tile product computes the exact sums of one block for 16 rows and 16 outputs. Vectors then scale them by the same
// operations, in the same order, as in panel_products.inl. So the bits of a row do not depend on the code path.
#pragma once

#ifdef __AMX_INT8__

#include "kernels.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

// Rows, and bytes of a row, of each tile. Tile 0 holds sums. Tiles 1 and 2 hold rows and codes of 32 values, tiles 3
// and 4 of 16 values. The intrinsics need literal tile numbers.
struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static const TileShapes kShapes = {1, 0, {}, {64, 32, 64, 16, 64}, {16, 16, 8, 16, 4}};

QUIRE_INLINE void begin_tiles() { _tile_loadconfig(&kShapes); }

QUIRE_INLINE void end_tiles() { _tile_release(); }

// The sums of part `part` of a block: 16 rows of activations times one panel's codes -> sums [16][16].
template <int parts>
QUIRE_INLINE void sum_block(const int8_t* rows, int64_t stride, const uint8_t* codes, int32_t* sums) {
  _tile_zero(0);
  if constexpr (parts == 1) {
    _tile_loadd(1, rows, stride);
    _tile_loadd(2, codes, 64);
    _tile_dpbssd(0, 1, 2);
  } else {
    _tile_loadd(3, rows, stride);
    _tile_loadd(4, codes, 64);
    _tile_dpbssd(0, 3, 4);
  }
  _tile_stored(0, sums, 64);
}

// A tile of 16 rows times one unpacked panel -> out [16][16], rows out_stride apart. The tiles are one part ahead of
// the vectors, so that a vector does not wait for the sums that it reads.
template <Scales scales, class Panel>
static void multiply_tiles(const Panel& panel, int64_t blocks, const uint8_t* x, float* out, int64_t out_stride) {
  using Own = Record<16>;
  constexpr int parts = kParts<scales>;
  alignas(64) int32_t sums[2][16 * 16];
  auto sum_part = [&](int64_t part) {
    const uint8_t* rows = x + part / parts * Own::bytes + part % parts * 16;
    sum_block<parts>(reinterpret_cast<const int8_t*>(rows), kBlock, panel.codes_at + part * (512 / parts),
                     sums[part % 2]);
  };
  f32 total[16];
  unroll<16>([&](auto r) { total[r.v] = zero(); });
  asm volatile("" ::: "memory");  // the compiler cannot tell what tile loads read
  sum_part(0);
  for (int64_t part = 0; part < blocks * parts; part++) {
    if (part + 1 < blocks * parts) sum_part(part + 1);
    const uint8_t* record = x + part / parts * Own::bytes;
    const float* own = reinterpret_cast<const float*>(record + Own::scales);
    f32 scale = panel.scale(part / parts, static_cast<int>(part % parts));
    unroll<16>([&](auto r) {
      i32 sum = load_bytes(reinterpret_cast<const uint8_t*>(sums[part % 2]) + 64 * r.v);
      total[r.v] = fma(to_float(sum), scale * set1(own[r.v]), total[r.v]);
    });
    if constexpr (kHasMinimum<scales>) {
      f32 minimum = panel.minimum(part);
      const float* own_sums = reinterpret_cast<const float*>(record + Own::sums);
      unroll<16>([&](auto r) { total[r.v] = fma(minimum, set1(own_sums[r.v]), total[r.v]); });
    }
  }
  unroll<16>([&](auto r) { store(out + r.v * out_stride, total[r.v]); });
}

}  // namespace QUIRE_ISA
}  // namespace quire

#endif
