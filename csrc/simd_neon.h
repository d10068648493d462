// Vectors of 16 lanes with NEON: four registers. Included by simd.h. The instruction sets differ in the dot product
// only: plain ARMv8-A, dotprod (SDOT) and i8mm (USDOT; and SMMLA in matmul_i8mm.inl).
#pragma once

#include <arm_neon.h>

namespace quire {
namespace QUIRE_ISA {

struct f32 {
  float32x4_t a, b, c, d;
};
struct i32 {
  int32x4_t a, b, c, d;
};

QUIRE_INLINE f32 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
QUIRE_INLINE void store(float* p, f32 x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
QUIRE_INLINE f32 load_part(const float* p, int n) {
  float part[16] = {};
  std::memcpy(part, p, static_cast<size_t>(n) * sizeof(float));
  return load(part);
}
QUIRE_INLINE void store_part(float* p, f32 x, int n) {
  float part[16];
  store(part, x);
  std::memcpy(p, part, static_cast<size_t>(n) * sizeof(float));
}
QUIRE_INLINE f32 set1(float x) {
  float32x4_t all = vdupq_n_f32(x);
  return {all, all, all, all};
}
QUIRE_INLINE f32 zero() { return set1(0.0f); }
QUIRE_INLINE f32 iota() {
  static const float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(lanes);
}
QUIRE_INLINE f32 operator+(f32 x, f32 y) {
  return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b), vaddq_f32(x.c, y.c), vaddq_f32(x.d, y.d)};
}
QUIRE_INLINE f32 operator-(f32 x, f32 y) {
  return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b), vsubq_f32(x.c, y.c), vsubq_f32(x.d, y.d)};
}
QUIRE_INLINE f32 operator*(f32 x, f32 y) {
  return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b), vmulq_f32(x.c, y.c), vmulq_f32(x.d, y.d)};
}
QUIRE_INLINE f32 operator/(f32 x, f32 y) {
  return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b), vdivq_f32(x.c, y.c), vdivq_f32(x.d, y.d)};
}
QUIRE_INLINE f32 fma(f32 x, f32 y, f32 z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
// As on x86: the second operand if one is NaN or both are zero. FMAX would return NaN.
QUIRE_INLINE float32x4_t larger_of(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
QUIRE_INLINE float32x4_t smaller_of(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
QUIRE_INLINE f32 max(f32 x, f32 y) {
  return {larger_of(x.a, y.a), larger_of(x.b, y.b), larger_of(x.c, y.c), larger_of(x.d, y.d)};
}
QUIRE_INLINE f32 min(f32 x, f32 y) {
  return {smaller_of(x.a, y.a), smaller_of(x.b, y.b), smaller_of(x.c, y.c), smaller_of(x.d, y.d)};
}
QUIRE_INLINE f32 abs(f32 x) { return {vabsq_f32(x.a), vabsq_f32(x.b), vabsq_f32(x.c), vabsq_f32(x.d)}; }
QUIRE_INLINE f32 round(f32 x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b), vrndnq_f32(x.c), vrndnq_f32(x.d)}; }

// The bits of lanes 0 to 3.
QUIRE_INLINE uint32x4_t lane_bits() {
  static const uint32_t bits[4] = {1, 2, 4, 8};
  return vld1q_u32(bits);
}
QUIRE_INLINE f32 select(uint32_t bits, f32 yes, f32 no) {
  uint32x4_t all = vdupq_n_u32(bits), place = lane_bits();
  return {vbslq_f32(vtstq_u32(all, place), yes.a, no.a), vbslq_f32(vtstq_u32(all, vshlq_n_u32(place, 4)), yes.b, no.b),
          vbslq_f32(vtstq_u32(all, vshlq_n_u32(place, 8)), yes.c, no.c),
          vbslq_f32(vtstq_u32(all, vshlq_n_u32(place, 12)), yes.d, no.d)};
}
// One bit for each lane of four comparisons.
QUIRE_INLINE uint32_t gather_bits(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
  uint16x8_t low = vcombine_u16(vmovn_u32(a), vmovn_u32(b)), high = vcombine_u16(vmovn_u32(c), vmovn_u32(d));
  static const uint16_t bits[8] = {1, 2, 4, 8, 16, 32, 64, 128};
  uint16x8_t place = vld1q_u16(bits);
  return vaddvq_u16(vorrq_u16(vandq_u16(low, place), vandq_u16(high, vshlq_n_u16(place, 8))));
}
QUIRE_INLINE uint32_t less(f32 x, f32 y) {
  return gather_bits(vcltq_f32(x.a, y.a), vcltq_f32(x.b, y.b), vcltq_f32(x.c, y.c), vcltq_f32(x.d, y.d));
}
QUIRE_INLINE uint32_t not_less(f32 x, f32 y) { return ~less(x, y) & 0xffff; }
QUIRE_INLINE uint32_t same(f32 x, f32 y) {
  return gather_bits(vceqq_f32(x.a, y.a), vceqq_f32(x.b, y.b), vceqq_f32(x.c, y.c), vceqq_f32(x.d, y.d));
}
QUIRE_INLINE float32x4_t zero_if_less(float32x4_t x, float32x4_t y, float32x4_t value) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(x, y)));
}
QUIRE_INLINE f32 zero_if_less(f32 x, f32 y, f32 value) {
  return {zero_if_less(x.a, y.a, value.a), zero_if_less(x.b, y.b, value.b), zero_if_less(x.c, y.c, value.c),
          zero_if_less(x.d, y.d, value.d)};
}
// Lanes are added in the order of the other families: those 8 apart, then 4, 2 and 1 apart.
QUIRE_INLINE float sum(f32 x) {
  float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
  float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
QUIRE_INLINE float largest(f32 x) {
  float32x4_t four = larger_of(larger_of(x.a, x.c), larger_of(x.b, x.d));
  float32x4_t two = larger_of(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(larger_of(two, vextq_f32(two, two, 1)), 0);
}
QUIRE_INLINE float32x4_t power_of_two(float32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
QUIRE_INLINE f32 scale_by_power(f32 x, f32 n) {
  return x * f32{power_of_two(n.a), power_of_two(n.b), power_of_two(n.c), power_of_two(n.d)};
}
QUIRE_INLINE f32 scale_by_power(uint32_t bits, f32 x, f32 n) { return select(bits, scale_by_power(x, n), zero()); }

QUIRE_INLINE f32 widen_bf16(uint16x8_t low, uint16x8_t high) {
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(low), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(low, 16)),
          vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(high), 16)),
          vreinterpretq_f32_u32(vshll_high_n_u16(high, 16))};
}
QUIRE_INLINE f32 load_bf16(const uint16_t* p) { return widen_bf16(vld1q_u16(p), vld1q_u16(p + 8)); }
QUIRE_INLINE f32 load_f16(const uint16_t* p) {
  float16x8_t low = vreinterpretq_f16_u16(vld1q_u16(p)), high = vreinterpretq_f16_u16(vld1q_u16(p + 8));
  return {vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
          vcvt_high_f32_f16(high)};
}
QUIRE_INLINE f32 load_i8(const int8_t* p) {
  int8x16_t x = vld1q_s8(p);
  int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
          vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
}
QUIRE_INLINE f32 load_u8(const uint8_t* p) {
  uint8x16_t x = vld1q_u8(p);
  uint16x8_t low = vmovl_u8(vget_low_u8(x)), high = vmovl_high_u8(x);
  return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
          vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_high_u16(high))};
}
QUIRE_INLINE uint16x4_t round_bf16(float32x4_t x) {
  uint32x4_t bits = vreinterpretq_u32_f32(x);
  uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000)), 16);
}
QUIRE_INLINE void store_bf16(uint16_t* p, f32 x) {
  vst1q_u16(p, vcombine_u16(round_bf16(x.a), round_bf16(x.b)));
  vst1q_u16(p + 8, vcombine_u16(round_bf16(x.c), round_bf16(x.d)));
}
QUIRE_INLINE int8x16_t round_i8(f32 x) {
  int16x8_t low = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(x.a)), vmovn_s32(vcvtnq_s32_f32(x.b)));
  int16x8_t high = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(x.c)), vmovn_s32(vcvtnq_s32_f32(x.d)));
  return vcombine_s8(vmovn_s16(low), vmovn_s16(high));
}
QUIRE_INLINE void store_i8(int8_t* p, f32 x) { vst1q_s8(p, round_i8(x)); }

