// What the vectors of AVX-512 and AVX2 share. Included by simd_avx512.h and simd_avx2.h.
#pragma once

#include <immintrin.h>

namespace quire {
namespace QUIRE_ISA {

struct i8x32 {
  __m256i v;
};

// Sums of the first and the last 16 of 32 codes.
struct HalfSums {
  int32_t low, high;
};
QUIRE_INLINE HalfSums sum_codes(i8x32 codes) {
  __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes.v);
  __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
  return {_mm256_cvtsi256_si32(sums), _mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1))};
}
// p is aligned to 32 bytes.
QUIRE_INLINE void store_codes(int8_t* p, i8x32 codes) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), codes.v); }

}  // namespace QUIRE_ISA
}  // namespace quire
