// Repetition, frequency and presence penalties (sample.h).
#include <algorithm>
#include <vector>

#include "sample.h"

namespace quire {
namespace {

inline float penalized(const PenaltyCall& call, float value, int32_t count) {
  const float repeated = value > 0.0f ? value / call.repetition : value * call.repetition;
  const int32_t in_answer = count & (call.in_prompt - 1);
  const float taken = call.frequency * static_cast<float>(in_answer) + (in_answer > 0 ? call.presence : 0.0f);
  return (count > 0 ? repeated : value) - taken;
}

}  // namespace

void penalize_row(const PenaltyCall& call) {
  struct Drafted {
    int64_t token;
    float value;
  };
  std::vector<Drafted> drafted;  // computed before the logits are changed
  for (int64_t nth = 0; nth < call.num_more; nth++) {
    const int64_t token = call.more[nth];
    if (token < 0) continue;
    const auto more = static_cast<int32_t>(std::count(call.more, call.more + call.num_more, token));
    drafted.push_back({token, penalized(call, call.logits[token], call.counts[token] + more)});
  }
  for (int64_t id = 0; id < call.size; id++) call.logits[id] = penalized(call, call.logits[id], call.counts[id]);
  for (const Drafted& each : drafted) call.logits[each.token] = each.value;
}

}  // namespace quire
