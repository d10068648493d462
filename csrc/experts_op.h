// The ops of a program that multiply rows with many small matrices: a mixture of experts, and a matrix for each head.
// `kernels/reference_experts.py` and `kernels/reference_latent.py` define the results.
//
// The phases of a mixture: tokens are sorted by expert; their rows are copied side by side; the gated products are computed, expert
// after expert; they are put into the order of the next matrices, if these have one, and rounded to int8, if the
// products did not do it; the products back; each token's outputs are added.
#pragma once

#include <cstdint>
#include <vector>

#include "program.h"

namespace quire {

struct RouteOp : Op {
  RouteCall call;

  const char* kind() const override { return "route"; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const override;
};

struct ExpertsOp : Op {
  ExpertsCall call;
  int num_experts;
  MatmulCall inner, outer;  // with the panels, biases and outputs of all experts; `outer.following` is the next op's

  const char* kind() const override { return "experts"; }
  int phases() const override { return prepares_inner() ? 6 : 5; }
  bool by_rows() const override { return false; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const override;

 private:
  void sort_pairs(int64_t num_tokens) const;
  Buckets buckets() const;
  MatmulCall product(const MatmulCall& all, const Bucket& bucket) const;
  bool prepares_inner() const { return call.inner_orders || (outer.x.quantized.data && !inner.gated.data); }
  void prepare_inner(const KernelTable& kernels, Worker& worker) const;
  void order_inner(const Worker& worker) const;
  void multiply_inner(const KernelTable& kernels, Worker& worker) const;
  void multiply_outer(const KernelTable& kernels, int64_t num_tokens, Worker& worker) const;

  // Set in the first phase of a run.
  mutable std::vector<Bucket> list_;
  mutable std::vector<int32_t> tokens_, positions_;
};

// y[t][h] = x[t][h] W_h^T, where `rest` more values of each head are copied behind the products.
struct HeadLinearOp : Op {
  MatmulCall call;  // with the panels of all heads; x and y are those of the first head
  int heads;
  int64_t x_head, y_head;  // values from one head to the next
  int64_t rest;

  const char* kind() const override { return "head linear"; }
  int phases() const override { return 2; }
  bool by_rows() const override { return false; }
  void run(const KernelTable& kernels, const Step& step, Worker& worker, int phase) const override;

 private:
  void prepare(const KernelTable& kernels, int64_t num_tokens, Worker& worker) const;
  MatmulCall product(int64_t num_tokens, int head) const;
};

}  // namespace quire
