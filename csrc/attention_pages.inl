// Finds the keys and values of a chunk through the block table, in place or copied to float32, in the layout of
// attention.h. attention.inl calls it.
#pragma once

#include "attention.h"
#include "attention_products.inl"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

struct Place {
  int64_t block;
  int offset;
};

// One row's pages of one key head.
struct Pages {
  const int32_t* table;
  const uint8_t *keys, *values;    // of block 0
  int64_t key_block, value_block;  // bytes from one block to the next
  int64_t key_codes, value_codes;  // bytes before the scales of a head
  int block_size, lanes, head_dim, value_dim, item;
  bool scaled;

  Place find(int position) const { return {table[position / block_size], position % block_size}; }
  const uint8_t* keys_of(int64_t block) const { return keys + block * key_block; }
  const uint8_t* values_of(int64_t block) const { return values + block * value_block; }
  const float* key_scales_of(int64_t block) const {
    return reinterpret_cast<const float*>(keys_of(block) + key_codes);
  }
  const float* value_scales_of(int64_t block) const {
    return reinterpret_cast<const float*>(values_of(block) + value_codes);
  }
};

static Pages open_pages(const Cache& cache, const Rows& rows, int row, int head) {
  const CacheShape& shape = cache.shape;
  Pages pages;
  pages.table = rows.tables + row * rows.table_stride;
  pages.keys = cache.keys + head * shape.key_head_bytes();
  pages.values = cache.values + head * shape.value_head_bytes();
  pages.key_block = cache.key_stride;
  pages.value_block = cache.value_stride;
  pages.key_codes = shape.key_head_bytes() - shape.scale_bytes();
  pages.value_codes = shape.value_head_bytes() - shape.scale_bytes();
  pages.block_size = shape.block_size;
  pages.lanes = shape.lanes();
  pages.head_dim = shape.head_dim;
  pages.value_dim = shape.value_dim;
  pages.item = shape.item();
  pages.scaled = shape.has_scales();
  return pages;
}

// Whether any 16 keys from a multiple of 16 on are contiguous in one block.
QUIRE_INLINE bool side_by_side(int block_size) { return block_size % kLanes == 0; }

// Sets the chunk at `position`, limited to keys [first, last).
QUIRE_INLINE void set_wanted(Chunk& chunk, int position, int first, int last) {
  chunk.position = position;
  chunk.begin = first > position ? first - position : 0;
  chunk.end = last < position + kChunkKeys ? last - position : kChunkKeys;
}

// Sets the pointers to the wanted keys in their pages, which must be contiguous (side_by_side).
static void locate(const Pages& pages, Chunk& chunk) {
  const int first = chunk.first_vector(), count = chunk.last_vector() - first;
  const int64_t slice = int64_t{kLanes} * pages.head_dim * pages.item;
  const int64_t value_slice = int64_t{kLanes} * pages.value_dim * pages.item;
  int index = (chunk.position + first * kLanes) / pages.block_size;
  int offset = (chunk.position + first * kLanes) % pages.block_size;
  chunk.key_stride = pages.lanes;
  for (int i = 0; i < count; ++i, offset += kLanes) {
    if (offset == pages.block_size) {
      offset = 0;
      ++index;
    }
    int64_t block = pages.table[index];
    const uint8_t *keys = pages.keys_of(block), *values = pages.values_of(block);
    chunk.keys[first + i] = keys + offset * pages.item;
    chunk.values[first + i] = values + offset / kLanes * value_slice;
    // The keys of 16 tokens are spread over their block. Its slices together are the whole block.
    chunk.stream[i] = keys + offset / kLanes * slice;
    chunk.stream[count + i] = chunk.values[first + i];
    if (pages.scaled) {
      chunk.key_scales[first + i] = pages.key_scales_of(block) + offset;
      chunk.value_scales[first + i] = pages.value_scales_of(block) + offset;
    }
  }
  for (int i = 0; i < kAhead; ++i) chunk.stream[2 * count + i] = chunk.stream[2 * count - 1];
}

// Extends the prefetch stream of a chunk by keys of the next chunk, which begins at `position`.
static void extend_stream(const Pages& pages, int position, int last, Chunk& chunk) {
  const int64_t slice = int64_t{kLanes} * pages.head_dim * pages.item;
  const int end = 2 * (chunk.last_vector() - chunk.first_vector());
  int key = position / kLanes * kLanes;
  for (int i = 0; i < kAhead && key < last; ++i, key += kLanes) {
    Place place = pages.find(key);
    chunk.stream[end + i] = pages.keys_of(place.block) + place.offset / kLanes * slice;
  }
}

constexpr int kCopyVectors = 4;  // copied at a time, before all rows of a task use them: they fit into L1
constexpr int kCopyKeys = kCopyVectors * kLanes;

// A chunk's keys and values in float32, copied when they are first used.
struct Copy {
  float* keys;          // [kChunkVectors / kCopyVectors][head_dim][kCopyKeys]
  float* values;        // [kChunkKeys][value_dim]
  float* key_scales;    // [kChunkKeys]
  float* value_scales;  // [kChunkKeys]
  int keys_until, values_until;  // the first vector of the chunk that is not copied yet

  void restart(const Chunk& chunk) { keys_until = values_until = chunk.first_vector(); }
  float* key_vector(int vector, int head_dim) const {
    return keys + (vector / kCopyVectors * head_dim * kCopyVectors + vector % kCopyVectors) * kLanes;
  }
};

