// Matrix products with panels: how a matrix is divided among threads, what happens to a tile's products, and products
// with dense panels, which multiply floats. panel_products.inl has those with quantized panels. Each instruction set
// compiles this file in its own translation unit.
#pragma once

#include "kernels.h"
#include "panel_products.inl"
#include "scratch.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kUnit = 2 * kLanes;        // outputs that form one block of the next product
constexpr int64_t kPassBytes = 640 * 1024;   // of activations in one pass over a group of panels: they stay in L2

// R rows at equal distances. Only every third row has a pointer, so that all pointers stay in registers.
template <class T, int R>
struct RowPointers {
  const T* base[(R + 2) / 3];
  int64_t stride;

  static RowPointers at(const T* first, int64_t stride) {
    RowPointers rows;
    rows.stride = stride;
    for (int i = 0; i < (R + 2) / 3; i++) rows.base[i] = first + 3 * i * stride;
    return rows;
  }
  const T* row(int r) const { return base[r / 3] + (r % 3) * stride; }
};

template <Codes codes>
QUIRE_INLINE f32 load_values(const uint8_t* p) {
  if constexpr (codes == Codes::F32) return load(reinterpret_cast<const float*>(p));
  if constexpr (codes == Codes::BF16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
  return load_f16(reinterpret_cast<const uint16_t*>(p));
}

// R rows of float32 x times two dense panels -> out [R][32].
template <Codes codes, int R>
static void multiply_dense(const Panels& weight, const int64_t* panels, const float* x, int64_t x_stride, float* out,
                           int64_t out_stride) {
  const uint8_t* left = weight.codes(panels[0]);
  const uint8_t* right = weight.codes(panels[1]);
  auto rows = RowPointers<float, R>::at(x, x_stride);
  f32 total[R][2];
  unroll<R>([&](auto r) { total[r.v][0] = total[r.v][1] = zero(); });
  for (int64_t k = 0; k < weight.cols; k++) {
    f32 w0 = load_values<codes>(left + k * kLanes * value_bytes(codes));
    f32 w1 = load_values<codes>(right + k * kLanes * value_bytes(codes));
    unroll<R>([&](auto r) {
      f32 a = set1(rows.row(r.v)[k]);
      total[r.v][0] = fma(a, w0, total[r.v][0]);
      total[r.v][1] = fma(a, w1, total[r.v][1]);
    });
  }
  unroll<R>([&](auto r) {
    store(out + r.v * out_stride, total[r.v][0]);
    store(out + r.v * out_stride + 16, total[r.v][1]);
  });
}

template <Codes codes>
struct DenseMultiplier {
  static void packed(const MatmulCall& call, const Group& group, const void* x, int64_t size, float* out,
                     int64_t out_stride) {
    for (int p = 0; p < group.count; p += 2) {
      with_tile<kMaxDenseTile>(size, [&](auto rows) {
        multiply_dense<codes, rows.v>(call.weight, group.panels + p, static_cast<const float*>(x), call.x.stride,
                                      out + p * kLanes, out_stride);
      });
    }
  }
  static Multiplier make() { return {packed, nullptr, nullptr}; }
};

}  // namespace QUIRE_ISA
}  // namespace quire

#include "matmul_float8.inl"

