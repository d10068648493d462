// Quantizes activations to int8, in the layout of activations.h. Included before matmul.inl.
#pragma once

#include "activations.h"
#include "kernels.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

// Instructions for whole tiles read codes that have been unpacked. They are used from this many rows on, whatever
// `few_rows` is: the layout of activations depends on it.
#if defined(__AMX_INT8__) || defined(__ARM_FEATURE_MATMUL_INT8)
#define QUIRE_TILES
constexpr int64_t kTileRows = 13;
#endif

constexpr float kSmallestExtreme = 1e-36f;  // 127 / kSmallestExtreme is finite; blocks with smaller values become zero

// A tile: `size` rows from row `first` on, of which the first `rows` are real.
struct Tile {
  int64_t first, size, rows;
};

// How rows [first, last) are divided into tiles: `large` ones of size `largest`, then up to two smaller ones.
struct Tiling {
  Span rows;
  int64_t largest, large, tail[2];

  int64_t count() const { return large + (tail[0] > 0) + (tail[1] > 0); }
  Tile tile(int64_t index) const {
    if (index < large) return {rows.first + index * largest, largest, largest};
    const int64_t first = rows.first + large * largest + (index > large ? tail[0] : 0), size = tail[index - large];
    return {first, size, rows.last - first < size ? rows.last - first : size};
  }
};

// Parts of own rows begin at multiples of this.
#ifdef __AMX_INT8__
constexpr int64_t kRowGrain = 16;
#else
constexpr int64_t kRowGrain = 2;  // a multiple of it is divided into tiles without padding
#endif
// A part that has its own rows reads all weights. Otherwise parts divide the outputs of a product, and one of them reads
// each weight.
QUIRE_INLINE bool has_own_rows(const Activations& x, int64_t rows, const Worker& worker) {
  return x.by_rows && has_own_rows(worker, rows);
}

// The smallest tile for up to 6 rows. There is no tile of 5.
QUIRE_INLINE int64_t fill_up(int64_t rows) { return rows == 5 ? 6 : rows; }

static Tiling cut_into_tiles(Span rows, int64_t largest) {
  const int64_t large = (rows.last - rows.first) / largest, rest = (rows.last - rows.first) % largest;
  if (largest == 6 && large > 0 && (rest == 1 || rest == 2)) return {rows, largest, large - 1, {4, rest + 2}};
  if (rest > 6) return {rows, largest, large, {6, fill_up(rest - 6)}};
  return {rows, largest, large, {fill_up(rest), 0}};
}

// The rows that a worker computes: its own, or all of them.
QUIRE_INLINE Span worker_rows(const Activations& x, int64_t rows, const Worker& worker) {
  return has_own_rows(x, rows, worker) ? share(worker, rows, kRowGrain) : Span{0, rows};
}

// Tiles of activations for quantized panels, for the rows that a worker computes. All workers together have the same
// tiles in every op of a step.
static Tiling cut_activations(const Activations& x, int64_t rows, const Worker& worker) {
  const Span own = worker_rows(x, rows, worker);
#ifdef QUIRE_TILES
  const int64_t size = own.last - own.first;
#endif
#ifdef __AMX_INT8__
  if (rows >= kTileRows) return {own, 16, size / 16, {size % 16 ? 16 : 0, 0}};
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
  if (rows >= kTileRows) return {own, 4, size / 4, {(size % 4 + 1) / 2 * 2, 0}};  // tiles of 4 and of 2 rows
#endif
  return cut_into_tiles(own, kMaxTile);
}

// The record of one block of one tile, from the first one that the op writes.
QUIRE_INLINE uint8_t* record_of(const Activations& out, const Tile& tile, int64_t block) {
  return out.data + (tile.first * (out.cols / kBlock) + (out.first / kBlock + block) * tile.size) * 52;
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

// A worker's part of the records of a step, in the order of tiles: all records of its own rows, or a part of all.
// Records interleave the rows of a tile, so workers do not divide a tile by rows. Of several ranks each takes some of
// the worker's records.
template <class F>
QUIRE_INLINE void over_records(const Activations& x, int64_t rows, const Worker& worker, F f, int64_t rank = 0,
                               int64_t ranks = 1) {
  const Tiling tiling = cut_activations(x, rows, worker);
  const int64_t blocks = x.blocks_written(), count = tiling.count() * blocks;
  const Span own = part_of(has_own_rows(x, rows, worker) ? Span{0, count} : share(worker, count), rank, ranks);
  for (int64_t at = own.first, last; at < own.last; at = last) {
    const int64_t tile = at / blocks, end = (tile + 1) * blocks;
    last = end < own.last ? end : own.last;
    f(tiling.tile(tile), Span{at - tile * blocks, last - tile * blocks});
  }
}

static void quantize(const float* x, int64_t x_stride, int64_t rows, const Activations& out, Worker& worker) {
  over_records(out, rows, worker, [&](const Tile& tile, Span blocks) {
    for (int64_t block = blocks.first; block < blocks.last; block++) {
      uint8_t* record = record_of(out, tile, block);
      const float* from = x + tile.first * x_stride + block * kBlock;
      for (int64_t r = 0; r < tile.rows; r++, from += x_stride)
        quantize_block(load(from), load(from + kLanes), record, tile.size, r);
      for (int64_t r = tile.rows; r < tile.size; r++) clear_row(record, tile.size, r);
    }
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire
