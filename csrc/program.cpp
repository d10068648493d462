#include "program.h"

#include <chrono>

#include "experts_op.h"
#include "pack.h"

namespace quire {

Rows Step::rows(int group) const {
  const StepGroup& own = groups[static_cast<size_t>(group)];
  return {num_rows,         num_tokens, query_starts, seq_lens,   own.tables,
          own.table_stride, own.slots,  paths,        path_stride};
}

namespace {

int64_t nanoseconds() {
  using namespace std::chrono;
  return duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void Walk::begin(size_t stages, int parts) {
  const size_t num_parts = stages * static_cast<size_t>(parts);
  if (stages_.size() != stages) stages_ = std::vector<Stage>(stages);
  if (claimed_.size() != num_parts) claimed_ = std::vector<std::atomic<bool>>(num_parts);
  for (Stage& stage : stages_) stage.done.store(0, std::memory_order_relaxed);
  for (auto& part : claimed_) part.store(false, std::memory_order_relaxed);
  parts_ = parts;
  count_ = static_cast<uint32_t>(stages);
  ended_.set(0);
}

bool Walk::claim(uint32_t stage, int part) {
  std::atomic<bool>& flag = claimed_[stage * static_cast<size_t>(parts_) + static_cast<size_t>(part)];
  return !flag.load(std::memory_order_relaxed) && !flag.exchange(true, std::memory_order_relaxed);
}

template <class F>
void Walk::take_part(const Worker& worker, F run) {
  const int first = worker.index * parts_ / worker.count();
  for (uint32_t stage = ended_.value(); stage < count_; stage = ended_.value()) {
    for (int i = 0; i < parts_; i++) {
      const int part = (first + i) % parts_;
      if (!claim(stage, part)) continue;
      Worker as{worker.team, part, parts_};
      run(stage, as);
      if (stages_[stage].done.fetch_add(1, std::memory_order_acq_rel) + 1 < parts_) continue;
      ended_.set(stage + 1);
      ended_.wake();
    }
    worker.team.wait_while(ended_, stage);
  }
}

struct Program::Run {
  const Program& program;
  const std::vector<Stage>& stages;
  const Step& step;
  std::vector<int64_t>* times;
};

void Program::walk(void* argument, Worker worker) {
  const Run& run = *static_cast<const Run*>(argument);
  const Program& program = run.program;
  program.walk_.take_part(worker, [&](uint32_t stage, Worker& part) {
    for (size_t at = run.stages[stage].first; at < run.stages[stage].last; at++) {
      const Place& place = program.places_[at];
      const int64_t begin = run.times && worker.index == 0 ? nanoseconds() : 0;
      program.ops_[place.op]->run(program.kernels_, run.step, part, place.phase);
      if (begin) (*run.times)[place.op] += nanoseconds() - begin;
    }
  });
}

void Program::add(std::unique_ptr<Op> op) {
  const bool continues = op->by_rows() && !ops_.empty() && ops_.back()->by_rows();
  for (int phase = 0; phase < op->phases(); phase++) {
    const size_t at = places_.size();
    places_.push_back({ops_.size(), phase});
    phases_.push_back({at, at + 1});
    if (!continues && (phase == 0 || !op->by_rows())) stretches_.push_back({at, at});
    stretches_.back().last = at + 1;
  }
  ops_.push_back(std::move(op));
}

void Program::add_product(std::unique_ptr<MatmulOp> op) {
  if (last_product_) last_product_->following = &op->call;
  last_product_ = &op->call;
  add(std::move(op));
}

// Which experts follow a product is not known before the step.
void Program::add_experts(std::unique_ptr<ExpertsOp> op) {
  last_product_ = &op->outer;
  add(std::move(op));
}

void Program::run(int threads, const Step& step, std::vector<int64_t>* times) const {
  const bool many = step.num_tokens >= kOwnRows * threads;
  const int passes = (step.num_tokens + kMostRows * threads - 1) / (kMostRows * threads);
  Run run{*this, many ? stretches_ : phases_, step, times};
  walk_.begin(run.stages.size(), many ? threads * passes : threads);
  run_team(threads, walk, &run);
}

void Program::run(int threads, const Step& step) const { run(threads, step, nullptr); }

void Program::run_timed(int threads, const Step& step, std::vector<int64_t>& times) const {
  times.resize(ops_.size());
  run(threads, step, &times);
}

void EmbedOp::run(const KernelTable& kernels, const Step& step, Worker& worker, int) const {
  const Span tokens = share_rows(worker, step.num_tokens, kernels.row_grain);
  const int64_t* rows = by_position ? step.positions : step.tokens;
  for (int64_t token = tokens.first; token < tokens.last; token++) {
    const int64_t index = rows[token] - first;
    if (index < 0 || index >= weight.rows) continue;
    float* row = out + token * out_stride;
    unpack_row(weight, index, row);
    if (scale != 1.0f) {
      for (int64_t i = 0; i < weight.cols; i++) row[i] *= scale;
    }
  }
}

void MeetOp::run(const KernelTable&, const Step&, Worker& worker, int) const {
  if (worker.index == 0) ranks->meet();
}

void NormOp::run(const KernelTable& kernels, const Step& step, Worker& worker, int) const {
  NormCall now = call;
  now.rows = step.num_tokens;
  kernels.norm(now, worker);
}

void MatmulOp::run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const {
  MatmulCall now = call;
  now.rows = step.num_tokens;
  if (quantize && phase == 0) return kernels.quantize(now.x.values, now.x.stride, now.rows, now.x.quantized, worker);
  kernels.matmul(now, worker);
}

void RoundOp::run(const KernelTable& kernels, const Step& step, Worker& worker, int) const {
  kernels.quantize(x, x_stride, step.num_tokens, out, worker);
}

void RopeOp::run(const KernelTable& kernels, const Step& step, Worker& worker, int) const {
  RopeCall now = call;
  now.rows = step.num_tokens;
  now.positions = step.positions;
  kernels.rope(now, worker);
}

void ActivateOp::run(const KernelTable& kernels, const Step& step, Worker& worker, int) const {
  ActivateCall now = call;
  now.rows = step.num_tokens;
  kernels.activate(now, worker);
}

void AddOp::run(const KernelTable& kernels, const Step& step, Worker& worker, int) const {
  AddCall now = call;
  now.rows = step.num_tokens;
  kernels.add(now, worker);
}

void GatherOp::run(const KernelTable& kernels, const Step& step, Worker& worker, int) const {
  const Span rows = share_rows(worker, step.num_tokens, kernels.row_grain);
  for (int64_t row = rows.first; row < rows.last; row++) {
    const float* from = x + row * x_stride;
    float* to = y + row * y_stride;
    for (int64_t i = 0; i < size; i++) to[i] = from[order[i]];
  }
}

void StoreOp::run(const KernelTable& kernels, const Step& step, Worker& worker, int) const {
  const int64_t* slots = step.groups[static_cast<size_t>(group)].slots;
  kernels.store_kv(cache, slots, step.num_tokens, k, k_stride, v, v_stride, worker);
}

void AttentionOp::run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const {
  AttentionCall now = call;
  now.rows = step.rows(group);
  if (phase == 0) {
    shared.store(kernels.attention(now, worker), std::memory_order_relaxed);
  } else if (shared.load(std::memory_order_relaxed)) {
    kernels.join_attention(now, worker);
  }
}

}  // namespace quire
