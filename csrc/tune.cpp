#include "tune.h"

#include <chrono>
#include <cstring>
#include <limits>
#include <vector>

namespace quire {

namespace {

constexpr int64_t kOutputs = 64, kCols = 1024, kMaxRows = 256;
constexpr int kRepeats = 4;
constexpr uint16_t kHalf = 0x2c00;  // 1/16 in float16

// A 4-bit matrix and activations that stay in the cache, so that only computation is measured.
class Trial {
 public:
  explicit Trial(const KernelTable& kernels) : kernels_(kernels), outputs_(kMaxRows * kOutputs) {
    Panels weight{{Codes::U4, Scales::DM, 0}, kOutputs, kCols, nullptr};
    panels_.resize(static_cast<size_t>(weight.nbytes()) + 64, 0x5a);
    records_.resize(static_cast<size_t>((kMaxRows + kSpareRows) * Activations::row_bytes(kCols)));
    weight.data = panels_.data() + (64 - reinterpret_cast<uintptr_t>(panels_.data()) % 64);
    for (int64_t panel = 0; panel < weight.count(); panel++) {
      for (int64_t at = 0; at < weight.scale_bytes(); at += 2) std::memcpy(weight.scales(panel) + at, &kHalf, 2);
    }
    call_ = {};
    call_.weight = weight;
    call_.x.quantized = {records_.data(), kCols, false};
    call_.y = outputs_.data();
    call_.y_stride = kOutputs;
  }

  // The shortest of some runs, in nanoseconds.
  int64_t measure(int64_t rows, bool in_registers) {
    call_.rows = rows;
    call_.few_rows = in_registers ? rows : 0;
    int64_t best = std::numeric_limits<int64_t>::max();
    for (int i = 0; i < kRepeats; i++) {
      using namespace std::chrono;
      const auto begin = steady_clock::now();
      run_team(1, run, this);
      const int64_t taken = duration_cast<nanoseconds>(steady_clock::now() - begin).count();
      best = taken < best ? taken : best;
    }
    return best;
  }

 private:
  static void run(void* argument, Worker worker) {
    const Trial& trial = *static_cast<Trial*>(argument);
    trial.kernels_.matmul(trial.call_, worker);
  }

  const KernelTable& kernels_;
  std::vector<uint8_t> panels_, records_;
  std::vector<float> outputs_;
  MatmulCall call_;
};

}  // namespace

// The more rows share unpacked codes, the more it pays to store them. On some machines it never does.
int64_t measure_few_rows(const KernelTable& kernels) {
  Trial trial(kernels);
  for (int64_t rows = 32; rows <= kMaxRows; rows *= 2) {
    if (trial.measure(rows, false) < trial.measure(rows, true)) return rows - 1;
  }
  return std::numeric_limits<int64_t>::max();
}

}  // namespace quire
