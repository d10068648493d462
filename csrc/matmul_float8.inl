// Products with float8 panels: floats are multiplied with floats, and the sums of a group are scaled. matmul.inl
// includes this file.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

// R rows of float32 x times two float8 panels -> out [R][32]. load_f8 leaves out a factor of 2^8.
template <int R>
static void multiply_float8(const Panels& weight, const int64_t* panels, const float* x, int64_t x_stride, float* out,
                            int64_t out_stride) {
  const uint8_t *left = weight.codes(panels[0]), *right = weight.codes(panels[1]);
  const float* left_scales = reinterpret_cast<const float*>(weight.scales(panels[0]));
  const float* right_scales = reinterpret_cast<const float*>(weight.scales(panels[1]));
  auto rows = RowPointers<float, R>::at(x, x_stride);
  const int64_t group = int64_t{kBlock} << weight.format.shift;
  f32 total[R][2];
  unroll<R>([&](auto r) { total[r.v][0] = total[r.v][1] = zero(); });
  for (int64_t first = 0, g = 0; first < weight.cols; first += group, g++) {
    const int64_t last = weight.cols - first < group ? weight.cols : first + group;
    f32 sum[R][2];
    unroll<R>([&](auto r) { sum[r.v][0] = sum[r.v][1] = zero(); });
    for (int64_t k = first; k < last; k++) {
      f32 w0 = load_f8(left + k * kLanes), w1 = load_f8(right + k * kLanes);
      unroll<R>([&](auto r) {
        f32 a = set1(rows.row(r.v)[k]);
        sum[r.v][0] = fma(a, w0, sum[r.v][0]);
        sum[r.v][1] = fma(a, w1, sum[r.v][1]);
      });
    }
    f32 scale0 = load(left_scales + g * kLanes) * set1(256.0f), scale1 = load(right_scales + g * kLanes) * set1(256.0f);
    unroll<R>([&](auto r) {
      total[r.v][0] = fma(sum[r.v][0], scale0, total[r.v][0]);
      total[r.v][1] = fma(sum[r.v][1], scale1, total[r.v][1]);
    });
  }
  unroll<R>([&](auto r) {
    store(out + r.v * out_stride, total[r.v][0]);
    store(out + r.v * out_stride + 16, total[r.v][1]);
  });
}

struct Float8Multiplier {
  static void packed(const MatmulCall& call, const Group& group, const void* x, int64_t size, float* out,
                     int64_t out_stride) {
    for (int p = 0; p < group.count; p += 2) {
      with_tile<kMaxDenseTile>(size, [&](auto rows) {
        multiply_float8<(rows.v > 6 ? 6 : rows.v)>(call.weight, group.panels + p, static_cast<const float*>(x),
                                                   call.x.stride, out + p * kLanes, out_stride);
        if constexpr (rows.v > 6) {
          multiply_float8<rows.v - 6>(call.weight, group.panels + p, static_cast<const float*>(x) + 6 * call.x.stride,
                                      call.x.stride, out + p * kLanes + 6 * out_stride, out_stride);
        }
      });
    }
  }
  static Multiplier make() { return {packed, nullptr, nullptr}; }
};

}  // namespace QUIRE_ISA
}  // namespace quire
