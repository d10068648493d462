// The two products of attention on one chunk of keys: scores, and the weighted sum of values. They take up to six rows;
// a row is one query of one head. Rows and vectors stay in registers. attention.inl calls it. Each score is one chain
// of fma over the dimensions, and each output one over the keys. So the bits do not depend on how rows and vectors are
// grouped, nor on whether items are read from pages or from a float32 copy.
#pragma once

#include "attention.h"
#include "half.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int kChunkVectors = 16;
constexpr int kChunkKeys = kChunkVectors * kLanes;
constexpr int kMaxRows = 6;
constexpr int kAhead = 8;  // prefetch distance in vectors

// The number of vectors that are multiplied with `rows` rows at once. The number of registers limits it.
constexpr int vectors_at_once(int rows) {
#ifdef __AVX512F__
  return rows > 0 ? 4 : 0;
#else
  return rows > 3 ? 1 : 2;
#endif
}

// Pointers to a chunk's keys, values and scales, one for each 16 keys. Only vectors with wanted keys have pointers.
struct Chunk {
  const void* keys[kChunkVectors];    // [head_dim][16], dimensions key_stride items apart
  const void* values[kChunkVectors];  // [16][value_dim]
  const float* key_scales[kChunkVectors];
  const float* value_scales[kChunkVectors];
  int64_t key_stride;
  int position;    // of the first key, a multiple of kChunkKeys
  int begin, end;  // the wanted keys, counted from `position`; empty if end <= begin
  bool located;    // the pointers were set to pages

  // The prefetch stream, 16 * head_dim items each, in the order of use: all wanted keys, all wanted values, what
  // follows.
  const void* stream[2 * kChunkVectors + kAhead];

  int first_vector() const { return begin / kLanes; }
  int last_vector() const { return (end + kLanes - 1) / kLanes; }
};

struct F32Item {
  using Type = float;
  static constexpr bool paged = true, scaled = false;
  QUIRE_INLINE f32 widen(const Type* p) { return load(p); }
  QUIRE_INLINE float widen_one(Type x) { return x; }
};

struct BF16Item {
  using Type = uint16_t;
  static constexpr bool paged = true, scaled = false;
  QUIRE_INLINE f32 widen(const Type* p) { return load_bf16(p); }
  QUIRE_INLINE float widen_one(Type x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
  }
};

struct INT8Item {
  using Type = int8_t;
  static constexpr bool paged = true, scaled = true;
  QUIRE_INLINE f32 widen(const Type* p) { return load_i8(p); }
  QUIRE_INLINE float widen_one(Type x) { return static_cast<float>(x); }
};

// The values are 2^-8 of those that the codes stand for. The scales have the factor.
struct FP8Item {
  using Type = uint8_t;
  static constexpr bool paged = true, scaled = true;
  QUIRE_INLINE f32 widen(const Type* p) { return load_f8(p); }
  QUIRE_INLINE float widen_one(Type x) { return float8_to_float(x) * 0x1p-8f; }
};

// An item of a copy. Copies are in the cache, so they are not prefetched.
struct CopiedItem : F32Item {
  static constexpr bool paged = false;
};

// scores[r] = q[r] . keys, for V vectors from `vector` on. Rows of scores are kChunkKeys apart.
template <class Item, int R, int V>
static void score_vectors(const float* q, int head_dim, const Chunk& chunk, int vector, float* scores) {
  using Type = typename Item::Type;
  const Type* keys[V];
  const Type* ahead[V];
  f32 sums[R][V];
  const int64_t stride = chunk.key_stride;
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    keys[v] = static_cast<const Type*>(chunk.keys[vector + v]);
    if (Item::paged) ahead[v] = static_cast<const Type*>(chunk.stream[vector - chunk.first_vector() + kAhead + v]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][v] = zero();
  }
  constexpr int step = Item::paged ? 64 / (kLanes * sizeof(Type)) : 1;  // dimensions in one cache line
  for (int first = 0; first < head_dim; first += step) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      if (Item::paged) prefetch_into_second(ahead[v] + first * kLanes);
    }
