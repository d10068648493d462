#include "tune.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <vector>

namespace quire {

namespace {

constexpr int64_t kOutputs = 64, kCols = 1024;
constexpr int kRepeats = 4;

struct Product {
  const KernelTable& kernels;
  MatmulCall call;
};

void multiply(void* argument, Worker worker) {
  const Product& product = *static_cast<Product*>(argument);
  product.kernels.matmul(product.call, worker);
}

int64_t nanoseconds(Product& product) {
  using namespace std::chrono;
  const auto begin = steady_clock::now();
  run_team(1, multiply, &product);
  return duration_cast<std::chrono::nanoseconds>(steady_clock::now() - begin).count();
}

}  // namespace

int64_t time_product(const KernelTable& kernels, Format format, int64_t rows, bool in_registers) {
  Panels weight{format, kOutputs, kCols, nullptr};
  // All bytes are 0x2c: as float16 that is a small number. Activations are zero.
  std::vector<uint8_t> panels(static_cast<size_t>(weight.nbytes()) + 64, 0x2c);
  std::vector<uint8_t> records(static_cast<size_t>((rows + kSpareRows) * Activations::row_bytes(kCols)));
  std::vector<float> outputs(static_cast<size_t>(rows * kOutputs));
  weight.data = panels.data() + (64 - reinterpret_cast<uintptr_t>(panels.data()) % 64);
  Product product{kernels, {}};
  product.call.weight = weight;
  product.call.x.quantized = {records.data(), kCols, false};
  product.call.rows = rows;
  product.call.y = outputs.data();
  product.call.y_stride = kOutputs;
  product.call.few_rows = in_registers ? rows : 0;
  int64_t best = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < kRepeats; i++) best = std::min(best, nanoseconds(product));
  return best;
}

}  // namespace quire