QUIRE_INLINE uint8x16_t bytes(int32x4_t x) { return vreinterpretq_u8_s32(x); }
QUIRE_INLINE i32 from_bytes(uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d) {
  return {vreinterpretq_s32_u8(a), vreinterpretq_s32_u8(b), vreinterpretq_s32_u8(c), vreinterpretq_s32_u8(d)};
}
QUIRE_INLINE i32 load_bytes(const uint8_t* p) {
  return from_bytes(vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48));
}
QUIRE_INLINE void store_bytes(uint8_t* p, i32 x) {
  vst1q_u8(p, bytes(x.a));
  vst1q_u8(p + 16, bytes(x.b));
  vst1q_u8(p + 32, bytes(x.c));
  vst1q_u8(p + 48, bytes(x.d));
}
QUIRE_INLINE i32 low_nibbles(i32 x) {
  uint8x16_t low = vdupq_n_u8(15);
  return from_bytes(vandq_u8(bytes(x.a), low), vandq_u8(bytes(x.b), low), vandq_u8(bytes(x.c), low),
                    vandq_u8(bytes(x.d), low));
}
QUIRE_INLINE i32 high_nibbles(i32 x) {
  return from_bytes(vshrq_n_u8(bytes(x.a), 4), vshrq_n_u8(bytes(x.b), 4), vshrq_n_u8(bytes(x.c), 4),
                    vshrq_n_u8(bytes(x.d), 4));
}
// `value` in the bytes whose bit is set, of the 16 bits in bytes 2 * index and 2 * index + 1 of `bits`.
template <int value>
QUIRE_INLINE uint8x16_t fifth_bits(uint8x16_t bits, int index) {
  const auto first = static_cast<uint8_t>(2 * index), second = static_cast<uint8_t>(2 * index + 1);
  uint8x16_t from = vcombine_u8(vdup_n_u8(first), vdup_n_u8(second));
  uint8x16_t place = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
  return vandq_u8(vtstq_u8(vqtbl1q_u8(bits, from), place), vdupq_n_u8(value));
}
template <int value = 16>
QUIRE_INLINE i32 add_fifth_bits(i32 x, uint64_t bits) {
  uint8x16_t all = vreinterpretq_u8_u64(vdupq_n_u64(bits));
  return from_bytes(vorrq_u8(bytes(x.a), fifth_bits<value>(all, 0)), vorrq_u8(bytes(x.b), fifth_bits<value>(all, 1)),
                    vorrq_u8(bytes(x.c), fifth_bits<value>(all, 2)), vorrq_u8(bytes(x.d), fifth_bits<value>(all, 3)));
}
template <int t>
QUIRE_INLINE uint8x16_t take_two_bits(int32x4_t x) {
  uint8x16_t bits = bytes(x);
  if constexpr (t > 0) bits = vshrq_n_u8(bits, 2 * t);
  return vandq_u8(bits, vdupq_n_u8(3));
}
template <int t>
QUIRE_INLINE i32 take_two_bits(i32 x) {
  return from_bytes(take_two_bits<t>(x.a), take_two_bits<t>(x.b), take_two_bits<t>(x.c), take_two_bits<t>(x.d));
}
QUIRE_INLINE i32 look_up(i32 nibbles, const uint8_t* table) {
  uint8x16_t entries = vld1q_u8(table);
  return from_bytes(vqtbl1q_u8(entries, bytes(nibbles.a)), vqtbl1q_u8(entries, bytes(nibbles.b)),
                    vqtbl1q_u8(entries, bytes(nibbles.c)), vqtbl1q_u8(entries, bytes(nibbles.d)));
}
QUIRE_INLINE float16x8_t widen_f8(uint8x8_t x) {
  uint16x8_t wide = vmovl_u8(x);
  uint16x8_t sign = vshlq_n_u16(vandq_u16(wide, vdupq_n_u16(0x80)), 8);
  return vreinterpretq_f16_u16(vorrq_u16(sign, vshlq_n_u16(vandq_u16(wide, vdupq_n_u16(0x7f)), 7)));
}
QUIRE_INLINE f32 load_f8(const uint8_t* p) {
  uint8x16_t x = vld1q_u8(p);
  float16x8_t low = widen_f8(vget_low_u8(x)), high = widen_f8(vget_high_u8(x));
  return {vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
          vcvt_high_f32_f16(high)};
}
template <int t>
QUIRE_INLINE uint8x16_t add_two_bits(int32x4_t x, int32x4_t high) {
  uint8x16_t bits = bytes(high);
  if constexpr (t < 2) bits = vshlq_n_u8(bits, 4 - 2 * t);
  if constexpr (t > 2) bits = vshrq_n_u8(bits, 2 * t - 4);
  return vorrq_u8(bytes(x), vandq_u8(bits, vdupq_n_u8(0x30)));
}
template <int t>
QUIRE_INLINE i32 add_two_bits(i32 x, i32 high) {
  return from_bytes(add_two_bits<t>(x.a, high.a), add_two_bits<t>(x.b, high.b), add_two_bits<t>(x.c, high.c),
                    add_two_bits<t>(x.d, high.d));
}
QUIRE_INLINE i32 subtract_bytes(i32 x, int y) {
  uint8x16_t all = vdupq_n_u8(static_cast<uint8_t>(y));
  return from_bytes(vsubq_u8(bytes(x.a), all), vsubq_u8(bytes(x.b), all), vsubq_u8(bytes(x.c), all),
                    vsubq_u8(bytes(x.d), all));
}
QUIRE_INLINE i32 set1_i32(int32_t x) {
  int32x4_t all = vdupq_n_s32(x);
  return {all, all, all, all};
}
QUIRE_INLINE i32 zero_i32() { return set1_i32(0); }
QUIRE_INLINE f32 to_float(i32 x) {
  return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)};
}
QUIRE_INLINE uint32x4_t words(int32x4_t x) { return vreinterpretq_u32_s32(x); }
QUIRE_INLINE f32 to_float_unsigned(i32 x) {
  return {vcvtq_f32_u32(words(x.a)), vcvtq_f32_u32(words(x.b)), vcvtq_f32_u32(words(x.c)), vcvtq_f32_u32(words(x.d))};
}
QUIRE_INLINE i32 iota_i32(int32_t first) {
  static const int32_t lanes[4] = {0, 1, 2, 3};
  int32x4_t a = vaddq_s32(vld1q_s32(lanes), vdupq_n_s32(first)), four = vdupq_n_s32(4);
  int32x4_t b = vaddq_s32(a, four), c = vaddq_s32(b, four);
  return {a, b, c, vaddq_s32(c, four)};
}
QUIRE_INLINE i32 exclusive_or(i32 x, i32 y) {
  return {veorq_s32(x.a, y.a), veorq_s32(x.b, y.b), veorq_s32(x.c, y.c), veorq_s32(x.d, y.d)};
}
struct Wide {
  i32 high, low;
};
QUIRE_INLINE int32x4_t multiply_high(int32x4_t x, uint32x4_t factor) {
  uint64x2_t low = vmull_u32(vget_low_u32(words(x)), vget_low_u32(factor)), high = vmull_high_u32(words(x), factor);
  return vreinterpretq_s32_u32(vuzp2q_u32(vreinterpretq_u32_u64(low), vreinterpretq_u32_u64(high)));
}
QUIRE_INLINE Wide multiply_wide(i32 x, uint32_t y) {
  uint32x4_t by = vdupq_n_u32(y);
  int32x4_t factor = vreinterpretq_s32_u32(by);
  return {{multiply_high(x.a, by), multiply_high(x.b, by), multiply_high(x.c, by), multiply_high(x.d, by)},
          {vmulq_s32(x.a, factor), vmulq_s32(x.b, factor), vmulq_s32(x.c, factor), vmulq_s32(x.d, factor)}};
}

