// Quantizes activations to int8, in the layout of activations.h. Included before matmul.inl.
#pragma once

#include "activations.h"
#include "kernels.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

// Up to this many rows, unpacking codes again for each tile is faster than storing unpacked codes.
#if defined(__AMX_INT8__) || defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int64_t kFewRows = 12;
#else
constexpr int64_t kFewRows = 32;
#endif

constexpr float kSmallestExtreme = 1e-36f;  // 127 / kSmallestExtreme is finite; blocks with smaller values become zero

// A tile: `size` rows from row `first` on, of which the first `rows` are real.
struct Tile {
  int64_t first, size, rows;
};

// How the rows of a step are divided into tiles: `large` ones of size `largest`, then up to two smaller ones.
struct Tiling {
  int64_t rows, largest, large, tail[2];

  int64_t count() const { return large + (tail[0] > 0) + (tail[1] > 0); }
  Tile tile(int64_t index) const {
    if (index < large) return {index * largest, largest, largest};
    const int64_t first = large * largest + (index > large ? tail[0] : 0), size = tail[index - large];
    return {first, size, rows - first < size ? rows - first : size};
  }
};

// The smallest tile for up to 6 rows. There is no tile of 5.
QUIRE_INLINE int64_t fill_up(int64_t rows) { return rows == 5 ? 6 : rows; }

static Tiling cut_into_tiles(int64_t rows, int64_t largest) {
  const int64_t large = rows / largest, rest = rows % largest;
  if (largest == 6 && large > 0 && (rest == 1 || rest == 2)) return {rows, largest, large - 1, {4, rest + 2}};
  if (rest > 6) return {rows, largest, large, {6, fill_up(rest - 6)}};
  return {rows, largest, large, {fill_up(rest), 0}};
}

// Tiles of activations for quantized panels.
static Tiling cut_activations(int64_t rows) {
#ifdef __AMX_INT8__
  if (rows > kFewRows) return {rows, 16, rows / 16, {rows % 16 ? 16 : 0, 0}};
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
  if (rows > kFewRows) return {rows, 4, rows / 4, {(rows % 4 + 1) / 2 * 2, 0}};  // tiles of 4 and of 2 rows
#endif
  return cut_into_tiles(rows, kMaxTile);
}

// The record of one block of one tile.
QUIRE_INLINE uint8_t* record_of(const Activations& out, const Tile& tile, int64_t block) {
  return out.data + (tile.first * (out.cols / kBlock) + block * tile.size) * 52;
}

// The offset of a row's code k (a multiple of 4) in a record of `size` rows.
QUIRE_INLINE int64_t place_of(int64_t size, int64_t r, int64_t k) {
#ifdef __AMX_INT8__
  if (size == 16) return r * kBlock + k;
#endif
  return k * size + 4 * r;
}

// Quantizes 32 values of row r of a tile. If a value is not finite, the scale is NaN, and so is the product.
QUIRE_INLINE void quantize_block(f32 low, f32 high, uint8_t* record, int64_t size, int64_t r) {
  const f32 infinite = set1(__builtin_inff());
  const bool finite = (less(abs(low), infinite) & less(abs(high), infinite)) == 0xffff;
  const float extreme = largest(max(abs(low), abs(high)));
  const f32 inverse = set1(extreme >= kSmallestExtreme ? 127.0f / extreme : 0.0f);
  const i8x32 codes = to_codes(low * inverse, high * inverse);
  const HalfSums half = sum_codes(codes);
  alignas(32) int8_t bytes[kBlock];
  store_codes(bytes, codes);
  for (int64_t k = 0; k < kBlock; k += 4) std::memcpy(record + place_of(size, r, k), bytes + k, 4);
  const float scale = finite ? extreme * (1.0f / 127.0f) : __builtin_nanf("");
  float* scales = reinterpret_cast<float*>(record + 32 * size);
  int32_t* shifts = reinterpret_cast<int32_t*>(scales + 2 * size);
  scales[r] = scale;
  scales[size + r] = scale * static_cast<float>(half.low + half.high);
  shifts[r] = -128 * (half.low + half.high);
  shifts[size + r] = -128 * half.low;
  shifts[2 * size + r] = -128 * half.high;
}

QUIRE_INLINE void clear_row(uint8_t* record, int64_t size, int64_t r) { quantize_block(zero(), zero(), record, size, r); }

static void quantize(const float* x, int64_t x_stride, int64_t rows, const Activations& out, Worker& worker) {
  const Tiling tiling = cut_activations(rows);
  const int64_t blocks = out.cols / kBlock;
  const Span records = share(worker, tiling.count() * blocks);
  for (int64_t at = records.first; at < records.last; at++) {
    const Tile tile = tiling.tile(at / blocks);
    const int64_t block = at % blocks;
    uint8_t* record = record_of(out, tile, block);
    const float* from = x + tile.first * x_stride + block * kBlock;
    for (int64_t r = 0; r < tile.rows; r++, from += x_stride)
      quantize_block(load(from), load(from + kLanes), record, tile.size, r);
    for (int64_t r = tile.rows; r < tile.size; r++) clear_row(record, tile.size, r);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
