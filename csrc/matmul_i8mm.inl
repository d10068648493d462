// Products of two or four rows at a time with SMMLA, which multiplies two rows with two outputs over 8 values of K.
// panel_products.inl includes this file. Without i8mm it is empty.
//
// The sums of a block are exact. Vectors then scale them by the same operations, in the same order, as in
// panel_products.inl. So the bits of a row do not depend on the code path.
#pragma once

#ifdef __ARM_FEATURE_MATMUL_INT8

#include "kernels.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

// The codes of a block in an unpacked panel: [4 groups of 4 outputs][4 pairs of quads][4 outputs][8].
template <int pair>
QUIRE_INLINE void store_pair(uint8_t* block, i32 even, i32 odd) {
  const int32x4_t evens[4] = {even.a, even.b, even.c, even.d}, odds[4] = {odd.a, odd.b, odd.c, odd.d};
  unroll<4>([&](auto group) {
    uint8_t* to = block + 128 * group.v + 32 * pair;
    vst1q_u8(to, bytes(vzip1q_s32(evens[group.v], odds[group.v])));
    vst1q_u8(to + 16, bytes(vzip2q_s32(evens[group.v], odds[group.v])));
  });
}

// A pair of quads of two rows: [2 rows][8]. `quads` is the record's first quad of the first row.
template <int R>
QUIRE_INLINE int8x16_t load_rows(const uint8_t* quads, int pair) {
  const int8_t* at = reinterpret_cast<const int8_t*>(quads) + pair * 8 * R;
  int8x16_t even = vcombine_s8(vld1_s8(at), vdup_n_s8(0)), odd = vcombine_s8(vld1_s8(at + 4 * R), vdup_n_s8(0));
  return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(even), vreinterpretq_s32_s8(odd)));
}

// The sums of two rows and four outputs, of which each operand has two by two.
struct RowSums {
  float32x4_t first, second;
};
QUIRE_INLINE RowSums split_rows(int32x4_t left, int32x4_t right) {
  int64x2_t low = vreinterpretq_s64_s32(left), high = vreinterpretq_s64_s32(right);
  return {vcvtq_f32_s32(vreinterpretq_s32_s64(vzip1q_s64(low, high))),
          vcvtq_f32_s32(vreinterpretq_s32_s64(vzip2q_s64(low, high)))};
}

// A tile of R rows times one unpacked panel -> out [R][16], rows out_stride apart. `x` is the tile's first record.
template <Scales scales, int R, class Panel>
static void multiply_pairs(const Panel& panel, int64_t blocks, const uint8_t* x, float* out, int64_t out_stride) {
  using Own = Record<R>;
  constexpr int parts = kParts<scales>, pairs = 4 / parts;
  float32x4_t total[R][4];
  unroll<R>([&](auto r) { unroll<4>([&](auto group) { total[r.v][group.v] = vdupq_n_f32(0); }); });
  for (int64_t block = 0; block < blocks; block++, x += Own::bytes) {
    const int8_t* codes = reinterpret_cast<const int8_t*>(panel.codes_at + block * panel.step);
    const float* own = reinterpret_cast<const float*>(x + Own::scales);
    unroll<parts>([&](auto part) {
      const float* scale_at = panel.scales_at + (block * parts + part.v) * kLanes;
      int8x16_t rows[R / 2][pairs];
      unroll<R / 2>([&](auto two) {
        unroll<pairs>([&](auto pair) { rows[two.v][pair.v] = load_rows<R>(x + 8 * two.v, part.v * pairs + pair.v); });
      });
      unroll<4>([&](auto group) {
        int32x4_t sum[R / 2][2];
        unroll<R / 2>([&](auto two) { sum[two.v][0] = sum[two.v][1] = vdupq_n_s32(0); });
        unroll<pairs>([&](auto pair) {
          const int8_t* at = codes + 128 * group.v + 32 * (part.v * pairs + pair.v);
          int8x16_t left = vld1q_s8(at), right = vld1q_s8(at + 16);
          unroll<R / 2>([&](auto two) {
            sum[two.v][0] = vmmlaq_s32(sum[two.v][0], rows[two.v][pair.v], left);
            sum[two.v][1] = vmmlaq_s32(sum[two.v][1], rows[two.v][pair.v], right);
          });
        });
        float32x4_t scale = vld1q_f32(scale_at + 4 * group.v);
        unroll<R / 2>([&](auto two) {
          constexpr int r = 2 * two.v;
          RowSums of = split_rows(sum[two.v][0], sum[two.v][1]);
          total[r][group.v] = vfmaq_f32(total[r][group.v], of.first, vmulq_n_f32(scale, own[r]));
          total[r + 1][group.v] = vfmaq_f32(total[r + 1][group.v], of.second, vmulq_n_f32(scale, own[r + 1]));
        });
      });
    });
    if constexpr (kHasMinimum<scales>) {
      const float* own_sums = reinterpret_cast<const float*>(x + Own::sums);
      unroll<4>([&](auto group) {
        float32x4_t minimum = vld1q_f32(panel.minima_at + block * kLanes + 4 * group.v);
        unroll<R>([&](auto r) { total[r.v][group.v] = vfmaq_n_f32(total[r.v][group.v], minimum, own_sums[r.v]); });
      });
    }
  }
  unroll<R>([&](auto r) {
    unroll<4>([&](auto group) { vst1q_f32(out + r.v * out_stride + 4 * group.v, total[r.v][group.v]); });
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire

#endif
