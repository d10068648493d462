#include "experts_op.h"

#include <algorithm>
#include <cstring>

#include "scratch.h"

namespace quire {
namespace {

constexpr int64_t kUnitOutputs = 32;
constexpr int64_t kUnpackingRows = 4;  // reading and unpacking a panel takes as long as multiplying it with these rows

int64_t ceil_div(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

// The rows of one of `count` matrices that lie one after the other in panels.
Panels slice(const Panels& all, int64_t index, int64_t count) {
  const int64_t rows = all.rows / count;
  return {all.format, rows, all.cols, all.data + index * (rows / kLanes) * all.stride()};
}

// How a phase's work is divided: units of all buckets in order, each as expensive as its bucket has rows.
struct Share {
  int64_t first, last;  // of the total cost

  // The units of a bucket whose work begins in this share. `begin` is the cost of all buckets before.
  Span units(int64_t begin, int64_t unit_cost, int64_t num_units) const {
    const auto at = [&](int64_t cost) {
      return std::min(num_units, ceil_div(std::max<int64_t>(cost - begin, 0), unit_cost));
    };
    return {at(first), at(last)};
  }
};

int64_t count_units(const MatmulCall& call) {
  return ceil_div(call.weight.rows / (call.activation == Activation::NONE ? 1 : 2), kUnitOutputs);
}

// Calls visit(part) for each of a worker's parts of `count` products, in order, until it returns false. `call_of(i)`
// returns product i, which has `rows_of(i)` rows. All have the same number of outputs.
template <class CallOf, class RowsOf, class Visit>
void visit_parts(size_t count, const Worker& worker, CallOf call_of, RowsOf rows_of, Visit visit) {
  if (count == 0) return;
  const int64_t num_units = count_units(call_of(0));
  int64_t total = 0, begin = 0;
  for (size_t i = 0; i < count; i++) total += (rows_of(i) + kUnpackingRows) * num_units;
  const Share own{total * worker.index / worker.count(), total * (worker.index + 1) / worker.count()};
  for (size_t i = 0; i < count; i++) {
    const int64_t unit_cost = rows_of(i) + kUnpackingRows;
    const Span units = own.units(begin, unit_cost, num_units);
    begin += unit_cost * num_units;
    if (units.first < units.last && !visit(MatmulPart{call_of(i), units})) return;
  }
}

// Computes a worker's part of `count` products, one after the other. `then` is the part that the worker computes after
// the last of them, in the next phase; or null.
template <class CallOf, class RowsOf>
void multiply_in_turn(const KernelTable& kernels, size_t count, Worker& worker, CallOf call_of, RowsOf rows_of,
                      const MatmulPart* then) {
  MatmulPart last{};
  bool any = false;
  visit_parts(count, worker, call_of, rows_of, [&](const MatmulPart& part) {
    if (any) kernels.matmul_part(last, &part, worker);
    last = part;
    return any = true;
  });
  if (any) kernels.matmul_part(last, then, worker);
}

}  // namespace

void RouteOp::run(const KernelTable& kernels, const Step& step, Worker& worker, int) const {
  RouteCall now = call;
  now.rows = step.num_tokens;
  kernels.route(now, worker);
}

void ExpertsOp::run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const {
  ExpertsCall now = call;
  now.rows = step.num_tokens;
  switch (prepares_inner() || phase < 3 ? phase : phase + 1) {
    case 0:
      if (worker.index == 0) sort_pairs(step.num_tokens);
      return;
    case 1: return kernels.gather(now, buckets(), worker);
    case 2: return multiply_inner(kernels, worker);
    case 3: return prepare_inner(kernels, worker);
    case 4: return multiply_outer(kernels, step.num_tokens, worker);
    default: return kernels.join_experts(now, buckets(), worker);
  }
}

Buckets ExpertsOp::buckets() const {
  return {list_.data(), static_cast<int64_t>(list_.size()), tokens_.data(), positions_.data()};
}

// A counting sort. Pairs of one expert stay in the order of tokens.
void ExpertsOp::sort_pairs(int64_t num_tokens) const {
  const int64_t num_pairs = num_tokens * call.top_k;
  const auto expert_of = [&](int64_t pair) {
    const float* routes = call.routes + pair / call.top_k * call.routes_stride;
    return static_cast<size_t>(routes[call.top_k + pair % call.top_k]);
  };
  std::vector<int64_t> next(static_cast<size_t>(num_experts) + 1, 0);
  for (int64_t pair = 0; pair < num_pairs; pair++) next[expert_of(pair) + 1]++;
  list_.clear();
  for (size_t expert = 0; expert < static_cast<size_t>(num_experts); expert++) {
    if (next[expert + 1]) list_.push_back({static_cast<int>(expert), next[expert], next[expert + 1]});
    next[expert + 1] += next[expert];
  }
  tokens_.resize(static_cast<size_t>(num_pairs));
  positions_.resize(static_cast<size_t>(num_pairs));
  for (int64_t pair = 0; pair < num_pairs; pair++) {
    const int64_t position = next[expert_of(pair)]++;
    tokens_[static_cast<size_t>(position)] = static_cast<int32_t>(pair / call.top_k);
    positions_[static_cast<size_t>(pair)] = static_cast<int32_t>(position);
  }
}

MatmulCall ExpertsOp::product(const MatmulCall& all, const Bucket& bucket) const {
  MatmulCall one = all;
  one.weight = slice(all.weight, bucket.expert, num_experts);
  one.x.values += bucket.first * all.x.stride;
  one.x.quantized = bucket_rows(all.x.quantized, bucket);
  one.rows = bucket.count;
  if (all.y) one.y += bucket.first * all.y_stride;
  if (all.bias) one.bias += bucket.expert * one.weight.rows;
  one.gated = bucket_rows(all.gated, bucket);
  return one;
}

// The tiles of dense products have other rows than those of int8, so dense products write float32 only.
void ExpertsOp::prepare_inner(const KernelTable& kernels, Worker& worker) const {
  if (call.inner_orders) {
    order_inner(worker);
    worker.barrier();
  }
  if (!outer.x.quantized.data) return;
  for (const Bucket& bucket : list_) {
    const MatmulCall one = product(outer, bucket);
    kernels.quantize(one.x.values, one.x.stride, one.rows, one.x.quantized, worker);
  }
}

// In place, a worker's share of the rows.
void ExpertsOp::order_inner(const Worker& worker) const {
  const size_t size = static_cast<size_t>(call.inner_size);
  float* copy = reinterpret_cast<float*>(scratch(size * sizeof(float)));
  for (const Bucket& bucket : list_) {
    const int32_t* order = call.inner_orders + bucket.expert * call.inner_size;
    const Span own = share(worker, bucket.count);
    for (int64_t at = own.first; at < own.last; at++) {
      float* row = inner.y + (bucket.first + at) * inner.y_stride;
      std::memcpy(copy, row, size * sizeof(float));
      for (size_t i = 0; i < size; i++) row[i] = copy[order[i]];
    }
  }
}

// While a worker reads the end of its weights, those that it needs next are prefetched: of the products back.
void ExpertsOp::multiply_inner(const KernelTable& kernels, Worker& worker) const {
  const auto rows_of = [&](size_t i) { return list_[i].count; };
  MatmulPart then{};
  const auto keep_first = [&](const MatmulPart& part) {
    then = part;
    return false;
  };
  visit_parts(list_.size(), worker, [&](size_t i) { return product(outer, list_[i]); }, rows_of, keep_first);
  multiply_in_turn(kernels, list_.size(), worker, [&](size_t i) { return product(inner, list_[i]); }, rows_of,
                   then.units.first < then.units.last ? &then : nullptr);
}

// The next weights are those of the product that follows the experts.
void ExpertsOp::multiply_outer(const KernelTable& kernels, int64_t num_tokens, Worker& worker) const {
  MatmulPart then{};
  if (outer.following) {
    then.call = *outer.following;
    then.call.rows = num_tokens;
    then.units = share(worker, count_units(then.call));
  }
  multiply_in_turn(kernels, list_.size(), worker, [&](size_t i) { return product(outer, list_[i]); },
                   [&](size_t i) { return list_[i].count; }, then.units.first < then.units.last ? &then : nullptr);
}

void HeadLinearOp::run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const {
  const int64_t num_tokens = step.num_tokens;
  if (phase == 0) return prepare(kernels, num_tokens, worker);
  multiply_in_turn(kernels, static_cast<size_t>(heads), worker,
                   [&](size_t head) { return product(num_tokens, static_cast<int>(head)); },
                   [&](size_t) { return num_tokens; }, nullptr);
}

void HeadLinearOp::prepare(const KernelTable& kernels, int64_t num_tokens, Worker& worker) const {
  for (int head = 0; head < heads && call.x.quantized.data; head++) {
    const MatmulCall one = product(num_tokens, head);
    kernels.quantize(one.x.values, one.x.stride, num_tokens, one.x.quantized, worker);
  }
  const Span own = share(worker, num_tokens * heads);
  for (int64_t at = own.first; at < own.last && rest > 0; at++) {
    const int64_t token = at / heads, head = at % heads;
    const float* from = call.x.values + token * call.x.stride + head * x_head + call.weight.cols;
    std::memcpy(call.y + token * call.y_stride + head * y_head + call.weight.rows / heads, from,
                static_cast<size_t>(rest) * sizeof(float));
  }
}

MatmulCall HeadLinearOp::product(int64_t num_tokens, int head) const {
  MatmulCall one = call;
  one.weight = slice(call.weight, head, heads);
  one.x.values += head * x_head;
  one.x.quantized = bucket_rows(call.x.quantized, {head, head * num_tokens, num_tokens});
  one.rows = num_tokens;
  one.y += head * y_head;
  return one;
}

}  // namespace quire
