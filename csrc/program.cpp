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

int64_t nanoseconds() {
  using namespace std::chrono;
  return duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void Walk::begin(size_t phases, int parts) {
  const size_t num_parts = phases * static_cast<size_t>(parts);
  if (phases_.size() != phases) phases_ = std::vector<Phase>(phases);
  if (claimed_.size() != num_parts) claimed_ = std::vector<std::atomic<bool>>(num_parts);
  for (Phase& phase : phases_) phase.done.store(0, std::memory_order_relaxed);
  for (auto& part : claimed_) part.store(false, std::memory_order_relaxed);
  parts_ = parts;
  count_ = static_cast<uint32_t>(phases);
  ended_.set(0);
}

bool Walk::claim(uint32_t phase, int part) {
  std::atomic<bool>& flag = claimed_[phase * static_cast<size_t>(parts_) + static_cast<size_t>(part)];
  return !flag.load(std::memory_order_relaxed) && !flag.exchange(true, std::memory_order_relaxed);
}

template <class F>
void Walk::take_part(const Worker& worker, F run) {
  for (uint32_t phase = ended_.value(); phase < count_; phase = ended_.value()) {
    for (int i = 0; i < parts_; i++) {
      const int part = (worker.index + i) % parts_;
      if (!claim(phase, part)) continue;
      Worker as{worker.team, part};
      run(phase, as);
      if (phases_[phase].done.fetch_add(1, std::memory_order_acq_rel) + 1 < parts_) continue;
      ended_.set(phase + 1);
      ended_.wake();
    }
    worker.team.wait_while(ended_, phase);
  }
}

struct Program::Run {
  const Program& program;
  const Step& step;
  std::vector<int64_t>* times;
};

void Program::walk(void* argument, Worker worker) {
  const Run& run = *static_cast<const Run*>(argument);
  const Program& program = run.program;
  program.walk_.take_part(worker, [&](uint32_t phase, Worker& part) {
    const Place& place = program.places_[phase];
    const int64_t begin = run.times && part.index == 0 ? nanoseconds() : 0;
    program.ops_[place.op]->run(program.kernels_, run.step, part, place.phase);
    if (begin) (*run.times)[place.op] += nanoseconds() - begin;
  });
}

void Program::add(std::unique_ptr<Op> op) {
  for (int phase = 0; phase < op->phases(); phase++) places_.push_back({ops_.size(), phase});
  ops_.push_back(std::move(op));
}

void Program::add_product(std::unique_ptr<MatmulOp> op) {
  if (last_product_) last_product_->call.following = &op->call;
  last_product_ = op.get();
  add(std::move(op));
}

void Program::run(int threads, const Step& step) const {
  Run run{*this, step, nullptr};
  walk_.begin(places_.size(), threads);
  run_team(threads, walk, &run);
}

void Program::run_timed(int threads, const Step& step, std::vector<int64_t>& times) const {
  times.resize(ops_.size());
  Run run{*this, step, &times};
  walk_.begin(places_.size(), threads);
  run_team(threads, walk, &run);
}

void EmbedOp::run(const KernelTable&, const Step& step, Worker& worker, int) const {
  const Span tokens = share(worker, step.num_tokens);
  const int64_t* rows = by_position ? step.positions : step.tokens;
  for (int64_t token = tokens.first; token < tokens.last; token++) {
    float* row = out + token * out_stride;
    unpack_row(weight, rows[token], row);
    if (scale != 1.0f) {
      for (int64_t i = 0; i < weight.cols; i++) row[i] *= scale;
    }
  }
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
