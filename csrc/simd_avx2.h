// Vectors of 16 lanes with AVX2: two registers. Included by simd.h.
#pragma once

#include <immintrin.h>

#include "simd_x86.h"

namespace quire {
namespace QUIRE_ISA {

struct f32 {
  __m256 a, b;
};
struct i32 {
  __m256i a, b;
};

QUIRE_INLINE f32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
QUIRE_INLINE void store(float* p, f32 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
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
QUIRE_INLINE f32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
QUIRE_INLINE f32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
QUIRE_INLINE f32 iota() {
  return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)};
}
QUIRE_INLINE f32 operator+(f32 x, f32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
QUIRE_INLINE f32 operator-(f32 x, f32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
QUIRE_INLINE f32 operator*(f32 x, f32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
QUIRE_INLINE f32 operator/(f32 x, f32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
QUIRE_INLINE f32 fma(f32 x, f32 y, f32 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
QUIRE_INLINE f32 max(f32 x, f32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
QUIRE_INLINE f32 min(f32 x, f32 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
QUIRE_INLINE f32 abs(f32 x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
QUIRE_INLINE f32 round(f32 x) {
  constexpr int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, how), _mm256_round_ps(x.b, how)};
}
QUIRE_INLINE __m256 lanes_of(uint32_t bits, int shift) {
  __m256i place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits >> shift)), place);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, place));
}
QUIRE_INLINE f32 select(uint32_t bits, f32 yes, f32 no) {
  return {_mm256_blendv_ps(no.a, yes.a, lanes_of(bits, 0)), _mm256_blendv_ps(no.b, yes.b, lanes_of(bits, 8))};
}
template <int how>
QUIRE_INLINE uint32_t compare(f32 x, f32 y) {
  uint32_t low = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, how)));
  uint32_t high = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, how)));
  return low | high << 8;
}
QUIRE_INLINE uint32_t less(f32 x, f32 y) { return compare<_CMP_LT_OQ>(x, y); }
QUIRE_INLINE uint32_t not_less(f32 x, f32 y) { return compare<_CMP_NLT_UQ>(x, y); }
QUIRE_INLINE uint32_t same(f32 x, f32 y) { return compare<_CMP_EQ_OQ>(x, y); }
QUIRE_INLINE f32 zero_if_less(f32 x, f32 y, f32 value) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, y.a, _CMP_NLT_UQ), value.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, y.b, _CMP_NLT_UQ), value.b)};
}
QUIRE_INLINE float sum(f32 x) {
  __m256 eight = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
QUIRE_INLINE float largest(f32 x) {
  __m256 eight = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
QUIRE_INLINE __m256 power_of_two(__m256 n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
QUIRE_INLINE f32 scale_by_power(f32 x, f32 n) {
  return {_mm256_mul_ps(x.a, power_of_two(n.a)), _mm256_mul_ps(x.b, power_of_two(n.b))};
}
QUIRE_INLINE f32 scale_by_power(uint32_t bits, f32 x, f32 n) { return select(bits, scale_by_power(x, n), zero()); }

QUIRE_INLINE __m128i half_of(const void* p, int index) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p) + index);
}
QUIRE_INLINE __m256 widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
QUIRE_INLINE f32 load_bf16(const uint16_t* p) { return {widen_bf16(half_of(p, 0)), widen_bf16(half_of(p, 1))}; }
QUIRE_INLINE f32 load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(half_of(p, 0)), _mm256_cvtph_ps(half_of(p, 1))}; }
QUIRE_INLINE f32 load_i8(const int8_t* p) {
  __m128i x = half_of(p, 0);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
QUIRE_INLINE f32 load_u8(const uint8_t* p) {
  __m128i x = half_of(p, 0);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
QUIRE_INLINE __m256i round_bf16(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
QUIRE_INLINE void store_bf16(uint16_t* p, f32 x) {
  __m256i packed = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
QUIRE_INLINE void store_i8(int8_t* p, f32 x) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

QUIRE_INLINE i32 load_bytes(const uint8_t* p) {
  const __m256i* at = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
QUIRE_INLINE void store_bytes(uint8_t* p, i32 x) {
  __m256i* at = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(at, x.a);
  _mm256_storeu_si256(at + 1, x.b);
}
QUIRE_INLINE i32 low_nibbles(i32 x) {
  __m256i low = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low)};
}
QUIRE_INLINE i32 high_nibbles(i32 x) { return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
template <int value>
QUIRE_INLINE __m256i fifth_bits(uint32_t bits) {
  __m256i bytes = _mm256_shuffle_epi8(
      _mm256_set1_epi32(static_cast<int>(bits)),
      _mm256_setr_epi64x(0x0000000000000000, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  __m256i place = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, place), place);
  return _mm256_and_si256(set, _mm256_set1_epi8(value));
}
template <int value = 16>
QUIRE_INLINE i32 add_fifth_bits(i32 x, uint64_t bits) {
  return {_mm256_or_si256(x.a, fifth_bits<value>(static_cast<uint32_t>(bits))),
          _mm256_or_si256(x.b, fifth_bits<value>(static_cast<uint32_t>(bits >> 32)))};
}
template <int t>
QUIRE_INLINE i32 take_two_bits(i32 x) {
  __m256i low = _mm256_set1_epi8(3);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 2 * t), low), _mm256_and_si256(_mm256_srli_epi16(x.b, 2 * t), low)};
}
QUIRE_INLINE i32 look_up(i32 nibbles, const uint8_t* table) {
  __m256i entries = _mm256_load_si256(reinterpret_cast<const __m256i*>(table));
  return {_mm256_shuffle_epi8(entries, nibbles.a), _mm256_shuffle_epi8(entries, nibbles.b)};
}
QUIRE_INLINE f32 load_f8(const uint8_t* p) {
  __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
  __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}
template <int t>
QUIRE_INLINE __m256i two_bits(__m256i high) {
  __m256i bits = t < 2 ? _mm256_slli_epi16(high, 4 - 2 * t) : _mm256_srli_epi16(high, 2 * t - 4);
  return _mm256_and_si256(bits, _mm256_set1_epi8(0x30));
}
template <int t>
QUIRE_INLINE i32 add_two_bits(i32 x, i32 high) {
  return {_mm256_or_si256(x.a, two_bits<t>(high.a)), _mm256_or_si256(x.b, two_bits<t>(high.b))};
}
QUIRE_INLINE i32 set1_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
QUIRE_INLINE i32 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
QUIRE_INLINE f32 to_float(i32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
// The upper half times 2^16 is exact, so the sum is rounded once.
QUIRE_INLINE __m256 unsigned_to_float(__m256i x) {
  __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 16));
  __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)));
  return _mm256_fmadd_ps(high, _mm256_set1_ps(65536.0f), low);
}
QUIRE_INLINE f32 to_float_unsigned(i32 x) { return {unsigned_to_float(x.a), unsigned_to_float(x.b)}; }
QUIRE_INLINE i32 iota_i32(int32_t first) {
  __m256i lanes = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
  return {lanes, _mm256_add_epi32(lanes, _mm256_set1_epi32(8))};
}
QUIRE_INLINE i32 exclusive_or(i32 x, i32 y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
struct Wide {
  i32 high, low;
};
QUIRE_INLINE __m256i multiply_high(__m256i x, __m256i factor) {
  __m256i even = _mm256_mul_epu32(x, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor);
  return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
// Both halves of the unsigned 64-bit product of each lane.
QUIRE_INLINE Wide multiply_wide(i32 x, uint32_t y) {
  __m256i factor = _mm256_set1_epi32(static_cast<int32_t>(y));
  return {{multiply_high(x.a, factor), multiply_high(x.b, factor)},
          {_mm256_mullo_epi32(x.a, factor), _mm256_mullo_epi32(x.b, factor)}};
}
constexpr bool kSignedBytes = false;
#ifdef __AVXVNNI__
QUIRE_INLINE i32 dot(i32 sum, i32 codes, i32 quad) {
  return {_mm256_dpbusd_avx_epi32(sum.a, codes.a, quad.a), _mm256_dpbusd_avx_epi32(sum.b, codes.b, quad.b)};
}
QUIRE_INLINE i32 dot_wide(i32 sum, i32 codes, i32 quad) { return dot(sum, codes, quad); }
#else
// Pairs are first added in 16 bits: 2 * 63 * 127 fits, 2 * 255 * 127 does not.
QUIRE_INLINE __m256i dot_half(__m256i sum, __m256i codes, __m256i quad) {
  __m256i pairs = _mm256_maddubs_epi16(codes, quad);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
QUIRE_INLINE i32 dot(i32 sum, i32 codes, i32 quad) {
  return {dot_half(sum.a, codes.a, quad.a), dot_half(sum.b, codes.b, quad.b)};
}
// Even and odd bytes separately, each widened to 16 bits.
QUIRE_INLINE __m256i dot_wide_half(__m256i sum, __m256i codes, __m256i quad) {
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(255)),
                                   _mm256_srai_epi16(_mm256_slli_epi16(quad, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), _mm256_srai_epi16(quad, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
QUIRE_INLINE i32 dot_wide(i32 sum, i32 codes, i32 quad) {
  return {dot_wide_half(sum.a, codes.a, quad.a), dot_wide_half(sum.b, codes.b, quad.b)};
}
#endif

constexpr int kMaxTile = 3;
constexpr int panels_at_once(int) { return 1; }
constexpr int kMaxDenseTile = 3;

QUIRE_INLINE i8x32 to_codes(f32 low, f32 high) {
  __m256i first = _mm256_packs_epi32(_mm256_cvtps_epi32(low.a), _mm256_cvtps_epi32(low.b));
  __m256i last = _mm256_packs_epi32(_mm256_cvtps_epi32(high.a), _mm256_cvtps_epi32(high.b));
  __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return {_mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, last), order)};
}

}  // namespace QUIRE_ISA
}  // namespace quire