// Prefetches a cache line of the vector that is kAhead later in the stream, if `item` is the first of a line.
template <class Item>
QUIRE_INLINE void fetch_beside(const void* ahead, int item) {
  using Type = typename Item::Type;
  if (item * sizeof(Type) % 64 == 0) prefetch_line(static_cast<const Type*>(ahead) + item);
}

template <class Item>
static void copy_key_vectors(const Pages& pages, const Copy& copy, int first, int last, const Chunk& chunk) {
  const int head_dim = pages.head_dim, lanes = pages.lanes;
  for (int vector = first; vector < last; ++vector) {
    const typename Item::Type* keys = static_cast<const typename Item::Type*>(chunk.keys[vector]);
    const void* ahead = chunk.stream[vector - chunk.first_vector() + kAhead];
    float* to = copy.key_vector(vector, head_dim);
    for (int d = 0; d < head_dim; ++d, keys += lanes, to += kCopyKeys) {
      fetch_beside<Item>(ahead, d * kLanes);
      store(to, Item::widen(keys));
    }
  }
}

// The same for keys [begin, end) of the chunk, which need not be contiguous.
template <class Item>
static void copy_key_columns(const Pages& pages, const Copy& copy, int begin, int end, const Chunk& chunk) {
  using Type = typename Item::Type;
  for (int key = begin; key < end; ++key) {
    Place place = pages.find(chunk.position + key);
    const Type* column = reinterpret_cast<const Type*>(pages.keys_of(place.block)) + place.offset;
    float* to = copy.key_vector(key / kLanes, pages.head_dim) + key % kLanes;
    for (int d = 0; d < pages.head_dim; ++d) to[d * kCopyKeys] = Item::widen_one(column[d * pages.lanes]);
  }
}

// Copies the keys of the vectors before `last` that are not copied yet, and sets the pointers to the copy.
template <class Item>
static void copy_keys(const Pages& pages, Copy& copy, int last, Chunk& chunk) {
  const int first = copy.keys_until;
  if (last <= first) return;
  if (side_by_side(pages.block_size)) {
    copy_key_vectors<Item>(pages, copy, first, last, chunk);
  } else {
    int begin = chunk.begin > first * kLanes ? chunk.begin : first * kLanes;
    int end = chunk.end < last * kLanes ? chunk.end : last * kLanes;
    copy_key_columns<Item>(pages, copy, begin, end, chunk);
  }
  for (int vector = first; vector < last; ++vector) chunk.keys[vector] = copy.key_vector(vector, pages.head_dim);
  chunk.key_stride = kCopyKeys;
  copy.keys_until = last;
}

template <class Item>
static void copy_value_vectors(const Pages& pages, const Copy& copy, int first, int last, const Chunk& chunk) {
  const int size = kLanes * pages.value_dim;
  for (int vector = first; vector < last; ++vector) {
    const typename Item::Type* values = static_cast<const typename Item::Type*>(chunk.values[vector]);
    const void* ahead = chunk.stream[vector + chunk.last_vector() - 2 * chunk.first_vector() + kAhead];
    float* to = copy.values + vector * size;
    for (int i = 0; i < size; i += kLanes) {
      fetch_beside<Item>(ahead, i);
      store(to + i, Item::widen(values + i));
    }
  }
}

template <class Item>
static void copy_value_rows(const Pages& pages, const Copy& copy, int begin, int end, const Chunk& chunk) {
  for (int key = begin; key < end; ++key) {
    Place place = pages.find(chunk.position + key);
    const uint8_t* values = pages.values_of(place.block);
    const auto* row = reinterpret_cast<const typename Item::Type*>(values) + int64_t{place.offset} * pages.value_dim;
    float* to = copy.values + key * pages.value_dim;
    for (int d = 0; d < pages.value_dim; d += kLanes) store(to + d, Item::widen(row + d));
  }
}

// Copies the values of the vectors before `last`, as copy_keys does.
template <class Item>
static void copy_values(const Pages& pages, Copy& copy, int last, Chunk& chunk) {
  const int first = copy.values_until;
  if (last <= first) return;
  if (side_by_side(pages.block_size)) {
    copy_value_vectors<Item>(pages, copy, first, last, chunk);
  } else {
    int begin = chunk.begin > first * kLanes ? chunk.begin : first * kLanes;
    int end = chunk.end < last * kLanes ? chunk.end : last * kLanes;
    copy_value_rows<Item>(pages, copy, begin, end, chunk);
  }
  for (int vector = first; vector < last; ++vector) {
    chunk.values[vector] = copy.values + vector * kLanes * pages.value_dim;
  }
  copy.values_until = last;
}

// Copies the scales of all wanted keys, for pages that are not contiguous.
static void copy_scales(const Pages& pages, const Copy& copy, Chunk& chunk) {
  for (int key = chunk.begin; key < chunk.end; ++key) {
    Place place = pages.find(chunk.position + key);
    copy.key_scales[key] = pages.key_scales_of(place.block)[place.offset];
    copy.value_scales[key] = pages.value_scales_of(place.block)[place.offset];
  }
  for (int vector = 0; vector < kChunkVectors; ++vector) {
    chunk.key_scales[vector] = copy.key_scales + vector * kLanes;
    chunk.value_scales[vector] = copy.value_scales + vector * kLanes;
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