namespace quire {
namespace QUIRE_ISA {

static Multiplier find_multiplier(const Format& format) {
  if (format.codes == Codes::F8) return Float8Multiplier::make();
  if (format.grouped()) return find_grouped(format);
  if (format.scales != Scales::NONE) return find_gguf(format);
  if (format.codes == Codes::F32) return DenseMultiplier<Codes::F32>::make();
  if (format.codes == Codes::BF16) return DenseMultiplier<Codes::BF16>::make();
  return DenseMultiplier<Codes::F16>::make();
}

// Writes a tile's products, outputs [output, output + width).
static void finish_plain(const MatmulCall& call, const Tile& tile, const float* products, int64_t stride,
                         int64_t output, int64_t width) {
  for (int64_t part = 0; part < width; part += kLanes) {
    const int64_t at = output + part;
    const int lanes = width - part < kLanes ? static_cast<int>(width - part) : kLanes;
    f32 bias = call.bias ? load_part(call.bias + at, lanes) : zero();
    for (int64_t r = 0; r < tile.rows; r++) {
      f32 value = load(products + r * stride + part);
      if (call.bias) value = value + bias;
      float* to = call.y + (tile.first + r) * call.y_stride + at;
      if (lanes == kLanes) {
        store(to, value);
      } else {
        store_part(to, value, lanes);
      }
    }
  }
}

// Updates the largest product of each row and its index. Of equals the first is kept. NaN is larger than any number.
static void finish_best(const MatmulCall& call, const Tile& tile, const float* products, int64_t stride,
                        int64_t output, int64_t width, int thread) {
  for (int64_t r = 0; r < tile.rows; r++) {
    Best& best = call.best[thread * call.rows + tile.first + r];
    const float* row = products + r * stride;
    f32 most = set1(-__builtin_inff());
    uint32_t numbers = 0xffff;
    for (int64_t part = 0; part < width; part += kLanes) {
      const int lanes = width - part < kLanes ? static_cast<int>(width - part) : kLanes;
      f32 value = select((1u << lanes) - 1, load(row + part), set1(-__builtin_inff()));
      numbers &= same(value, value);
      most = max(most, value);
    }
    if (best.value != best.value || (numbers == 0xffff && less(set1(best.value), most) == 0)) continue;
    for (int64_t i = 0; i < width; i++) {
      if (best.value != best.value || row[i] <= best.value) continue;
      best = {row[i], output + i};
    }
  }
}

// x * Phi(x), with Phi the normal distribution function, to within 2e-7 * |x| (Abramowitz and Stegun 7.1.26).
QUIRE_INLINE f32 gelu(f32 x) {
  f32 size = max(x, zero() - x);
  f32 t = set1(1.0f) / fma(set1(0.3275911f * 0.7071067812f), size, set1(1.0f));
  f32 p = fma(set1(1.061405429f), t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  f32 beyond = set1(0.5f) * p * t * exp(set1(-0.5f) * x * x);
  return x * select(less(x, zero()), beyond, set1(1.0f) - beyond);
}

QUIRE_INLINE f32 activate(f32 x, Activation activation) {
  if (activation == Activation::SILU) return x * sigmoid(x);
  if (activation == Activation::GELU) return gelu(x);
  if (activation == Activation::RELU) return select(less(x, zero()), zero(), x);
  f32 inner = set1(0.7978845608f) * fma(set1(0.044715f) * x * x, x, x);
  return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}

QUIRE_INLINE f32 gate_with(f32 gate, f32 up, const MatmulCall& call) {
  if (call.activation != Activation::CLAMPED_SILU) return activate(gate, call.activation) * up;
  const f32 limit = set1(call.limit);
  gate = min(gate, limit);
  up = min(max(up, zero() - limit), limit);
  return gate * sigmoid(set1(1.702f) * gate) * (up + set1(1.0f));
}

// Columns 0 to 31 of the tile are the gate, columns 32 to 63 are what it multiplies. All rows are gated before any is
// quantized: both have a long latency, which the other rows hide.
static void finish_gated(const MatmulCall& call, const Tile& tile, float* products, int64_t stride, int64_t output) {
  const int64_t half = call.weight.rows / 2;
  for (int64_t r = 0; r < tile.rows; r++) {
    float* row = products + r * stride;
    for (int64_t part = 0; part < 2; part++) {
      const int64_t at = output + part * kLanes;
      f32 gate = load(row + part * kLanes), up = load(row + kUnit + part * kLanes);
      if (call.bias) {
        gate = gate + load(call.bias + at);
        up = up + load(call.bias + half + at);
      }
      const f32 value = gate_with(gate, up, call);
      if (call.y) store(call.y + (tile.first + r) * call.y_stride + at, value);
      store(row + part * kLanes, value);
    }
  }
  if (!call.gated.data) return;
  uint8_t* record = record_of(call.gated, tile, output / kBlock);
  for (int64_t r = 0; r < tile.rows; r++)
    quantize_block(load(products + r * stride), load(products + r * stride + kLanes), record, tile.size, r);
  for (int64_t r = tile.rows; r < tile.size; r++) clear_row(record, tile.size, r);
}

// Prefetches the cache lines that a tile's products will be written to.
QUIRE_INLINE void expect_writes(const MatmulCall& call, const Tile& tile, int64_t output, int64_t width) {
  for (int64_t r = 0; r < tile.rows; r++) {
    const float* to = call.y + (tile.first + r) * call.y_stride + output;
    for (int64_t part = 0; part < width; part += kLanes) __builtin_prefetch(to + part, 1);
  }
}

// Outputs are computed in units of 32, which is a block of the next product. A worker computes all units of its own
// rows, or a part of the units of all rows. It computes two units at once if it has two left, and in gated products one
// unit of each half.
struct Units {
  const MatmulCall& call;
  bool gated;
  Span own;

  static Units of(const MatmulCall& call, const Activations& x, int64_t rows, const Worker& worker) {
    const bool gated = call.activation != Activation::NONE;
    const int64_t outputs = gated ? call.weight.rows / 2 : call.weight.rows;
    const int64_t count = (outputs + kUnit - 1) / kUnit;
    return {call, gated, has_own_rows(x, rows, worker) ? Span{0, count} : share(worker, count)};
  }
  int64_t outputs() const { return gated ? call.weight.rows / 2 : call.weight.rows; }
  int64_t taken_at(int64_t unit) const { return gated || own.last - unit < 2 ? 1 : 2; }
  int panels_at(int64_t unit) const { return gated ? 4 : 2 * static_cast<int>(taken_at(unit)); }

  int64_t panel(int64_t unit, int p) const {
    const int64_t half = call.weight.rows / 2 / kLanes, last = call.weight.count() - 1;
    const int64_t panel = gated && p >= 2 ? half + 2 * unit + p - 2 : 2 * unit + p;
    return panel < last ? panel : last;
  }
};

// A worker's share of one product.
struct Product {
  const MatmulCall& call;
  Units units, following;  // of this product, and of the next one (if there is none, of this one again)
  Multiplier multiplier;
  Tiling tiling;
  bool unpack;
  int thread;
  float* products;    // of a tile: [rows][64]
  uint8_t* unpacked;  // a group of panels

  static constexpr int64_t stride = 2 * kUnit;

  Group group_at(int64_t unit) const {
    const int64_t next = unit + units.taken_at(unit);
    const Units& then = next < units.own.last ? units : following;
    const int64_t then_unit = next < units.own.last ? next : following.own.first;
    Group group{units.panels_at(unit), {}, {}};
    for (int p = 0; p < group.count; p++) {
      group.panels[p] = units.panel(unit, p);
      group.ahead[p] = Ahead::at(then.call.weight, then.panel(then_unit, p));
    }
    return group;
  }

  const void* rows_of(const Tile& tile) const {
    if (call.weight.format.quantized()) return record_of(call.x.quantized, tile, 0);
    return call.x.values + tile.first * call.x.stride;
  }

  void run(const Group& group, int64_t output, int64_t width, const Tile& tile) const {
    if (call.y) expect_writes(call, tile, output, width);
    if (unpack) {
      multiplier.unpacked(call, group, unpacked, rows_of(tile), tile.size, products, stride);
    } else {
      multiplier.packed(call, group, rows_of(tile), tile.size, products, stride);
    }
    if (units.gated) return finish_gated(call, tile, products, stride, output);
    if (call.y) finish_plain(call, tile, products, stride, output, width);
    if (call.best) finish_best(call, tile, products, stride, output, width, thread);
  }

  // Multiplies tiles [begin, end) with the one or two units at `unit`.
  void pass(int64_t unit, int64_t begin, int64_t end) const {
    const Group group = group_at(unit);
    const int64_t output = unit * kUnit, left = units.outputs() - output, most = units.taken_at(unit) * kUnit;
    const int64_t width = most < left ? most : left;
    if (unpack) multiplier.unpack(call, group, unpacked);
    for (int64_t tile = begin; tile < end; tile++) run(group, output, width, tiling.tile(tile));
  }
};

// How many tiles are multiplied with a group of panels before the next group: as many as stay in L2.
QUIRE_INLINE int64_t tiles_in_pass(const MatmulCall& call, const Tile& tile) {
  const int64_t row_bytes =
      call.weight.format.quantized() ? Activations::row_bytes(call.weight.cols) : call.x.stride * 4;
  return kPassBytes / (row_bytes * tile.size) + 1;
}

// Merges the results of all workers. Workers have ascending outputs, so of equals the first worker's is kept.
static void merge_best(const MatmulCall& call, int workers) {
  for (int64_t row = 0; row < call.rows; row++) {
    for (int worker = 1; worker < workers; worker++) {
      const Best& other = call.best[worker * call.rows + row];
      if (call.best[row].value == call.best[row].value && !(other.value <= call.best[row].value)) call.best[row] = other;
    }
  }
}

// `rows` share what a worker unpacks.
QUIRE_INLINE bool stores_unpacked(const MatmulCall& call, [[maybe_unused]] Span rows) {
  if (!call.weight.format.quantized()) return false;
#ifdef QUIRE_TILES
  return call.rows >= kTileRows;
#else
  return rows.last - rows.first > call.few_rows;
#endif
}

// The tiles of a product's rows, as the op that made its activations cut them.
QUIRE_INLINE Tiling tiles_of(const MatmulCall& call, const Worker& worker) {
  const Activations& x = call.x.quantized;
  if (call.weight.format.quantized()) return cut_activations(x, call.rows, worker);
  return cut_into_tiles(worker_rows(x, call.rows, worker), kMaxDenseTile);
}

static void multiply_units(const MatmulCall& call, const Units& units, const Units& following, const Worker& worker) {
  const Tiling tiling = tiles_of(call, worker);
  Product product{call, units, following, find_multiplier(call.weight.format), tiling,
                  stores_unpacked(call, tiling.rows), worker.index, nullptr, nullptr};
  const int64_t product_bytes = 16 * Product::stride * 4;
  uint8_t* memory = scratch(product_bytes + (product.unpack ? 4 * unpacked_bytes(call.weight.blocks()) : 0));
  product.products = reinterpret_cast<float*>(memory);
  product.unpacked = memory + product_bytes;
  const int64_t tiles = tiles_in_pass(call, tiling.tile(0));
#ifdef __AMX_INT8__
  if (product.unpack) begin_tiles();
#endif
  for (int64_t begin = 0; begin < tiling.count(); begin += tiles) {
    const int64_t end = begin + tiles < tiling.count() ? begin + tiles : tiling.count();
    for (int64_t unit = units.own.first; unit < units.own.last; unit += units.taken_at(unit))
      product.pass(unit, begin, end);
  }
#ifdef __AMX_INT8__
  if (product.unpack) end_tiles();
#endif
}

static void matmul(const MatmulCall& call, Worker& worker) {
  const Activations& x = call.x.quantized;
  for (int64_t row = 0; row < call.rows && call.best; row++)
    call.best[worker.index * call.rows + row] = {-__builtin_inff(), 0};
  const Units following = Units::of(call.following ? *call.following : call, x, call.rows, worker);
  multiply_units(call, Units::of(call, x, call.rows, worker), following, worker);
  if (!call.best) return;
  worker.barrier();
  if (worker.index == 0) merge_best(call, worker.count());
}

static void matmul_part(const MatmulPart& part, const MatmulPart* next, Worker& worker) {
  const Units units{part.call, part.call.activation != Activation::NONE, part.units};
  if (!next) return multiply_units(part.call, units, units, worker);
  multiply_units(part.call, units, {next->call, next->call.activation != Activation::NONE, next->units}, worker);
}

}  // namespace QUIRE_ISA
}  // namespace quire