QUIRE_INLINE int8x16_t codes_of(int32x4_t x) { return vreinterpretq_s8_s32(x); }
#if defined(__ARM_FEATURE_MATMUL_INT8)
QUIRE_INLINE int32x4_t dot_quarter(int32x4_t sum, int32x4_t codes, int32x4_t quad) {
  return vusdotq_s32(sum, bytes(codes), codes_of(quad));
}
#elif defined(__ARM_FEATURE_DOTPROD)
QUIRE_INLINE int32x4_t dot_quarter(int32x4_t sum, int32x4_t codes, int32x4_t quad) {
  return vdotq_s32(sum, codes_of(codes), codes_of(quad));
}
#else
// Pairs are first added in 16 bits: 2 * 128 * 127 fits.
QUIRE_INLINE int32x4_t dot_quarter(int32x4_t sum, int32x4_t codes, int32x4_t quad) {
  int8x16_t x = codes_of(codes), y = codes_of(quad);
  return vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y)));
}
#endif
QUIRE_INLINE i32 dot(i32 sum, i32 codes, i32 quad) {
  return {dot_quarter(sum.a, codes.a, quad.a), dot_quarter(sum.b, codes.b, quad.b),
          dot_quarter(sum.c, codes.c, quad.c), dot_quarter(sum.d, codes.d, quad.d)};
}
#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr bool kSignedBytes = false;
QUIRE_INLINE i32 dot_wide(i32 sum, i32 codes, i32 quad) { return dot(sum, codes, quad); }
#else
constexpr bool kSignedBytes = true;
QUIRE_INLINE i32 dot_wide(i32 sum, i32 codes, i32 quad) {
  return dot(sum, exclusive_or(codes, set1_i32(static_cast<int32_t>(0x80808080))), quad);
}
#endif

constexpr int kMaxTile = 3;
constexpr int panels_at_once(int) { return 1; }
constexpr int kMaxDenseTile = 3;

struct i8x32 {
  int8x16_t low, high;
};
QUIRE_INLINE i8x32 to_codes(f32 low, f32 high) { return {round_i8(low), round_i8(high)}; }
struct HalfSums {
  int32_t low, high;
};
QUIRE_INLINE HalfSums sum_codes(i8x32 codes) { return {vaddlvq_s8(codes.low), vaddlvq_s8(codes.high)}; }
QUIRE_INLINE void store_codes(int8_t* p, i8x32 codes) {
  vst1q_s8(p, codes.low);
  vst1q_s8(p + 16, codes.high);
}

}  // namespace QUIRE_ISA
}  // namespace quire
