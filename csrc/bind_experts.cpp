// The methods of the Python class `Program` that add the ops of experts_op.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <utility>

#include "bind_experts.h"
#include "experts_op.h"
#include "panel_store.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace quire {
namespace {

void add_route(Program& program, View logits, Address bias, Address factors, View routes, int experts, int top_k, bool softmax,
               bool normalize, float factor, int groups, int top_groups, int group_scores) {
  auto op = std::make_unique<RouteOp>();
  op->call = {floats(logits), logits.second, reinterpret_cast<const float*>(bias),
              reinterpret_cast<const float*>(factors), floats(routes), routes.second, 0, experts, top_k, softmax, normalize, factor, groups, top_groups, group_scores};
  program.add(std::move(op));
}

// Gathered rows, inner rows and outputs are memory for `top_k` rows a token.
void add_experts(Program& program, const PanelStore& gate_up, const PanelStore& down, int num_experts, int top_k,
                 View x, View routes, View shared, View shared_gate, View out, View gathered, Quantized quantized,
                 View inner, Quantized inner_quantized, View outputs, const std::string& activation, float limit,
                 Address gate_up_bias, Address down_bias, int64_t few_rows, int64_t down_few_rows, Address orders,
                 Address inner_orders) {
  auto op = std::make_unique<ExpertsOp>();
  const Activations x_rows = activations_of(quantized), inner_rows = activations_of(inner_quantized);
  const Activations gated = gate_up.view.format.quantized() && !inner_orders ? inner_rows : Activations{nullptr, 0, false};
  op->num_experts = num_experts;
  op->call = {floats(x), x.second, floats(routes), routes.second, floats(shared), shared.second, floats(shared_gate),
              shared_gate.second, floats(out), out.second, 0, gate_up.view.cols, top_k, floats(gathered),
              gathered.second, x_rows, floats(outputs), outputs.second, reinterpret_cast<const int32_t*>(orders),
              reinterpret_cast<const int32_t*>(inner_orders), down.view.cols};
  op->inner = {gate_up.view, {floats(gathered), gathered.second, x_rows}, 0, floats(inner), inner.second,
               reinterpret_cast<const float*>(gate_up_bias), parse_activation(activation), gated, nullptr,
               nullptr, few_rows, limit};
  op->outer = {down.view, {floats(inner), inner.second, inner_rows}, 0, floats(outputs), outputs.second,
               reinterpret_cast<const float*>(down_bias), Activation::NONE, {nullptr, 0, false}, nullptr, nullptr,
               down_few_rows, 0.0f};
  program.add_experts(std::move(op));
}

// `weight` has the matrices of all heads, `quantized` memory for two rows a token and head.
void add_head_linear(Program& program, const PanelStore& weight, int heads, View x, int64_t x_head, Quantized quantized,
                     View y, int64_t y_head, int64_t rest, int64_t few_rows) {
  auto op = std::make_unique<HeadLinearOp>();
  op->call = {weight.view, {floats(x), x.second, activations_of(quantized)}, 0, floats(y), y.second, nullptr,
              Activation::NONE, {nullptr, 0, false}, nullptr, nullptr, few_rows, 0.0f};
  op->heads = heads;
  op->x_head = x_head;
  op->y_head = y_head;
  op->rest = rest;
  program.add(std::move(op));
}

}  // namespace

void bind_experts(nb::class_<Program>& program) {
  program
      .def("head_linear", add_head_linear, nb::keep_alive<1, 2>(), nb::kw_only(), "weight"_a, "heads"_a, "x"_a,
           "x_head"_a, "quantized"_a, "y"_a, "y_head"_a, "rest"_a, "few_rows"_a)
      .def("route", add_route, nb::kw_only(), "logits"_a, "bias"_a, "factors"_a, "routes"_a, "experts"_a, "top_k"_a, "softmax"_a,
           "normalize"_a, "factor"_a, "groups"_a, "top_groups"_a, "group_scores"_a)
      .def("experts", add_experts, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::kw_only(), "gate_up"_a, "down"_a,
           "num_experts"_a, "top_k"_a, "x"_a, "routes"_a, "shared"_a, "shared_gate"_a, "out"_a, "gathered"_a,
           "quantized"_a, "inner"_a, "inner_quantized"_a, "outputs"_a, "activation"_a, "limit"_a, "gate_up_bias"_a,
           "down_bias"_a, "few_rows"_a, "down_few_rows"_a, "orders"_a, "inner_orders"_a);
}

}  // namespace quire
