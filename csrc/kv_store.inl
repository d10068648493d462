// Writes the keys and values of a step's tokens into the paged cache, in the layout of attention.h. attention.inl reads
// them. All threads of a team call it, and each writes its share.
#pragma once

#include "attention.h"
#include "pool.h"
#include "quantize.inl"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int kMaxHeadDim = 576;

QUIRE_INLINE void convert_row(const float* x, int size, float* to) {
  for (int d = 0; d < size; d += kLanes) store(to + d, load(x + d));
}

QUIRE_INLINE void convert_row(const float* x, int size, uint16_t* to) {
  for (int d = 0; d < size; d += kLanes) store_bf16(to + d, load(x + d));
}

// The scale of one head of one token whose largest code is `limit`. It is NaN if a value is not finite, so that the
// error is visible in the output.
QUIRE_INLINE float find_scale(const float* x, int size, float limit) {
  f32 highest = zero(), nothing = zero();
  for (int d = 0; d < size; d += kLanes) {
    highest = max(highest, abs(load(x + d)));
    nothing = fma(load(x + d), zero(), nothing);
  }
  return largest(highest) / limit + sum(nothing);
}

QUIRE_INLINE f32 inverse_of(float scale) {
  constexpr float smallest_normal = 1.17549435e-38f;
  return set1(scale >= smallest_normal ? 1.0f / scale : 0.0f);
}

// Writes the codes of one head of one token and returns their scale.
QUIRE_INLINE float quantize_row(const float* x, int size, int8_t* to) {
  const float scale = find_scale(x, size, 127.0f);
  const f32 inverse = inverse_of(scale);
  for (int d = 0; d < size; d += kLanes) {
    store_i8(to + d, min(max(load(x + d) * inverse, set1(-127.0f)), set1(127.0f)));
  }
  return scale;
}

// float8 e4m3 of 16 numbers from -448 to 448, to the nearest, ties to even. A loop of integers, which compilers turn
// into vectors.
QUIRE_INLINE void convert_to_f8(const float* x, uint8_t* to) {
  constexpr float magic = 16384.0f;  // sums with it are multiples of 2^-9, the step of subnormal codes
  constexpr uint32_t magic_bits = 0x46800000u, first_normal = 121u << 23, bias = 120u << 3;
  for (int i = 0; i < kLanes; ++i) {
    uint32_t bits, small;
    std::memcpy(&bits, x + i, 4);
    const uint32_t size = bits & 0x7fffffffu;
    const float moved = __builtin_fabsf(x[i]) + magic;
    std::memcpy(&small, &moved, 4);
    const uint32_t normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - bias;
    const uint32_t code = size < first_normal ? small - magic_bits : normal;
    to[i] = static_cast<uint8_t>((bits >> 24 & 0x80u) | (code & 0x7fu));
  }
}

QUIRE_INLINE float quantize_row(const float* x, int size, uint8_t* to) {
  const float scale = find_scale(x, size, 448.0f);
  const f32 inverse = inverse_of(scale);
  for (int d = 0; d < size; d += kLanes) {
    float part[kLanes];
    store(part, min(max(load(x + d) * inverse, set1(-448.0f)), set1(448.0f)));
    convert_to_f8(part, to + d);
  }
  return scale * 256.0f;
}

template <class Item>
QUIRE_INLINE void scatter(const Item* row, int size, Item* to, int stride) {
  for (int d = 0; d < size; ++d) to[int64_t{d} * stride] = row[d];
}

// Stores one head of one token in a dense cache. `keys` and `values` are that head's part of the block.
template <class Item>
QUIRE_INLINE void store_dense(const CacheShape& shape, int offset, const float* k, const float* v, uint8_t* keys,
                              uint8_t* values) {
  Item row[kMaxHeadDim];
  convert_row(k, shape.head_dim, row);
  scatter(row, shape.head_dim, reinterpret_cast<Item*>(keys) + offset, shape.lanes());
  convert_row(v, shape.value_dim, reinterpret_cast<Item*>(values) + int64_t{offset} * shape.value_dim);
}

template <class Code>
QUIRE_INLINE void store_quantized(const CacheShape& shape, int offset, const float* k, const float* v, uint8_t* keys,
                                  uint8_t* values) {
  Code row[kMaxHeadDim];
  float* key_scales = reinterpret_cast<float*>(keys + int64_t{shape.head_dim} * shape.lanes());
  key_scales[offset] = quantize_row(k, shape.head_dim, row);
  scatter(row, shape.head_dim, reinterpret_cast<Code*>(keys) + offset, shape.lanes());
  float* value_scales = reinterpret_cast<float*>(values + int64_t{shape.value_dim} * shape.block_size);
  Code* codes = reinterpret_cast<Code*>(values) + int64_t{offset} * shape.value_dim;
  value_scales[offset] = quantize_row(v, shape.value_dim, codes);
}

// k is [num_tokens][kv_heads][head_dim], v [num_tokens][kv_heads][value_dim], tokens k_stride and v_stride floats apart. The work is divided by
// heads too, because even a single token writes to many cache lines of its block of keys.
static void store_kv(const Cache& cache, const int64_t* slots, int num_tokens, const float* k, int64_t k_stride,
                     const float* v, int64_t v_stride, const Worker& worker) {
  const CacheShape& shape = cache.shape;
  const Span own = share_rows(worker, num_tokens, kRowGrain, shape.kv_heads);
  for (int64_t at = own.first; at < own.last; ++at) {
    const int64_t token = at / shape.kv_heads, head = at % shape.kv_heads;
    if (slots[token] < 0) continue;
    const int64_t block = slots[token] / shape.block_size;
    const int offset = static_cast<int>(slots[token] % shape.block_size);
    const float* key = k + token * k_stride + head * shape.head_dim;
    const float* value = v + token * v_stride + head * shape.value_dim;
    uint8_t* keys = cache.keys + block * cache.key_stride + head * shape.key_head_bytes();
    uint8_t* values = cache.values + block * cache.value_stride + head * shape.value_head_bytes();
    switch (shape.type) {
      case CacheType::F32: store_dense<float>(shape, offset, key, value, keys, values); break;
      case CacheType::BF16: store_dense<uint16_t>(shape, offset, key, value, keys, values); break;
      case CacheType::INT8: store_quantized<int8_t>(shape, offset, key, value, keys, values); break;
      case CacheType::FP8: store_quantized<uint8_t>(shape, offset, key, value, keys, values); break;
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
