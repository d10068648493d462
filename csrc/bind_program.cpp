// The Python class `Program`. Ops are added with numbers and addresses. Python keeps the addresses valid for the
// lifetime of the program. `run` releases the GIL and returns when the step is computed. This file also binds the
// product for logits and the moves of tokens in the cache, which are computed outside of a program.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_experts.h"
#include "bindings.h"
#include "kv_move.h"
#include "panel_store.h"
#include "program.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace quire {
namespace {

using Group = std::tuple<Address, int64_t, Address>;    // tables, table stride, slots
using GroupMoves = std::tuple<Address, Address, int64_t>;  // sources, targets, their number
using Layer = std::tuple<std::string, int, int, int, int, View, View, int>;  // arguments of make_cache, and the group

CacheType parse_cache_type(const std::string& name) {
  if (name == "float32") return CacheType::F32;
  if (name == "bfloat16") return CacheType::BF16;
  if (name == "int8") return CacheType::INT8;
  if (name == "fp8") return CacheType::FP8;
  throw nb::value_error(("there is no cache of type '" + name + "'.").c_str());
}

// `keys` and `values`: the address of block 0, and bytes from one block to the next.
Cache make_cache(const std::string& type, int block_size, int kv_heads, int head_dim, int value_dim, View keys,
                 View values) {
  return {{parse_cache_type(type), block_size, kv_heads, head_dim, value_dim},
          reinterpret_cast<uint8_t*>(keys.first),
          reinterpret_cast<uint8_t*>(values.first),
          keys.second,
          values.second};
}

void add_embed(Program& program, const PanelStore& weight, int64_t first, bool by_position, float scale, View out) {
  auto op = std::make_unique<EmbedOp>();
  op->weight = weight.view;
  op->first = first;
  op->by_position = by_position;
  op->scale = scale;
  op->out = floats(out);
  op->out_stride = out.second;
  program.add(std::move(op));
}

void add_meet(Program& program, Ranks& ranks) {
  auto op = std::make_unique<MeetOp>();
  op->ranks = &ranks;
  program.add(std::move(op));
}

void add_norm(Program& program, View x, View residual, View sum, Address weight, Address bias, bool centered, float eps,
              int64_t groups, int64_t size, View y, Quantized quantized, int64_t rank, int64_t ranks) {
  auto op = std::make_unique<NormOp>();
  op->call = {floats(x), x.second, floats(residual), residual.second, floats(sum), sum.second,
              reinterpret_cast<const float*>(weight), reinterpret_cast<const float*>(bias), centered, eps, 0, groups,
              size, floats(y), y.second, activations_of(quantized), rank, ranks};
  program.add(std::move(op));
}

void add_matmul(Program& program, const PanelStore& weight, View x, Quantized quantized, bool quantize, View y,
                Address bias, const std::string& activation, const QuantizedPart& gated, int64_t few_rows) {
  auto op = std::make_unique<MatmulOp>();
  op->call = {weight.view,
              {floats(x), x.second, activations_of(quantized)},
              0,
              floats(y),
              y.second,
              reinterpret_cast<const float*>(bias),
              parse_activation(activation),
              activations_of(gated),
              nullptr,
              nullptr,
              few_rows,
              0.0f};
  op->quantize = quantize;
  program.add_product(std::move(op));
}

void add_round(Program& program, View x, const QuantizedPart& quantized) {
  auto op = std::make_unique<RoundOp>();
  op->x = floats(x), op->x_stride = x.second, op->out = activations_of(quantized);
  program.add(std::move(op));
}

void add_rope(Program& program, View x, int64_t heads, int64_t head_dim, Address table, int64_t dim,
              bool interleaved) {
  auto op = std::make_unique<RopeOp>();
  op->call = {floats(x), x.second, 0, heads, head_dim, nullptr, reinterpret_cast<const float*>(table), dim,
              interleaved};
  program.add(std::move(op));
}

void add_activate(Program& program, View x, View y, int64_t size, const std::string& activation, bool gated) {
  auto op = std::make_unique<ActivateOp>();
  op->call = {floats(x), x.second, floats(y), y.second, 0, size, parse_activation(activation), gated};
  program.add(std::move(op));
}

void add_sum(Program& program, View a, View b, View y, int64_t size, float factor, bool multiplies) {
  auto op = std::make_unique<AddOp>();
  op->call = {floats(a), a.second, floats(b), b.second, floats(y), y.second, 0, size, factor, multiplies};
  program.add(std::move(op));
}

void add_gather(Program& program, View x, View y, int64_t size, Address order) {
  auto op = std::make_unique<GatherOp>();
  op->x = floats(x), op->x_stride = x.second, op->y = floats(y), op->y_stride = y.second, op->size = size;
  op->order = reinterpret_cast<const int64_t*>(order);
  program.add(std::move(op));
}

void add_store(Program& program, const std::string& type, int block_size, int kv_heads, int head_dim, int value_dim,
               View keys, View values, int group, View k, View v) {
  auto op = std::make_unique<StoreOp>();
  op->cache = make_cache(type, block_size, kv_heads, head_dim, value_dim, keys, values);
  op->group = group;
  op->k = floats(k);
  op->v = floats(v);
  op->k_stride = k.second;
  op->v_stride = v.second;
  program.add(std::move(op));
}

void add_attention(Program& program, const std::string& type, int block_size, int kv_heads, int head_dim,
                   int value_dim, View keys, View values, int group, View q, View out, int heads, float scale, int window, float softcap,
                   Address slopes, Address sinks, Address partials, int64_t num_partials) {
  auto op = std::make_unique<AttentionOp>();
  op->call = {};
  op->call.cache = make_cache(type, block_size, kv_heads, head_dim, value_dim, keys, values);
  op->call.q = floats(q);
  op->call.q_stride = q.second;
  op->call.out = floats(out);
  op->call.out_stride = out.second;
  op->call.heads = heads;
  op->call.scale = scale;
  op->call.window = window;
  op->call.softcap = softcap;
  op->call.slopes = reinterpret_cast<const float*>(slopes);
  op->call.sinks = reinterpret_cast<const float*>(sinks);
  op->call.partials = reinterpret_cast<float*>(partials);
  op->call.num_partials = num_partials;
  op->group = group;
  program.add(std::move(op));
}

// Working memory of attention is limited to trees of this size.
void check_trees(const Step& step) {
  for (int row = 0; step.paths != nullptr && row < step.num_rows; row++) {
    const int first = step.query_starts[row], count = step.query_starts[row + 1] - first;
    if (count > kMaxTreeTokens && step.paths[first * step.path_stride] >= 0)
      throw nb::value_error(("a draft tree has " + std::to_string(count) + " tokens, more than " +
                             std::to_string(kMaxTreeTokens) + ".").c_str());
  }
}

Step make_step(int num_tokens, int num_rows, Address tokens, Address positions, Address query_starts, Address seq_lens,
               const std::vector<Group>& groups, Address paths, int64_t path_stride) {
  Step step;
  step.num_tokens = num_tokens;
  step.num_rows = num_rows;
  step.tokens = reinterpret_cast<const int64_t*>(tokens);
  step.positions = reinterpret_cast<const int64_t*>(positions);
  step.query_starts = reinterpret_cast<const int32_t*>(query_starts);
  step.seq_lens = reinterpret_cast<const int32_t*>(seq_lens);
  for (const auto& [tables, stride, slots] : groups)
    step.groups.push_back({reinterpret_cast<const int32_t*>(tables), stride, reinterpret_cast<const int64_t*>(slots)});
  step.paths = reinterpret_cast<const int32_t*>(paths);
  step.path_stride = path_stride;
  check_trees(step);
  return step;
}

void run(const Program& program, int threads, int num_tokens, int num_rows, Address tokens, Address positions,
         Address query_starts, Address seq_lens, const std::vector<Group>& groups, Address paths,
         int64_t path_stride, Ranks* rung) {
  const Step step = make_step(num_tokens, num_rows, tokens, positions, query_starts, seq_lens, groups, paths,
                              path_stride);
  ReleasedGil released;
  if (rung) rung->ring();
  program.run(threads, step);
}

std::vector<std::pair<std::string, int64_t>> run_timed(const Program& program, int threads, int num_tokens,
                                                       int num_rows, Address tokens, Address positions,
                                                       Address query_starts, Address seq_lens,
                                                       const std::vector<Group>& groups, Address paths,
                                                       int64_t path_stride, Ranks* rung) {
  const Step step = make_step(num_tokens, num_rows, tokens, positions, query_starts, seq_lens, groups, paths,
                              path_stride);
  std::vector<int64_t> times;
  {
    ReleasedGil released;
    if (rung) rung->ring();
    program.run_timed(threads, step, times);
  }
  std::vector<std::pair<std::string, int64_t>> report;
  for (size_t index = 0; index < times.size(); index++)
    report.emplace_back(program.ops()[index]->kind(), times[index]);
  return report;
}

// Some rows of x times a matrix. With `best`, only the largest product of each row.
struct Product {
  const KernelTable& kernels;
  MatmulCall call;
  const float* x;
  int64_t x_stride;
  const int64_t* rows;
};

void multiply_on_team(void* argument, Worker worker) {
  const Product& product = *static_cast<const Product*>(argument);
  const MatmulCall& call = product.call;
  float* gathered = const_cast<float*>(call.x.values);
  const Span own = share(worker, call.rows);
  for (int64_t row = own.first; row < own.last; row++)
    std::memcpy(gathered + row * call.x.stride, product.x + product.rows[row] * product.x_stride,
                static_cast<size_t>(call.weight.cols) * sizeof(float));
  worker.barrier();
  if (call.weight.format.quantized()) {
    product.kernels.quantize(call.x.values, call.x.stride, call.rows, call.x.quantized, worker);
    worker.barrier();
  }
  product.kernels.matmul(call, worker);
}

using Choice = std::pair<std::vector<int64_t>, std::vector<float>>;  // indices and values of the largest

Choice multiply(const std::string& isa, int threads, int64_t few_rows, const PanelStore& weight, const std::vector<int64_t>& rows, View x,
                View gathered, Quantized quantized, View y) {
  std::vector<Best> best(y.first ? 0 : static_cast<size_t>(threads) * rows.size());
  Product product{kernels_named(isa),
                  {weight.view,
                   {floats(gathered), gathered.second, activations_of(quantized, false)},
                   static_cast<int64_t>(rows.size()),
                   floats(y),
                   y.second,
                   nullptr,
                   Activation::NONE,
                   {nullptr, 0, false},
                   y.first ? nullptr : best.data(),
                   nullptr,
                   few_rows,
                   0.0f},
                  floats(x),
                  x.second,
                  rows.data()};
  {
    ReleasedGil released;
    run_team(threads, multiply_on_team, &product);
  }
  Choice choice;
  for (size_t row = 0; row < rows.size() && !best.empty(); row++) {
    choice.first.push_back(best[row].index);
    choice.second.push_back(best[row].value);
  }
  return choice;
}

// Layers of groups that have no moves are left out.
void move_tokens(int threads, const std::vector<Layer>& layers, const std::vector<GroupMoves>& groups) {
  std::vector<LayerMoves> moved;
  for (const auto& [type, block_size, kv_heads, head_dim, value_dim, keys, values, group] : layers) {
    if (static_cast<size_t>(group) >= groups.size()) continue;
    const auto& [sources, targets, count] = groups[static_cast<size_t>(group)];
    if (count == 0) continue;
    moved.push_back({make_cache(type, block_size, kv_heads, head_dim, value_dim, keys, values),
                     {reinterpret_cast<const int64_t*>(sources), reinterpret_cast<const int64_t*>(targets), count}});
  }
  ReleasedGil released;
  move_kv(threads, moved);
}

std::vector<std::string> built() {
  std::vector<std::string> names;
  for (const char* name : kInstructionSets) {
    if (find_kernels(name)) names.emplace_back(name);
  }
  return names;
}

}  // namespace

