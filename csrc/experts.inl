// The steps of a mixture of experts around its products: `route` chooses each token's experts, `gather` copies the rows
// of each expert's tokens side by side, `join_experts` adds the outputs. `ExpertsOp` (program.h) calls them in order,
// and the products between.
//
// A row's result does not depend on the other rows: products do not, and outputs are summed in the order of ranks.
#pragma once

#include "elementwise.inl"
#include "kernels.h"
#include "quantize.inl"
#include "scratch.h"
#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

// The index of the largest value, of equals the first. NaN is never larger.
QUIRE_INLINE int64_t find_best(const float* values, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; i++) {
    if (values[i] > values[best]) best = i;
  }
  return best;
}

constexpr float kTaken = -__builtin_inff();

// Softmax or sigmoid of a row's logits.
QUIRE_INLINE void score_experts(const RouteCall& call, const float* logits, float* scores) {
  if (!call.softmax) {
    over_lanes(call.experts, [&](int64_t at, int lanes) {
      store_lanes(scores + at, sigmoid(load_lanes(logits + at, lanes)), lanes);
    });
    return;
  }
  float top = logits[0];
  for (int64_t i = 1; i < call.experts; i++) top = logits[i] > top ? logits[i] : top;
  f32 total = zero();
  over_lanes(call.experts, [&](int64_t at, int lanes) {
    const f32 value = exp(load_lanes(logits + at, lanes) - set1(top));
    total = total + select((1u << lanes) - 1, value, zero());
    store_lanes(scores + at, value, lanes);
  });
  const f32 mass = set1(sum(total));
  over_lanes(call.experts, [&](int64_t at, int lanes) {
    store_lanes(scores + at, load_lanes(scores + at, lanes) / mass, lanes);
  });
}

// Excludes the experts of all groups but the best. `rest` has room for an expert's group, `groups` for all groups.
QUIRE_INLINE void limit_to_groups(const RouteCall& call, float* choice, float* rest, float* groups) {
  const int64_t size = call.experts / call.groups;
  for (int64_t group = 0; group < call.groups; group++) {
    std::memcpy(rest, choice + group * size, static_cast<size_t>(size) * 4);
    groups[group] = 0;
    for (int i = 0; i < call.group_scores; i++) {
      const int64_t best = find_best(rest, size);
      groups[group] += rest[best];
      rest[best] = kTaken;
    }
  }
  for (int i = 0; i < call.top_groups; i++) groups[find_best(groups, call.groups)] = kTaken;
  for (int64_t group = 0; group < call.groups; group++) {
    if (groups[group] == kTaken) continue;
    for (int64_t i = 0; i < size; i++) choice[group * size + i] = kTaken;
  }
}

static void route_row(const RouteCall& call, int64_t row, float* memory) {
  float *scores = memory, *choice = memory + call.experts, *rest = choice + call.experts, *groups = rest + call.experts;
  score_experts(call, call.logits + row * call.logits_stride, scores);
  for (int64_t i = 0; i < call.experts; i++) choice[i] = call.bias ? scores[i] + call.bias[i] : scores[i];
  if (call.groups > 1) limit_to_groups(call, choice, rest, groups);
  float* weights = call.routes + row * call.routes_stride;
  float total = 0;
  for (int rank = 0; rank < call.top_k; rank++) {
    const int64_t best = find_best(choice, call.experts);
    weights[rank] = scores[best];
    weights[call.top_k + rank] = static_cast<float>(best);
    total += scores[best];
    choice[best] = kTaken;
  }
  const float scale = call.normalize ? call.factor / (total + 1e-20f) : call.factor;
  for (int rank = 0; rank < call.top_k; rank++) {
    weights[rank] *= scale;
    if (call.factors) weights[rank] *= call.factors[static_cast<int64_t>(weights[call.top_k + rank])];
  }
}

static void route(const RouteCall& call, Worker& worker) {
  const Span rows = share_rows(worker, call.rows, kRowGrain);
  float* memory = reinterpret_cast<float*>(scratch(static_cast<size_t>(call.experts) * 16));
  for (int64_t row = rows.first; row < rows.last; row++) route_row(call, row, memory);
}

// Quantizes one record of an expert's rows: `at` counts the records of its tiles. `order` may be null.
QUIRE_INLINE void gather_record(const ExpertsCall& call, const int32_t* tokens, const int32_t* order,
                                const Activations& out, const Tiling& tiling, int64_t at) {
  const int64_t blocks = out.cols / kBlock;
  const Tile tile = tiling.tile(at / blocks);
  uint8_t* record = record_of(out, tile, at % blocks);
  for (int64_t r = 0; r < tile.rows; r++) {
    const float* row = call.x + tokens[tile.first + r] * call.x_stride;
    const float* from = row + at % blocks * kBlock;
    float picked[kBlock];
    if (order) {
      for (int i = 0; i < kBlock; i++) picked[i] = row[order[at % blocks * kBlock + i]];
      from = picked;
    }
    quantize_block(load(from), load(from + kLanes), record, tile.size, r);
  }
  for (int64_t r = tile.rows; r < tile.size; r++) clear_row(record, tile.size, r);
}

static void gather(const ExpertsCall& call, const Buckets& buckets, Worker& worker) {
  for (int64_t i = 0; i < buckets.count; i++) {
    const Bucket& bucket = buckets.list[i];
    const int32_t* tokens = buckets.tokens + bucket.first;
    const int32_t* order = call.orders ? call.orders + bucket.expert * call.hidden : nullptr;
    if (call.quantized.data) {
      const Activations out = bucket_rows(call.quantized, bucket);
      const Tiling tiling = cut_activations(out, bucket.count, worker);
      const Span own = share(worker, tiling.count() * (out.cols / kBlock));
      for (int64_t at = own.first; at < own.last; at++) gather_record(call, tokens, order, out, tiling, at);
    } else {
      const Span own = share(worker, bucket.count);
      for (int64_t at = own.first; at < own.last; at++) {
        const float* from = call.x + tokens[at] * call.x_stride;
        float* to = call.gathered + (bucket.first + at) * call.gathered_stride;
        if (!order) std::memcpy(to, from, static_cast<size_t>(call.hidden) * 4);
        for (int64_t i = 0; i < call.hidden && order; i++) to[i] = from[order[i]];
      }
    }
  }
}

static void join_experts(const ExpertsCall& call, const Buckets& buckets, Worker& worker) {
  const int64_t vectors = (call.hidden + kLanes - 1) / kLanes;
  const Span own = share(worker, call.rows * vectors);
  for (int64_t item = own.first; item < own.last; item++) {
    const int64_t row = item / vectors, at = item % vectors * kLanes;
    const int lanes = call.hidden - at < kLanes ? static_cast<int>(call.hidden - at) : kLanes;
    f32 total = zero();
    if (call.shared) total = load_lanes(call.shared + row * call.shared_stride + at, lanes);
    if (call.shared_gate) total = total * sigmoid(set1(call.shared_gate[row * call.shared_gate_stride]));
    for (int rank = 0; rank < call.top_k; rank++) {
      const int64_t pair = buckets.positions[row * call.top_k + rank];
      const f32 weight = set1(call.routes[row * call.routes_stride + rank]);
      total = fma(weight, load_lanes(call.outputs + pair * call.outputs_stride + at, lanes), total);
    }
    store_lanes(call.out + row * call.out_stride + at, total, lanes);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
