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

// Writes the codes of one head of one token and returns their scale. The scale is NaN if a value is not finite, so that
// the error is visible in the output.
QUIRE_INLINE float quantize_row(const float* x, int size, int8_t* to) {
  f32 highest = zero(), nothing = zero();
  for (int d = 0; d < size; d += kLanes) {
    highest = max(highest, abs(load(x + d)));
    nothing = fma(load(x + d), zero(), nothing);
  }
  constexpr float smallest_normal = 1.17549435e-38f;
  float scale = largest(highest) / 127.0f + sum(nothing);
  f32 inverse = set1(scale >= smallest_normal ? 1.0f / scale : 0.0f);
  for (int d = 0; d < size; d += kLanes) {
    store_i8(to + d, min(max(load(x + d) * inverse, set1(-127.0f)), set1(127.0f)));
  }
  return scale;
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

QUIRE_INLINE void store_quantized(const CacheShape& shape, int offset, const float* k, const float* v, uint8_t* keys,
                                  uint8_t* values) {
  int8_t row[kMaxHeadDim];
  float* key_scales = reinterpret_cast<float*>(keys + int64_t{shape.head_dim} * shape.lanes());
  key_scales[offset] = quantize_row(k, shape.head_dim, row);
  scatter(row, shape.head_dim, reinterpret_cast<int8_t*>(keys) + offset, shape.lanes());
  float* value_scales = reinterpret_cast<float*>(values + int64_t{shape.value_dim} * shape.block_size);
  int8_t* codes = reinterpret_cast<int8_t*>(values) + int64_t{offset} * shape.value_dim;
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
      case CacheType::INT8: store_quantized(shape, offset, key, value, keys, values); break;
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
