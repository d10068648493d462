// The functions that `quire quantize` calls. Sizes that would read or write out of bounds are refused. Addresses are not
// checked.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <string>

#include "bindings.h"
#include "dequantize.h"
#include "error_feedback.h"
#include "fit_groups.h"
#include "quantize_blocks.h"

namespace nb = nanobind;

namespace quire {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 30;

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

void check_type(int ggml_type) {
  if (!can_quantize(ggml_type)) refuse("blocks of GGUF type " + std::to_string(ggml_type) + " cannot be made.");
}

int64_t count_blocks(int ggml_type, int64_t rows, int64_t cols) {
  check_type(ggml_type);
  const int64_t values = block_size_of(ggml_type).values;
  if (rows < 0 || cols < 1 || rows > kMaxSize || cols > kMaxSize || cols % values != 0) {
    refuse(std::to_string(rows) + " rows and " + std::to_string(cols) + " columns cannot be quantized: columns come " +
           "in blocks of " + std::to_string(values) + ".");
  }
  return rows * (cols / values);
}

const float* reads(Address address) { return reinterpret_cast<const float*>(address); }
float* writes(Address address) { return reinterpret_cast<float*>(address); }

void quantize(int ggml_type, Address values, int64_t rows, int64_t cols, Address importance, Address out) {
  count_blocks(ggml_type, rows, cols);
  quantize_blocks(ggml_type, reads(values), rows, cols, reads(importance), reinterpret_cast<uint8_t*>(out));
}

void grids(int ggml_type, Address blocks, int64_t rows, int64_t cols, Address scales, Address bases) {
  const int64_t count = count_blocks(ggml_type, rows, cols);
  read_grids(ggml_type, reinterpret_cast<const uint8_t*>(blocks), count, writes(scales), writes(bases));
}

void codes(int ggml_type, Address blocks, int64_t rows, int64_t cols, Address values) {
  const int64_t count = count_blocks(ggml_type, rows, cols);
  write_codes(ggml_type, reinterpret_cast<uint8_t*>(blocks), count, reads(values));
}

std::pair<float, float> limits(int ggml_type) {
  check_type(ggml_type);
  std::pair<float, float> found;
  code_limits(ggml_type, &found.first, &found.second);
  return found;
}

void groups(Address values, int64_t rows, int64_t cols, int64_t group, Address importance, int low, int high,
            Address scales, Address zeros) {
  if (!can_fit_groups(group) || rows < 0 || cols < 1 || rows > kMaxSize || cols > kMaxSize || cols % group != 0) {
    refuse("groups of " + std::to_string(group) + " of " + std::to_string(cols) + " columns cannot be fitted.");
  }
  fit_groups({reads(values), rows, cols, group, reads(importance), low, high, zeros != 0, writes(scales),
              writes(zeros)});
}

void feed_back(int64_t rows, int64_t cols, int64_t stride, Address values, Address scales, Address bases, float low,
               float high, View factor, Address codes_out, Address errors) {
  if (rows < 0 || cols < 1 || cols > stride || rows > kMaxSize || stride > kMaxSize || factor.second < cols) {
    refuse(std::to_string(cols) + " columns of rows of " + std::to_string(stride) + " cannot be quantized.");
  }
  quantize_with_feedback({rows, cols, stride, writes(values), reads(scales), reads(bases), low, high,
                          floats(factor), factor.second, writes(codes_out), writes(errors)});
}

}  // namespace

void bind_quantize(nb::module_& module) {
  using Released = nb::call_guard<ReleasedGil>;
  module.def("quantize_blocks", quantize, nb::arg("ggml_type"), nb::arg("values"), nb::arg("rows"), nb::arg("cols"),
             nb::arg("importance"), nb::arg("out"), Released());
  module.def("block_grids", grids, nb::arg("ggml_type"), nb::arg("blocks"), nb::arg("rows"), nb::arg("cols"),
             nb::arg("scales"), nb::arg("bases"), Released());
  module.def("write_block_codes", codes, nb::arg("ggml_type"), nb::arg("blocks"), nb::arg("rows"), nb::arg("cols"),
             nb::arg("codes"), Released());
  module.def("block_code_limits", limits, nb::arg("ggml_type"));
  module.def("fit_groups", groups, nb::arg("values"), nb::arg("rows"), nb::arg("cols"), nb::arg("group"),
             nb::arg("importance"), nb::arg("low"), nb::arg("high"), nb::arg("scales"), nb::arg("zeros"), Released());
  module.def("quantize_with_feedback", feed_back, nb::arg("rows"), nb::arg("cols"), nb::arg("stride"),
             nb::arg("values"), nb::arg("scales"), nb::arg("bases"), nb::arg("low"), nb::arg("high"),
             nb::arg("factor"), nb::arg("codes"), nb::arg("errors"), Released());
}

}  // namespace quire
