// Implements fit_groups.h with the searches of block_fit.h.
#include "fit_groups.h"

#include <cstring>

#include "block_fit.h"

namespace quire {
namespace {

using fit::Run;

template <int N>
void fit_with_zero(Run<N>& run, int high, float* scale, float* zero) {
  const auto top = static_cast<float>(high);
  fit::Grid grid = fit_affine(run, top, false);
  if (std::fabs(grid.scale) < fit::kTiny) grid.scale = std::fabs(grid.base);  // all values are alike: codes 0 and 1
  const float wanted = grid.scale != 0 ? -grid.base / grid.scale : 0.0f;
  *zero = std::nearbyint(std::min(std::max(wanted, 0.0f), top));
  const fit::Limits limits = {-*zero, top - *zero};
  assign(run, fit::inverse_of(grid.scale), 0.0f, limits);
  const fit::Found found = refine(run, best_scale(sums_of(run)), limits, fit::best_scale);
  *scale = found.grid.scale != 0 ? found.grid.scale : grid.scale;
}

template <int N>
void fit_all(const Groups& groups) {
  const int64_t per_row = groups.cols / N;
  Run<N> run;
  for (int i = 0; i < run.parts; i++) run.w[i] = fit::spread(1.0f);
  for (int64_t nth = 0; nth < groups.rows * per_row; nth++) {
    std::memcpy(run.x, groups.values + nth * N, sizeof(run.x));
    if (groups.importance) std::memcpy(run.w, groups.importance + nth % per_row * N, sizeof(run.w));
    if (groups.has_zeros) {
      fit_with_zero(run, groups.high, groups.scales + nth, groups.zeros + nth);
    } else {
      groups.scales[nth] = fit_scale(run, {static_cast<float>(groups.low), static_cast<float>(groups.high)});
    }
  }
}

}  // namespace

bool can_fit_groups(int64_t group) { return group == 32 || group == 64 || group == 128; }

void fit_groups(const Groups& groups) {
  switch (groups.group) {
    case 32: return fit_all<32>(groups);
    case 64: return fit_all<64>(groups);
    default: return fit_all<128>(groups);
  }
}

}  // namespace quire
