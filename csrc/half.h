// Scalar conversions of float16 and bfloat16 for any processor. Code that packs and unpacks a model uses them. Kernels
// convert whole vectors instead (simd.h).
#pragma once

#include <cstdint>
#include <cstring>

namespace quire {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float half_to_float(uint16_t half) {
  uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 0x3ffu;
  if (exponent == 31) return bits_float(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) return bits_float(sign | float_bits(static_cast<float>(fraction) * 0x1p-24f));
  return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
}

// Rounds to nearest, ties to even. Values that are too large become infinite. NaN stays NaN.
inline uint16_t float_to_half(float value) {
  uint32_t sign = float_bits(value) >> 16 & 0x8000u, magnitude = float_bits(value) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  // One unit in the last place of 0.5f equals the smallest float16, so this addition rounds to a subnormal.
  if (magnitude < 0x38800000u) {
    return static_cast<uint16_t>(sign | (float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f)));
  }
  uint32_t rounded = magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

inline float bfloat_to_float(uint16_t value) { return bits_float(static_cast<uint32_t>(value) << 16); }

// Rounds to nearest, ties to even. NaN stays NaN.
inline uint16_t float_to_bfloat(float value) {
  uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// 2^(exponent - 128), the half of a scale of MXFP4 in GGUF files.
inline float exponent_to_half_scale(uint8_t exponent) {
  return bits_float(exponent < 2 ? 0x00200000u << exponent : static_cast<uint32_t>(exponent - 1) << 23);
}

// The scale of 32 values `k` of an IQ4_XS block: 6 bits in two fields.
inline float iq4_scale(const uint8_t* block, int k) {
  uint16_t d, high;
  std::memcpy(&d, block, 2);
  std::memcpy(&high, block + 2, 2);
  const int low = block[4 + k / 2] >> k % 2 * 4 & 15;
  return half_to_float(d) * static_cast<float>((low | (high >> 2 * k & 3) << 4) - 32);
}

// float8 e4m3. The bits are those of a float16 that is 2^8 times smaller.
inline float float8_to_float(uint8_t value) {
  return half_to_float(static_cast<uint16_t>((value & 0x80u) << 8 | (value & 0x7fu) << 7)) * 256.0f;
}

}  // namespace quire
