// Products of 16 rows at a time with AMX tiles, for translation units compiled for it; included by matmul.inl.
//
// A tile product gives the exact sums of one block for 16 rows and 16 outputs, which are then scaled in vectors by the
// same operations, in the same order, as everywhere else: the bits of a row do not depend on which way it went.
#pragma once

#ifdef __AMX_INT8__

#include "kernels.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

// Rows, and bytes in a row, of the tiles: 0 holds sums, 1 rows and 2 codes of 32 values, 3 rows and 4 codes of 16.
// The intrinsics paste their tile numbers into assembler text, so these are literals below.
struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static const TileShapes kShapes = {1, 0, {}, {64, 32, 64, 16, 64}, {16, 16, 8, 16, 4}};

QUIRE_INLINE void begin_tiles() { _tile_loadconfig(&kShapes); }

QUIRE_INLINE void end_tiles() { _tile_release(); }

// Sums of `part` of a block: 16 rows of activations times one panel's codes -> sums [16][16].
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

// A tile of 16 rows times one unpacked panel -> out [16][16], rows out_stride apart. The tiles work one part ahead of the
// vectors, so that sums are read when they have long been written.
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
  asm volatile("" ::: "memory");  // the compiler does not know what tile loads read
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
