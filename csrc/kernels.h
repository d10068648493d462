// The kernels of an instruction set: a table of functions, selected once by name. A function works on raw memory and
// computes a worker's share of the rows or outputs. program.cpp calls them in order.
#pragma once

#include <cstdint>

#include "activations.h"
#include "attention.h"
#include "panels.h"
#include "pool.h"
#include "sample.h"

namespace quire {

enum class Activation : uint8_t { NONE, SILU, GELU, GELU_TANH, RELU, CLAMPED_SILU };

// Rows in float32 or, for quantized panels, activations in int8. Kernels may read kSpareRows rows after the last one;
// their values are ignored.
struct Operand {
  const float* values;
  int64_t stride;
  Activations quantized;
};

constexpr int kSpareRows = 16;

struct Best {
  float value;
  int64_t index;
};

// y = x W^T + bias. With an activation the first half of W's outputs is the gate and the second half is what it
// multiplies. The gated products are written to `gated`, and to y if it is not null.
struct MatmulCall {
  Panels weight;
  Operand x;
  int64_t rows;
  float* y;           // or null
  int64_t y_stride;
  const float* bias;  // or null
  Activation activation;
  Activations gated;  // not written if data is null
  Best* best;         // or null: the largest of each row, [workers][rows]; the result is that of worker 0
  const MatmulCall* following;  // the next product, whose weights may be prefetched; or null
  int64_t few_rows;  // up to this many rows codes are unpacked in registers, for each tile again (tune.h)
  float limit;       // of CLAMPED_SILU: gate and up are limited to it
};

// Some units of a product, for all of its rows. A unit is 32 outputs, of a gated product the gate and what it multiplies.
struct MatmulPart {
  MatmulCall call;
  Span units;
};

// Groups of `size` values, `groups` in each of `rows` rows: y = x / rms(x) * weight, or with `centered` (LayerNorm)
// y = (x - mean(x)) / deviation(x) * weight + bias. With a residual the sum of both is normalized and written to `sum`.
struct NormCall {
  const float* x;
  int64_t x_stride;
  const float* residual;  // or null
  int64_t residual_stride;
  float* sum;  // with a residual
  int64_t sum_stride;
  const float* weight;
  const float* bias;  // or null
  bool centered;
  float eps;
  int64_t rows, groups, size;
  float* y;  // or null
  int64_t y_stride;
  Activations quantized;  // not written if data is null
  int64_t rank = 0, ranks = 1;  // each rank computes a part of what a worker has; their outputs are shared
};

struct RopeCall {
  float* x;  // rotated in place: [rows][heads][head_dim], rows `stride` apart
  int64_t stride;
  int64_t rows, heads, head_dim;
  const int64_t* positions;
  const float* table;  // [max_len][dim]: dim / 2 cosines, then dim / 2 sines
  int64_t dim;
  bool interleaved;
};

// y = activation(x), or gated y = activation(gate) * up, where x is the gate followed by up.
struct ActivateCall {
  const float* x;  // [rows][size], or gated [rows][2 * size]
  int64_t x_stride;
  float* y;  // [rows][size]
  int64_t y_stride;
  int64_t rows, size;
  Activation activation;
  bool gated;
};

// y = (a + b) * factor, or with `multiplies` y = a * b; [rows][size] each.
struct AddCall {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  float* y;
  int64_t y_stride;
  int64_t rows, size;
  float factor;
  bool multiplies;
};

// How a token's experts follow from its logits (kernels/routing.py).
struct RouteCall {
  const float* logits;  // [rows][experts]
  int64_t logits_stride;
  const float* bias;     // [experts] or null
  const float* factors;  // [experts], of the weights; or null
  float* routes;      // [rows][2 * top_k]: the weights, then the experts' numbers
  int64_t routes_stride;
  int64_t rows;
  int experts, top_k;
  bool softmax, normalize;
  float factor;
  int groups, top_groups, group_scores;
};

// The tokens of one expert in a step: pairs of a token and a rank, [first, first + count) in the order of experts.
struct Bucket {
  int expert;
  int64_t first, count;
};

// A bucket's rows of activations that hold all buckets. Padding of tiles at most doubles the rows of a bucket.
static inline Activations bucket_rows(const Activations& all, const Bucket& bucket) {
  if (!all.data) return {nullptr, 0, false};
  return {all.data + 2 * bucket.first * Activations::row_bytes(all.cols), all.cols, false};
}

struct ExpertsCall {
  const float* x;  // [rows][hidden]
  int64_t x_stride;
  const float* routes;  // as RouteCall writes them
  int64_t routes_stride;
  const float* shared;  // [rows][hidden], or null
  int64_t shared_stride;
  const float* shared_gate;  // [rows][1], or null
  int64_t shared_gate_stride;
  float* out;  // [rows][hidden]
  int64_t out_stride;
  int64_t rows, hidden;
  int top_k;
  float* gathered;        // [pairs][gathered_stride], for dense gate_up
  int64_t gathered_stride;
  Activations quantized;  // of the gathered rows; an expert's begin at row 2 * bucket.first
  float* outputs;         // [pairs][outputs_stride]
  int64_t outputs_stride;
  const int32_t* orders;        // [experts][hidden] or null: column i of an expert's gate and up belongs to x[order[i]]
  const int32_t* inner_orders;  // [experts][size] or null: the same for down
  int64_t inner_size;
};

// The pairs of a step by expert.
struct Buckets {
  const Bucket* list;
  int64_t count;
  const int32_t* tokens;     // [pairs]: the token of each pair
  const int32_t* positions;  // [rows][top_k]: where a token's pairs are
};

struct KernelTable {
  const char* name;
  int64_t row_grain;  // parts of own rows begin at multiples of it
  void (*matmul)(const MatmulCall&, Worker&);
  void (*quantize)(const float* x, int64_t x_stride, int64_t rows, const Activations& out, Worker&);
  void (*norm)(const NormCall&, Worker&);
  void (*rope)(const RopeCall&, Worker&);
  void (*activate)(const ActivateCall&, Worker&);
  void (*add)(const AddCall&, Worker&);
  void (*store_kv)(const Cache&, const int64_t* slots, int num_tokens, const float* k, int64_t k_stride, const float* v,
                   int64_t v_stride, const Worker&);
  bool (*attention)(const AttentionCall&, Worker&);
  void (*join_attention)(const AttentionCall&, Worker&);
  void (*route)(const RouteCall&, Worker&);
  void (*gather)(const ExpertsCall&, const Buckets&, Worker&);
  void (*matmul_part)(const MatmulPart&, const MatmulPart* next, Worker&);
  void (*join_experts)(const ExpertsCall&, const Buckets&, Worker&);
  SampleKernels sample;
  LogitsKernels logits;
};

// The instruction sets of x86-64 and of 64-bit Arm.
constexpr const char* kInstructionSets[] = {"avx2", "avxvnni", "avx512", "amx", "neon", "dotprod", "i8mm"};

// The table of an instruction set, or null if it was not built. The caller checks that this machine supports it.
const KernelTable* find_kernels(const char* name);

}  // namespace quire
