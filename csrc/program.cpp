#include "program.h"

#include <chrono>

#include "pack.h"

namespace quire {

Rows Step::rows(int group) const {
  const StepGroup& own = groups[static_cast<size_t>(group)];
  return {num_rows,         num_tokens, query_starts, seq_lens, own.tables,
          own.table_stride, own.slots,  ancestors,    ancestors_stride};
}

namespace {

struct Run {
  const KernelTable& kernels;
  const std::vector<std::unique_ptr<Op>>& ops;
  const Step& step;
  std::vector<int64_t>* times;
};

int64_t nanoseconds() {
  using namespace std::chrono;
  return duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

void walk(void* argument, Worker worker) {
  const Run& run = *static_cast<const Run*>(argument);
  for (const auto& op : run.ops) {
    op->run(run.kernels, run.step, worker);
    worker.barrier();
  }
}

void walk_timed(void* argument, Worker worker) {
  const Run& run = *static_cast<const Run*>(argument);
  for (size_t index = 0; index < run.ops.size(); index++) {
    const int64_t begin = nanoseconds();
    run.ops[index]->run(run.kernels, run.step, worker);
    worker.barrier();
    if (worker.index == 0) (*run.times)[index] += nanoseconds() - begin;
  }
}

}  // namespace

void Program::add_product(std::unique_ptr<MatmulOp> op) {
  if (last_product_) last_product_->call.following = &op->call;
  last_product_ = op.get();
  add(std::move(op));
}

void Program::run(int threads, const Step& step) const {
  Run run{kernels_, ops_, step, nullptr};
  run_team(threads, walk, &run);
}

void Program::run_timed(int threads, const Step& step, std::vector<int64_t>& times) const {
  times.resize(ops_.size());
  Run run{kernels_, ops_, step, &times};
  run_team(threads, walk_timed, &run);
}

void EmbedOp::run(const KernelTable&, const Step& step, Worker& worker) const {
  const Span tokens = share(worker, step.num_tokens);
  for (int64_t token = tokens.first; token < tokens.last; token++) {
    float* row = out + token * out_stride;
    unpack_row(weight, step.tokens[token], row);
    if (scale != 1.0f) {
      for (int64_t i = 0; i < weight.cols; i++) row[i] *= scale;
    }
  }
}

void NormOp::run(const KernelTable& kernels, const Step& step, Worker& worker) const {
  NormCall now = call;
  now.rows = step.num_tokens;
  kernels.norm(now, worker);
}

void MatmulOp::run(const KernelTable& kernels, const Step& step, Worker& worker) const {
  MatmulCall now = call;
  now.rows = step.num_tokens;
  if (quantize) {
    kernels.quantize(now.x.values, now.x.stride, now.rows, now.x.quantized, worker);
    worker.barrier();
  }
  kernels.matmul(now, worker);
}

void RopeOp::run(const KernelTable& kernels, const Step& step, Worker& worker) const {
  RopeCall now = call;
  now.rows = step.num_tokens;
  now.positions = step.positions;
  kernels.rope(now, worker);
}

void GateOp::run(const KernelTable& kernels, const Step& step, Worker& worker) const {
  GateCall now = call;
  now.rows = step.num_tokens;
  kernels.gate(now, worker);
}

void StoreOp::run(const KernelTable& kernels, const Step& step, Worker& worker) const {
  const int64_t* slots = step.groups[static_cast<size_t>(group)].slots;
  kernels.store_kv(cache, slots, step.num_tokens, k, k_stride, v, v_stride, worker);
}

void AttentionOp::run(const KernelTable& kernels, const Step& step, Worker& worker) const {
  AttentionCall now = call;
  now.rows = step.rows(group);
  kernels.attention(now, worker);
}

}  // namespace quire
