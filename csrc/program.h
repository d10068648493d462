// A model as a list of ops over fixed buffers, recorded once and run every step: one call from Python, one team of
// threads that walks the list together. Ops know the buffers; what differs from step to step is in a Step.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

namespace quire {

// One cache group's tables and slots in a step.
struct StepGroup {
  const int32_t* tables;
  int64_t table_stride;
  const int64_t* slots;
};

struct Step {
  int num_tokens, num_rows;
  const int64_t* tokens;
  const int64_t* positions;
  const int32_t* query_starts;
  const int32_t* seq_lens;
  std::vector<StepGroup> groups;
  const uint8_t* ancestors;
  int64_t ancestors_stride;

  Rows rows(int group) const;
};

class Op {
 public:
  virtual ~Op() = default;
  virtual const char* kind() const = 0;
  // Called by all threads of a team; they meet at a barrier after it.
  virtual void run(const KernelTable& kernels, const Step& step, Worker& worker) const = 0;
};

struct MatmulOp;

class Program {
 public:
  explicit Program(const KernelTable& kernels) : kernels_(kernels) {}
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void add(std::unique_ptr<Op> op) { ops_.push_back(std::move(op)); }
  void add_product(std::unique_ptr<MatmulOp> op);  // the product before it will know what follows
  void run(int threads, const Step& step) const;

  // The same, and the nanoseconds that each op took are added to `times`, one for each op.
  void run_timed(int threads, const Step& step, std::vector<int64_t>& times) const;
  const std::vector<std::unique_ptr<Op>>& ops() const { return ops_; }

 private:
  const KernelTable& kernels_;
  std::vector<std::unique_ptr<Op>> ops_;
  MatmulOp* last_product_ = nullptr;
};

// The ops. Numbers that depend on the step (rows, positions, tables) are filled in when they run.

struct EmbedOp : Op {
  Panels weight;
  float scale;
  float* out;
  int64_t out_stride;

  const char* kind() const override { return "embed"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker) const override;
};

struct NormOp : Op {
  NormCall call;

  const char* kind() const override { return "norm"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker) const override;
};

struct MatmulOp : Op {
  MatmulCall call;
  bool quantize;  // x's values into x's codes first

  const char* kind() const override { return call.activation == Activation::NONE ? "matmul" : "gated matmul"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker) const override;
};

struct RopeOp : Op {
  RopeCall call;

  const char* kind() const override { return "rope"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker) const override;
};

struct GateOp : Op {
  GateCall call;

  const char* kind() const override { return "gate"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker) const override;
};

struct StoreOp : Op {
  Cache cache;
  int group;
  const float* k;
  const float* v;
  int64_t k_stride, v_stride;

  const char* kind() const override { return "store"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker) const override;
};

struct AttentionOp : Op {
  AttentionCall call;
  int group;

  const char* kind() const override { return "attention"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker) const override;
};

}  // namespace quire
