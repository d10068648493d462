// Vectors of 16 lanes with AVX-512: one register. Included by simd.h, which states what each function does.
#pragma once

#include <immintrin.h>

#include "simd_x86.h"

namespace quire {
namespace QUIRE_ISA {

struct f32 {
  __m512 v;
};
struct i32 {
  __m512i v;
};

QUIRE_INLINE f32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
QUIRE_INLINE void store(float* p, f32 x) { _mm512_storeu_ps(p, x.v); }
QUIRE_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
QUIRE_INLINE f32 load_part(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
QUIRE_INLINE void store_part(float* p, f32 x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
QUIRE_INLINE f32 set1(float x) { return {_mm512_set1_ps(x)}; }
QUIRE_INLINE f32 zero() { return {_mm512_setzero_ps()}; }
QUIRE_INLINE f32 iota() {
  return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}
QUIRE_INLINE f32 operator+(f32 a, f32 b) { return {_mm512_add_ps(a.v, b.v)}; }
QUIRE_INLINE f32 operator-(f32 a, f32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
QUIRE_INLINE f32 operator*(f32 a, f32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
QUIRE_INLINE f32 operator/(f32 a, f32 b) { return {_mm512_div_ps(a.v, b.v)}; }
QUIRE_INLINE f32 fma(f32 a, f32 b, f32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
QUIRE_INLINE f32 max(f32 a, f32 b) { return {_mm512_max_ps(a.v, b.v)}; }
QUIRE_INLINE f32 min(f32 a, f32 b) { return {_mm512_min_ps(a.v, b.v)}; }
QUIRE_INLINE f32 abs(f32 a) { return {_mm512_abs_ps(a.v)}; }
QUIRE_INLINE f32 round(f32 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// Takes lanes whose bit is set from `yes`, other lanes from `no`.
QUIRE_INLINE f32 select(uint32_t bits, f32 yes, f32 no) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), no.v, yes.v)};
}
QUIRE_INLINE uint32_t less(f32 a, f32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
QUIRE_INLINE uint32_t not_less(f32 a, f32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ); }
QUIRE_INLINE uint32_t same(f32 a, f32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
// `value` in lanes where a is not less than b, 0 in other lanes for any value.
QUIRE_INLINE f32 zero_if_less(f32 a, f32 b, f32 value) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ), value.v)};
}
QUIRE_INLINE float sum(f32 a) { return _mm512_reduce_add_ps(a.v); }
QUIRE_INLINE float largest(f32 a) { return _mm512_reduce_max_ps(a.v); }
// x * 2^n for whole n in [-126, 127].
QUIRE_INLINE f32 scale_by_power(f32 x, f32 n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// The same in lanes whose bit is set, and 0 in other lanes for any x and n.
QUIRE_INLINE f32 scale_by_power(uint32_t bits, f32 x, f32 n) {
  return {_mm512_maskz_scalef_ps(static_cast<__mmask16>(bits), x.v, n.v)};
}

QUIRE_INLINE f32 load_bf16(const uint16_t* p) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
QUIRE_INLINE f32 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
QUIRE_INLINE f32 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
QUIRE_INLINE f32 load_u8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Rounds to nearest, ties to even. NaN stays NaN.
QUIRE_INLINE void store_bf16(uint16_t* p, f32 x) {
  __m512i bits = _mm512_castps_si512(x.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
// Rounds to nearest. Values must be in [-127, 127].
QUIRE_INLINE void store_i8(int8_t* p, f32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

QUIRE_INLINE i32 load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
QUIRE_INLINE void store_bytes(uint8_t* p, i32 x) { _mm512_storeu_si512(p, x.v); }
QUIRE_INLINE i32 low_nibbles(i32 x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
QUIRE_INLINE i32 high_nibbles(i32 x) { return low_nibbles({_mm512_srli_epi16(x.v, 4)}); }
// Adds `value` to the bytes whose bit is set. Bytes are below it.
template <int value = 16>
QUIRE_INLINE i32 add_fifth_bits(i32 x, uint64_t bits) {
  return {_mm512_mask_add_epi8(x.v, bits, x.v, _mm512_set1_epi8(value))};
}
// Bits 2t and 2t + 1 of each byte.
template <int t>
QUIRE_INLINE i32 take_two_bits(i32 x) {
  return {_mm512_and_si512(_mm512_srli_epi16(x.v, 2 * t), _mm512_set1_epi8(3))};
}
// The entries of a table of 16 bytes, which `table` has four times.
QUIRE_INLINE i32 look_up(i32 nibbles, const uint8_t* table) {
  return {_mm512_shuffle_epi8(_mm512_load_si512(table), nibbles.v)};
}
// 16 float8 e4m3 times 2^-8: the bits of float16, moved. Exact.
QUIRE_INLINE f32 load_f8(const uint8_t* p) {
  __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
  __m256i rest = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7);
  return {_mm512_cvtph_ps(_mm256_or_si256(sign, rest))};
}
// Bits 2t and 2t + 1 of each byte, moved to bits 4 and 5 and combined with x.
template <int t>
QUIRE_INLINE i32 add_two_bits(i32 x, i32 high) {
  __m512i bits = t < 2 ? _mm512_slli_epi16(high.v, 4 - 2 * t) : _mm512_srli_epi16(high.v, 2 * t - 4);
  return {_mm512_or_si512(x.v, _mm512_and_si512(bits, _mm512_set1_epi8(0x30)))};
}
QUIRE_INLINE i32 subtract_bytes(i32 x, int y) {
  return {_mm512_sub_epi8(x.v, _mm512_set1_epi8(static_cast<char>(y)))};
}
QUIRE_INLINE i32 set1_i32(int32_t x) { return {_mm512_set1_epi32(x)}; }
QUIRE_INLINE i32 zero_i32() { return {_mm512_setzero_si512()}; }
QUIRE_INLINE f32 to_float(i32 x) { return {_mm512_cvtepi32_ps(x.v)}; }
QUIRE_INLINE f32 to_float_unsigned(i32 x) { return {_mm512_cvtepu32_ps(x.v)}; }
QUIRE_INLINE i32 iota_i32(int32_t first) {
  __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_add_epi32(lanes, _mm512_set1_epi32(first))};
}
QUIRE_INLINE i32 exclusive_or(i32 x, i32 y) { return {_mm512_xor_si512(x.v, y.v)}; }
struct Wide {
  i32 high, low;
};
// Both halves of the unsigned 64-bit product of each lane.
QUIRE_INLINE Wide multiply_wide(i32 x, uint32_t y) {
  __m512i factor = _mm512_set1_epi32(static_cast<int32_t>(y));
  __m512i even = _mm512_mul_epu32(x.v, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(x.v, 32), factor);
  __m512i high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  return {{high}, {_mm512_mullo_epi32(x.v, factor)}};
}
// Adds to each lane the product of four unsigned codes (at most 63) and four signed ones. dot_wide multiplies codes of
// at most 255. If kSignedBytes, it multiplies the codes minus 128.
constexpr bool kSignedBytes = false;
QUIRE_INLINE i32 dot(i32 sum, i32 codes, i32 quad) { return {_mm512_dpbusd_epi32(sum.v, codes.v, quad.v)}; }
QUIRE_INLINE i32 dot_wide(i32 sum, i32 codes, i32 quad) { return dot(sum, codes, quad); }

// Writes (value, number) of the lanes whose bit is set, in order, and returns how many these are. Overwrites memory of
// up to 16 pairs.
QUIRE_INLINE int store_pairs(void* to, uint32_t bits, f32 values, i32 numbers) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __m512i v = _mm512_castps_si512(values.v);
  const int first = __builtin_popcount(bits & 0xff), last = __builtin_popcount(bits >> 8);
  char* pairs = static_cast<char*>(to);
  _mm512_storeu_si512(pairs, _mm512_maskz_compress_epi64(static_cast<__mmask8>(bits),
                                                         _mm512_permutex2var_epi32(v, low, numbers.v)));
  _mm512_storeu_si512(pairs + 8 * first, _mm512_maskz_compress_epi64(static_cast<__mmask8>(bits >> 8),
                                                                     _mm512_permutex2var_epi32(v, high, numbers.v)));
  return first + last;
}

constexpr int kMaxTile = 6;        // rows whose sums over two panels fit into registers
// The number of panels that are multiplied with a tile at once. Two, because loads are the bottleneck. One and two rows
// are limited by memory, whose bandwidth is higher with more streams.
constexpr int panels_at_once(int rows) { return rows <= 2 ? 4 : 2; }
constexpr int kMaxDenseTile = 12;  // rows whose sums over two dense panels fit into registers

// 32 values in [-127, 127] as bytes, rounded to nearest. NaN becomes an unspecified byte.
QUIRE_INLINE i8x32 to_codes(f32 low, f32 high) {
  __m128i first = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(low.v));
  __m128i last = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(high.v));
  return {_mm256_inserti128_si256(_mm256_castsi128_si256(first), last, 1)};
}

}  // namespace QUIRE_ISA
}  // namespace quire
