// What every instruction set offers: one table of functions each, chosen once by name. The functions work on raw memory
// and on a worker's share of the rows or outputs; program.cpp strings them together.
#pragma once

#include <cstdint>

#include "activations.h"
#include "attention.h"
#include "panels.h"
#include "pool.h"
#include "sample.h"

namespace quire {

enum class Activation : uint8_t { NONE, SILU, GELU, GELU_TANH, RELU };

// Rows of float32 (kernels may read kSpareRows rows behind the last one, and use nothing of what they find there) or,
// for quantized panels, activations in int8.
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

// y = x W^T + bias. With an activation the upper half of W's outputs is the gate, the lower half what it multiplies, and
// the products go into `gated` (and into y, if that is given).
struct MatmulCall {
  Panels weight;
  Operand x;
  int64_t rows;
  float* y;           // or null
  int64_t y_stride;
  const float* bias;  // or null
  Activation activation;
  Activations gated;  // data null: not wanted
  Best* best;         // or null: the largest of each row, [workers][rows]; the answer is in the first
  const MatmulCall* following;  // the next product, whose weights may be asked for in advance; or null
};

// Groups of `size` values, `groups` in each of `rows` rows: y = x / rms(x) * weight, or with `centered` (LayerNorm)
// y = (x - mean(x)) / deviation(x) * weight + bias. With a residual the sum of both is normed, and written to `sum`.
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
  Activations quantized;  // data null: not wanted
};

struct RopeCall {
  float* x;  // turned in place: [rows][heads][head_dim], rows `stride` apart
  int64_t stride;
  int64_t rows, heads, head_dim;
  const int64_t* positions;
  const float* table;  // [max_len][dim]: dim / 2 cosines, then dim / 2 sines
  int64_t dim;
  bool interleaved;
};

// y = activation(x), or gated y = activation(gate) * up, where x is the gate and then what it multiplies.
struct ActivateCall {
  const float* x;  // [rows][size], or gated [rows][2 * size]
  int64_t x_stride;
  float* y;  // [rows][size]
  int64_t y_stride;
  int64_t rows, size;
  Activation activation;
  bool gated;
};

// y = a + b, [rows][size] each.
struct AddCall {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  float* y;
  int64_t y_stride;
  int64_t rows, size;
};

struct KernelTable {
  const char* name;
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
  SampleKernels sample;
};

// The table of an instruction set ("avx2", "avxvnni", "avx512", "amx"), or null if it was not built. The caller has
// made sure that this machine executes it.
const KernelTable* find_kernels(const char* name);

}  // namespace quire