Activation parse_activation(const std::string& name) {
  if (name == "silu") return Activation::SILU;
  if (name == "gelu") return Activation::GELU;
  if (name == "gelu_tanh") return Activation::GELU_TANH;
  if (name == "relu") return Activation::RELU;
  if (name == "clamped_silu") return Activation::CLAMPED_SILU;
  if (name.empty()) return Activation::NONE;
  throw nb::value_error(("there is no activation '" + name + "'.").c_str());
}

const KernelTable& kernels_named(const std::string& isa) {
  const KernelTable* table = find_kernels(isa.c_str());
  if (!table) throw nb::value_error(("kernels for '" + isa + "' were not built.").c_str());
  return *table;
}

void bind_program(nb::module_& module) {
  nb::class_<Program> program(module, "Program");
  bind_experts(program);
  program
      .def("__init__",
           [](Program* self, const std::string& isa) { new (self) Program(kernels_named(isa)); }, "isa"_a)
      .def("embed", add_embed, nb::keep_alive<1, 2>(), nb::kw_only(), "weight"_a, "first"_a, "by_position"_a,
           "scale"_a, "out"_a)
      .def("meet", add_meet, nb::keep_alive<1, 2>(), "ranks"_a)
      .def("norm", add_norm, nb::kw_only(), "x"_a, "residual"_a, "sum"_a, "weight"_a, "bias"_a, "centered"_a, "eps"_a,
           "groups"_a, "size"_a, "y"_a, "quantized"_a, "rank"_a, "ranks"_a)
      .def("matmul", add_matmul, nb::keep_alive<1, 2>(), nb::kw_only(), "weight"_a, "x"_a, "quantized"_a, "quantize"_a,
           "y"_a, "bias"_a, "activation"_a, "gated"_a, "few_rows"_a)
      .def("round", add_round, nb::kw_only(), "x"_a, "quantized"_a)
      .def("rope", add_rope, nb::kw_only(), "x"_a, "heads"_a, "head_dim"_a, "table"_a, "dim"_a, "interleaved"_a)
      .def("activate", add_activate, nb::kw_only(), "x"_a, "y"_a, "size"_a, "activation"_a, "gated"_a)
      .def("add", add_sum, nb::kw_only(), "a"_a, "b"_a, "y"_a, "size"_a, "factor"_a, "multiplies"_a)
      .def("gather", add_gather, nb::kw_only(), "x"_a, "y"_a, "size"_a, "order"_a)
      .def("store", add_store, nb::kw_only(), "type"_a, "block_size"_a, "kv_heads"_a, "head_dim"_a, "value_dim"_a, "keys"_a,
           "values"_a, "group"_a, "k"_a, "v"_a)
      .def("attention", add_attention, nb::kw_only(), "type"_a, "block_size"_a, "kv_heads"_a, "head_dim"_a, "value_dim"_a, "keys"_a,
           "values"_a, "group"_a, "q"_a, "out"_a, "heads"_a, "scale"_a, "window"_a, "softcap"_a, "slopes"_a,
           "sinks"_a, "partials"_a, "num_partials"_a)
      .def("run", run, "threads"_a, "num_tokens"_a, "num_rows"_a, "tokens"_a, "positions"_a, "query_starts"_a,
           "seq_lens"_a, "groups"_a, "paths"_a, "path_stride"_a, "rung"_a.none() = nb::none())
      .def("run_timed", run_timed, "threads"_a, "num_tokens"_a, "num_rows"_a, "tokens"_a, "positions"_a,
           "query_starts"_a, "seq_lens"_a, "groups"_a, "paths"_a, "path_stride"_a, "rung"_a.none() = nb::none());
  module.def("multiply", multiply, "isa"_a, "threads"_a, "few_rows"_a, "weight"_a, "rows"_a, "x"_a, "gathered"_a,
             "quantized"_a, "y"_a);
  module.def("move_kv", move_tokens, "threads"_a, "layers"_a, "groups"_a);
  module.def("built", built);
  module.def("quantized_row_bytes", Activations::row_bytes, "cols"_a);
  module.def(
      "cache_bytes",
      [](const std::string& type, int block_size, int kv_heads, int head_dim, int value_dim) {
        const CacheShape shape = make_cache(type, block_size, kv_heads, head_dim, value_dim, {}, {}).shape;
        return std::make_pair(shape.key_head_bytes(), shape.value_head_bytes());
      },
      "type"_a, "block_size"_a, "kv_heads"_a, "head_dim"_a, "value_dim"_a);
}

}  // namespace quire
