// The functions of one instruction set, in the order of KernelTable, and all that no other isa_*.inl compiles.
#pragma once

#include "kernels.h"
#include "simd.h"

#include "quantize.inl"

#include "matmul.inl"

#include "elementwise.inl"
#include "experts.inl"
#include "kv_store.inl"
#include "logits.inl"
#include "sample.inl"

namespace quire {
namespace QUIRE_BASE {  // of the set with the same vectors: isa_attention.inl uses no dot products of codes

bool attention(const AttentionCall& call, Worker& worker);
void join_attention(const AttentionCall& call, Worker& worker);

}  // namespace QUIRE_BASE

namespace QUIRE_ISA {

const KernelTable& kernels() {
  static const KernelTable table = {QUIRE_ISA_NAME,
                                    kRowGrain,
                                    matmul,
                                    quantize,
                                    norm,
                                    rope,
                                    activate_rows,
                                    add_rows,
                                    store_kv,
                                    QUIRE_BASE::attention,
                                    QUIRE_BASE::join_attention,
                                    route,
                                    gather,
                                    matmul_part,
                                    join_experts,
                                    {find_largest, count_from, count_same, collect_from, sum_exp, rough_sums,
                                     draw, draw_candidates, ban},
                                    {apply_bitmask, softcap}};
  return table;
}

}  // namespace QUIRE_ISA
}  // namespace quire
