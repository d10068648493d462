// A model as a list of ops over fixed buffers. It is recorded once and run in every step by one call from Python. A
// team of threads executes the list together. Ops hold the buffers. A Step holds what differs between steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "ranks.h"

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
  const int32_t* paths;
  int64_t path_stride;

  Rows rows(int group) const;
};

class Op {
 public:
  virtual ~Op() = default;
  virtual const char* kind() const = 0;
  // Computes the worker's part of one phase. A phase begins when all parts of the phase before it are done.
  virtual void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const = 0;
  virtual int phases() const { return 1; }
  // Whether a row's result depends on no other row.
  virtual bool by_rows() const { return true; }
};

// The stages of a program in one run. A stage begins when the one before it has ended. Each has the same number of
// parts, at least one for each thread of the team. A thread that has finished its own parts takes parts that no thread
// has begun. So the team does not wait for a thread that has lost its core: that thread continues at the stage that the
// others have reached.
class Walk {
 public:
  void begin(size_t stages, int parts);

  // `run(stage, worker)` computes the part with the worker's index.
  template <class F>
  void take_part(const Worker& worker, F run);

 private:
  struct Stage {
    alignas(64) std::atomic<int> done{0};
  };
  bool claim(uint32_t stage, int part);

  int parts_ = 1;
  uint32_t count_ = 0;
  std::vector<Stage> stages_;
  std::vector<std::atomic<bool>> claimed_;  // [stages][parts]
  Signal ended_;                            // number of stages that have ended
};

struct MatmulOp;
struct ExpertsOp;

class Program {
 public:
  explicit Program(const KernelTable& kernels) : kernels_(kernels) {}
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void add(std::unique_ptr<Op> op);
  void add_product(std::unique_ptr<MatmulOp> op);  // sets `following` of the product, or of the experts, before it
  void add_experts(std::unique_ptr<ExpertsOp> op);
  void run(int threads, const Step& step) const;

  // As `run`. Adds the nanoseconds of each op to `times`, which has one entry for each op.
  void run_timed(int threads, const Step& step, std::vector<int64_t>& times) const;
  const std::vector<std::unique_ptr<Op>>& ops() const { return ops_; }

 private:
  struct Place {
    size_t op;
    int phase;
  };
  struct Stage {
    size_t first, last;  // of places
  };
  struct Run;
  void run(int threads, const Step& step, std::vector<int64_t>* times) const;
  static void walk(void* run, Worker worker);

  // With few rows, each phase is a stage. With many, phases that compute each row on its own are one stage between two
  // ops that do not: a thread takes some rows through all of them, and they stay in its core's cache.
  const KernelTable& kernels_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<Place> places_;  // one for each phase
  std::vector<Stage> phases_, stretches_;
  mutable Walk walk_;
  MatmulCall* last_product_ = nullptr;
};

// The ops. Values that depend on the step (rows, positions, tables) are set when an op runs.

struct EmbedOp : Op {
  Panels weight;
  int64_t first;     // of the matrix's rows, among those of all ranks; tokens of other ranks' rows are skipped
  bool by_position;  // rows are selected by the tokens' positions, not by their ids
  float scale;
  float* out;
  int64_t out_stride;

  const char* kind() const override { return "embed"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const override;
};

// Waits for the other ranks. After it, each sees what all wrote before it.
struct MeetOp : Op {
  Ranks* ranks;

  const char* kind() const override { return "meet"; }
  bool by_rows() const override { return false; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const override;
};

struct NormOp : Op {
  NormCall call;

  const char* kind() const override { return "norm"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const override;
};

struct MatmulOp : Op {
  MatmulCall call;
  bool quantize;  // quantize x first

  const char* kind() const override { return call.activation == Activation::NONE ? "matmul" : "gated matmul"; }
  int phases() const override { return quantize ? 2 : 1; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const override;
};

// Rounds x to int8.
struct RoundOp : Op {
  const float* x;
  int64_t x_stride;
  Activations out;

  const char* kind() const override { return "round"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const override;
};

struct RopeOp : Op {
  RopeCall call;

  const char* kind() const override { return "rope"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const override;
};

struct ActivateOp : Op {
  ActivateCall call;

  const char* kind() const override { return call.gated ? "gate" : "activate"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const override;
};

struct AddOp : Op {
  AddCall call;

  const char* kind() const override { return call.multiplies ? "multiply" : "add"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const override;
};

// y[i] = x[order[i]]: the order of inputs that a quantized matrix has.
struct GatherOp : Op {
  const float* x;
  int64_t x_stride;
  float* y;
  int64_t y_stride, size;
  const int64_t* order;

  const char* kind() const override { return "gather"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const override;
};

struct StoreOp : Op {
  Cache cache;
  int group;
  const float* k;
  const float* v;
  int64_t k_stride, v_stride;

  const char* kind() const override { return "store"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const override;
};

struct AttentionOp : Op {
  AttentionCall call;
  int group;
  mutable std::atomic<bool> shared{false};  // all parts of the first phase set the same value

  const char* kind() const override { return "attention"; }
  int phases() const override { return 2; }
  bool by_rows() const override { return false; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const override;
};

}  // namespace quire