#pragma GCC unroll 8
    for (int d = first; d < first + step; ++d) {
      f32 k[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) k[v] = Item::widen(keys[v] + d * stride);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        f32 x = set1(q[r * head_dim + d]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[r][v] = fma(x, k[v], sums[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(scores + r * kChunkKeys + (vector + v) * kLanes, sums[r][v]);
  }
}

// sums[r] += weights[r] . values of the keys [begin, end), for D vectors of dimensions from `dim` on.
template <class Item, int R, int D>
static void weigh_vectors(const float* weights, int value_dim, const Chunk& chunk, int begin, int end, int dim,
                          float* sums, int64_t sums_stride) {
  using Type = typename Item::Type;
  f32 total[R][D];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < D; ++v) total[r][v] = load(sums + r * sums_stride + dim + v * kLanes);
  }
  const int offset = chunk.last_vector() - 2 * chunk.first_vector() + kAhead;
  for (int key = begin; key < end;) {
    int vector = key / kLanes;
    int64_t place = int64_t{key % kLanes} * value_dim + dim;
    int last = (vector + 1) * kLanes < end ? (vector + 1) * kLanes : end;
    const Type* values = static_cast<const Type*>(chunk.values[vector]) + place;
    const Type* ahead = Item::paged ? static_cast<const Type*>(chunk.stream[vector + offset]) + place : values;
    for (; key < last; ++key, values += value_dim, ahead += value_dim) {
      f32 x[D];
#pragma GCC unroll 8
      for (int v = 0; v < D; ++v) {
        x[v] = Item::widen(values + v * kLanes);
        if (Item::paged && v * kLanes * sizeof(Type) % 64 == 0) prefetch_into_second(ahead + v * kLanes);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        f32 weight = set1(weights[r * kChunkKeys + key]);
#pragma GCC unroll 8
        for (int v = 0; v < D; ++v) total[r][v] = fma(weight, x[v], total[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < D; ++v) store(sums + r * sums_stride + dim + v * kLanes, total[r][v]);
  }
}

template <class Item, int R, int V = vectors_at_once(R)>
static void score_some(int count, const float* q, int head_dim, const Chunk& chunk, int vector, float* scores) {
  if (count == V) return score_vectors<Item, R, V>(q, head_dim, chunk, vector, scores);
  if constexpr (V > 1) score_some<Item, R, V - 1>(count, q, head_dim, chunk, vector, scores);
}

template <class Item, int R, int D = vectors_at_once(R)>
static void weigh_some(int count, const float* weights, int value_dim, const Chunk& chunk, int begin, int end, int dim,
                       float* sums, int64_t stride) {
  if (count == D) return weigh_vectors<Item, R, D>(weights, value_dim, chunk, begin, end, dim, sums, stride);
  if constexpr (D > 1) weigh_some<Item, R, D - 1>(count, weights, value_dim, chunk, begin, end, dim, sums, stride);
}

// The size of the first part if `count` is divided as evenly as possible into the fewest parts of at most `limit`.
constexpr int even_part(int count, int limit) {
  int parts = (count + limit - 1) / limit;
  return (count + parts - 1) / parts;
}

// The scores of the chunk's vectors [first, last).
template <class Item, int R = kMaxRows>
static void score(int rows, const float* q, int head_dim, const Chunk& chunk, int first, int last, float* scores) {
  if (rows == R) {
    for (int vector = first, count; vector < last; vector += count) {
      count = last - vector < vectors_at_once(R) ? last - vector : vectors_at_once(R);
      score_some<Item, R>(count, q, head_dim, chunk, vector, scores);
    }
  } else if constexpr (R > 1) {
    score<Item, R - 1>(rows, q, head_dim, chunk, first, last, scores);
  }
}

// Adds the weighted values of the chunk's keys [begin, end).
template <class Item, int R = kMaxRows>
static void weigh(int rows, const float* weights, int value_dim, const Chunk& chunk, int begin, int end, float* sums,
                  int64_t stride) {
  if (rows == R) {
    int last = value_dim / kLanes;
    for (int vector = 0, count; vector < last; vector += count) {
      count = even_part(last - vector, vectors_at_once(R));
      weigh_some<Item, R>(count, weights, value_dim, chunk, begin, end, vector * kLanes, sums, stride);
    }
  } else if constexpr (R > 1) {
    weigh<Item, R - 1>(rows, weights, value_dim, chunk, begin, end, sums, stride);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
