// The functions of one instruction set, in the order of KernelTable. Each isa_*.cpp includes only this file.
#pragma once

#include "kernels.h"
#include "simd.h"

#include "quantize.inl"

#include "matmul.inl"

#include "attention.inl"
#include "elementwise.inl"
#include "experts.inl"
#include "logits.inl"
#include "sample.inl"

namespace quire {
namespace QUIRE_ISA {

const KernelTable& kernels() {
  static const KernelTable table = {QUIRE_ISA_NAME, kRowGrain, matmul,   quantize,  norm,          rope,
                                    activate_rows,  add_rows,  store_kv, attention, join_attention,
                                    route,          gather,    matmul_part, join_experts,
                                    {find_largest, count_from, count_same, collect_from, sum_exp, rough_sums,
                                     draw, draw_candidates, ban},
                                    {apply_bitmask, softcap}};
  return table;
}

}  // namespace QUIRE_ISA
}  // namespace quire
