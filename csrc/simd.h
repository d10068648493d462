// Vectors of 16 lanes for the instruction set of the translation unit: one register with AVX-512, two with AVX2, four
// with NEON. Kernels are written once on top of this. simd_<family>.h defines the operations of a family; the comments
// in simd_avx512.h hold for all. A lane has the same bits in every family, unless it is NaN.
//
// Each instruction set has its own namespace, so that no two translation units define the same function differently.
// For the same reason kernels use no templates of the standard library: the linker could take them from the wrong
// translation unit.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef QUIRE_ISA
#error "QUIRE_ISA names the namespace of the instruction set"
#endif

#define QUIRE_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__aarch64__)
#include "simd_neon.h"
#else
#error "there are no vectors for this instruction set"
#endif

namespace quire {
namespace QUIRE_ISA {

QUIRE_INLINE i32 broadcast_quad(const uint8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  return set1_i32(quad);
}

#ifndef __AVX512F__
QUIRE_INLINE int store_pairs(void* to, uint32_t bits, f32 values, i32 numbers) {
  alignas(64) float value[16];
  alignas(64) uint32_t number[16];
  store(value, values);
  store_bytes(reinterpret_cast<uint8_t*>(number), numbers);
  char* pair = static_cast<char*>(to);
  const int count = __builtin_popcount(bits);
  for (; bits; bits &= bits - 1, pair += 8) {
    std::memcpy(pair, value + __builtin_ctz(bits), 4);
    std::memcpy(pair + 4, number + __builtin_ctz(bits), 4);
  }
  return count;
}
#endif

// Into the first cache, for what is read within a microsecond, or into the second one. The first has room for few lines on
// their way from memory (24 on Zen 4, 1.5 KB). So a stream that comes from memory is prefetched into the second.
QUIRE_INLINE void prefetch_line(const void* p) { __builtin_prefetch(p); }
QUIRE_INLINE void prefetch_into_second(const void* p) { __builtin_prefetch(p, 0, 2); }

// e^x / 2^n = 1 + r + r^2 * p for n = round(x / ln 2), to about one unit in the last place.
struct ExpRest {
  f32 r, p;
};
QUIRE_INLINE ExpRest reduce_exp(f32 x, f32 n) {
  f32 r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  f32 p = fma(set1(1.9875691e-4f), r, set1(1.3981999e-3f));
  p = fma(p, r, set1(8.3334519e-3f));
  p = fma(p, r, set1(4.1665796e-2f));
  p = fma(p, r, set1(1.6666666e-1f));
  return {r, fma(p, r, set1(0.5f))};
}

QUIRE_INLINE f32 exp_rest(f32 x, f32 n) {
  ExpRest rest = reduce_exp(x, n);
  return fma(rest.p, rest.r * rest.r, rest.r + set1(1.0f));
}

constexpr float kVanishing = -87.3f;  // e^x is about the smallest normal number

// e^x. Results below the smallest normal number are 0. Large x saturate.
QUIRE_INLINE f32 exp(f32 x) {
  const f32 lowest = set1(kVanishing);
  uint32_t vanished = less(x, lowest);
  f32 bounded = min(max(x, lowest), set1(88.3f));
  f32 n = round(bounded * set1(1.44269504f));
  return select(vanished, zero(), scale_by_power(exp_rest(bounded, n), n));
}

// The same for x <= 0, in fewer steps. NaN stays NaN.
QUIRE_INLINE f32 exp_of_negative(f32 x) {
  f32 n = round(x * set1(1.44269504f));
  return scale_by_power(not_less(x, set1(kVanishing)), exp_rest(x, n), n);
}

// 1 / (1 + e^-x)
QUIRE_INLINE f32 sigmoid(f32 x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }

QUIRE_INLINE f32 tanh(f32 x) { return fma(set1(2.0f), sigmoid(x + x), set1(-1.0f)); }

// The same to a few units in the last place, next to 0 too: t / (t + 2) for t = e^(2|x|) - 1. NaN stays NaN.
QUIRE_INLINE f32 precise_tanh(f32 x) {
  f32 twice = min(set1(20.0f), abs(x + x));
  f32 n = round(twice * set1(1.44269504f));
  ExpRest rest = reduce_exp(twice, n);
  f32 power = scale_by_power(set1(1.0f), n);
  f32 t = fma(power, fma(rest.p, rest.r * rest.r, rest.r), power - set1(1.0f));
  f32 size = t / (t + set1(2.0f));
  return select(less(x, zero()), zero() - size, size);
}

}  // namespace QUIRE_ISA
}  // namespace quire
