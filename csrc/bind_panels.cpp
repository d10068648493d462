// The Python class `Panels`: a matrix in panels, filled from memory at an address that Python passes. Sizes that would
// read or write out of bounds are refused. Addresses are not checked. `dequantize` is for tensors that have no panels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings.h"
#include "dequantize.h"
#include "pack.h"
#include "panel_store.h"
#include "tables.h"
#include "tune.h"

namespace nb = nanobind;

namespace quire {
namespace {

// Names of formats with groups: a kind, then "-g" and the columns of a group, or "-row" for one scale a row.
struct GroupKind {
  const char* name;
  Codes codes;
  Scales scales;
  int offset;
  const CodeTable* table;
};

constexpr GroupKind kGroupKinds[] = {
    {"int4", Codes::U4, Scales::GROUP, 8, nullptr},    {"int8", Codes::U8, Scales::GROUP, 128, nullptr},
    {"int2z", Codes::U2, Scales::GROUP_Z, 0, nullptr}, {"int3z", Codes::U3, Scales::GROUP_Z, 0, nullptr},
    {"int4z", Codes::U4, Scales::GROUP_Z, 0, nullptr}, {"int8z", Codes::U8, Scales::GROUP_Z, 0, nullptr},
    {"mxfp4x2", Codes::T4, Scales::GROUP, 0, &kDoubledE2M1},
    {"mxfp4", Codes::T4, Scales::GROUP, 0, &kE2M1},    {"iq4", Codes::T4, Scales::GROUP, 0, &kIQ4},
    {"nf4", Codes::T4, Scales::GROUP, 0, &kNF4},       {"fp4", Codes::T4, Scales::GROUP, 0, &kFP4},
    {"nvfp4", Codes::T4, Scales::HALVES, 0, &kE2M1},   {"fp8", Codes::F8, Scales::GROUP, 0, nullptr},
};

struct NamedFormat {
  const char* name;
  Format format;
};

constexpr NamedFormat kFormats[] = {
    {"q4_0", {Codes::U4, Scales::D, 8}},         {"q4_1", {Codes::U4, Scales::DM, 0}},
    {"q5_0", {Codes::U5, Scales::D, 16}},        {"q5_1", {Codes::U5, Scales::DM, 0}},
    {"q8_0", {Codes::U8, Scales::D, 128}},       {"q4_k", {Codes::U4, Scales::SUPER_DM, 0}},
    {"q5_k", {Codes::U5, Scales::SUPER_DM, 0}},  {"q6_k", {Codes::U6, Scales::SUPER_D16, 32}},
    {"f32", {Codes::F32, Scales::NONE, 0}},      {"bf16", {Codes::BF16, Scales::NONE, 0}},
    {"f16", {Codes::F16, Scales::NONE, 0}},
};

// Larger than any model needs, and small enough that no product of sizes overflows.
constexpr int64_t kMaxSize = int64_t{1} << 30;

[[noreturn]] void refuse_value(const std::string& message) { throw nb::value_error(message.c_str()); }

[[noreturn]] void refuse_index(const std::string& message) { throw nb::index_error(message.c_str()); }

std::string join_names() {
  std::string names;
  for (const NamedFormat& entry : kFormats) names += (names.empty() ? "" : ", ") + std::string(entry.name);
  for (const GroupKind& kind : kGroupKinds) names += ", " + std::string(kind.name) + "-g32";
  return names;
}

// The shift of "-g<columns>" or "-row", or -1.
int parse_group(const std::string& suffix) {
  if (suffix == "-row") return kWholeRow;
  for (int shift = 0; shift < 16; ++shift) {
    if (suffix == "-g" + std::to_string(kBlock << shift)) return shift;
  }
  return -1;
}

bool parse_grouped(const std::string& name, Format* format) {
  const size_t dash = name.find('-');
  if (dash == std::string::npos) return false;
  for (const GroupKind& kind : kGroupKinds) {
    if (name.substr(0, dash) != kind.name) continue;
    const bool halves = kind.scales == Scales::HALVES;
    const int shift = halves ? (name.substr(dash) == "-g16" ? 0 : -1) : parse_group(name.substr(dash));
    *format = {kind.codes, kind.scales, kind.offset, kind.table, shift};
    return shift >= 0;
  }
  return false;
}

Format parse_format(const std::string& name) {
  for (const NamedFormat& entry : kFormats) {
    if (name == entry.name) return entry.format;
  }
  Format format;
  if (parse_grouped(name, &format)) return format;
  refuse_value("there is no panel format '" + name + "'; it is one of " + join_names() + ".");
}

std::string name_of(const Format& format) {
  for (const NamedFormat& entry : kFormats) {
    if (format == entry.format) return entry.name;
  }
  for (const GroupKind& kind : kGroupKinds) {
    if (!(format == Format{kind.codes, kind.scales, kind.offset, kind.table, format.shift})) continue;
    if (format.shift == kWholeRow) return std::string(kind.name) + "-row";
    return kind.name + ("-g" + std::to_string(kind.scales == Scales::HALVES ? kBlock / 2 : kBlock << format.shift));
  }
  return "";
}

int64_t block_of(const Format& format) {
  if (!format.quantized()) return 1;
  return format.scales == Scales::SUPER_DM || format.scales == Scales::SUPER_D16 ? kSuper * kBlock : kBlock;
}

void check_shape(const Format& format, int64_t rows, int64_t cols) {
  const std::string shape = "a matrix of " + std::to_string(rows) + " rows and " + std::to_string(cols) + " columns";
  if (rows < 1 || cols < 1 || rows > kMaxSize || cols > kMaxSize) {
    refuse_value(shape + " cannot be packed: both must be from 1 to " + std::to_string(kMaxSize) + ".");
  }
  if (cols % block_of(format) != 0) {
    refuse_value(shape + " cannot be packed as " + name_of(format) + ": columns come in blocks of " +
                 std::to_string(block_of(format)) + ".");
  }
}

void construct(PanelStore* self, const std::string& name, int64_t rows, int64_t cols) {
  Format format = parse_format(name);
  check_shape(format, rows, cols);
  new (self) PanelStore(format, rows, cols);
}

void check_rows(const Panels& panels, int64_t first, int64_t count) {
  const std::string range = "rows " + std::to_string(first) + " to " + std::to_string(first) + " + " +
                            std::to_string(count);
  if (first < 0 || count < 0 || first > panels.rows || count > panels.rows - first) {
    refuse_index(range + " are not all among the " + std::to_string(panels.rows) + " of the matrix.");
  }
  if (first % kLanes != 0 || (count % kLanes != 0 && first + count != panels.rows)) {
    refuse_value(range + " do not fill whole panels: start and count must be multiples of 16, " +
                 "except for a count that reaches the last row.");
  }
}

void check_address(uintptr_t address, int64_t count) {
  if (address == 0 && count > 0) refuse_value("the address is null.");
}

void pack_gguf_rows(PanelStore& self, int ggml_type, uintptr_t address, int64_t first, int64_t count) {
  Format format;
  if (!format_of_gguf(ggml_type, &format) || !(format == self.view.format)) {
    refuse_value("blocks of GGUF type " + std::to_string(ggml_type) + " do not go into panels of " +
                 name_of(self.view.format) + " unchanged.");
  }
  check_rows(self.view, first, count);
  check_address(address, count);
  pack_gguf(self.view, ggml_type, reinterpret_cast<const uint8_t*>(address), first, count);
}

Codes parse_dense(const std::string& name) {
  if (name == "f32") return Codes::F32;
  if (name == "bf16") return Codes::BF16;
  if (name == "f16") return Codes::F16;
  refuse_value("plain rows are f32, bf16 or f16, not '" + name + "'.");
}

void pack_dense_rows(PanelStore& self, const std::string& type, uintptr_t address, int64_t stride, int64_t first,
                     int64_t count) {
  Codes codes = parse_dense(type);
  if (!dense_packable(self.view.format)) {
    refuse_value("plain rows cannot be quantized to " + name_of(self.view.format) +
                 "; q8_0 and q4_1 can be made from them.");
  }
  check_rows(self.view, first, count);
  check_address(address, count);
  if (count > 1 && (stride < self.view.cols || stride > kMaxSize)) {
    refuse_value("rows of " + std::to_string(self.view.cols) + " values cannot lie " + std::to_string(stride) +
                 " values apart.");
  }
  pack_dense(self.view, codes, reinterpret_cast<const void*>(address), stride, first, count);
}

void pack_code_rows(PanelStore& self, int64_t first, int64_t count, Address codes, int code_limit, int64_t group,
                    Address scales, Address zeros, Address levels, Address tables) {
  check_rows(self.view, first, count);
  for (Address needed : {codes, scales, levels}) check_address(needed, count);
  if (code_limit < 1 || code_limit > 256 || group < 1 || group > kMaxSize) {
    refuse_value(std::to_string(code_limit) + " codes and groups of " + std::to_string(group) + " cannot be packed.");
  }
  const CodeRows rows = {reinterpret_cast<const uint8_t*>(codes), self.view.cols, code_limit, group,
                         reinterpret_cast<const float*>(scales), reinterpret_cast<const uint8_t*>(zeros),
                         reinterpret_cast<const float*>(levels), reinterpret_cast<const float*>(tables)};
  const int64_t panel_group = self.view.format.scales == Scales::HALVES ? kBlock / 2
                              : self.view.format.shift == kWholeRow     ? self.view.cols
                                                                        : int64_t{kBlock} << self.view.format.shift;
  const bool fits = rows.groups() == self.view.groups() && (group == panel_group || rows.groups() == 1);
  if (self.view.format.grouped() && (!fits || (self.view.format.scales == Scales::GROUP_Z && zeros == 0))) {
    refuse_value("groups of " + std::to_string(group) + " cannot be packed as " + name_of(self.view.format) + ".");
  }
  pack_codes(self.view, rows, first, count);
}

void unpack_rows(const PanelStore& self, uintptr_t rows_address, int64_t count, uintptr_t out_address) {
  if (count < 0) refuse_value("cannot unpack " + std::to_string(count) + " rows.");
  check_address(rows_address, count);
  check_address(out_address, count);
  const auto* rows = reinterpret_cast<const int64_t*>(rows_address);
  auto* out = reinterpret_cast<float*>(out_address);
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] < 0 || rows[i] >= self.view.rows) {
      refuse_index("row " + std::to_string(rows[i]) + " is not among the " + std::to_string(self.view.rows) +
                   " of the matrix.");
    }
  }
  for (int64_t i = 0; i < count; ++i) unpack_row(self.view, rows[i], out + i * self.view.cols);
}

// Blocks of a GGUF file, [rows, cols], to float32.
void dequantize(int ggml_type, Address address, int64_t rows, int64_t cols, Address out) {
  const BlockSize block = block_size_of(ggml_type);
  const std::string shape = std::to_string(rows) + " rows and " + std::to_string(cols) + " columns";
  if (block.values == 0) refuse_value("blocks of GGUF type " + std::to_string(ggml_type) + " cannot be dequantized.");
  if (rows < 0 || cols < 0 || rows > kMaxSize || cols > kMaxSize || cols % block.values != 0) {
    refuse_value(shape + " cannot be dequantized: columns come in blocks of " + std::to_string(block.values) +
                 ", and both are from 0 to " + std::to_string(kMaxSize) + ".");
  }
  const int64_t count = rows * (cols / block.values);
  check_address(address, count);
  check_address(out, count);
  dequantize_blocks(ggml_type, reinterpret_cast<const uint8_t*>(address), count, reinterpret_cast<float*>(out));
}

}  // namespace

void bind_panels(nb::module_& module) {
  module.def(
      "time_product",
      [](const std::string& isa, const std::string& format, int64_t rows, bool in_registers) {
        return time_product(kernels_named(isa), parse_format(format), rows, in_registers);
      },
      nb::arg("isa"), nb::arg("format"), nb::arg("rows"), nb::arg("in_registers"));
  using Released = nb::call_guard<ReleasedGil>;
  nb::class_<PanelStore>(module, "Panels")
      .def("__init__", construct, nb::arg("format"), nb::arg("rows"), nb::arg("cols"))
      .def_prop_ro("format", [](const PanelStore& self) { return name_of(self.view.format); })
      .def_prop_ro("rows", [](const PanelStore& self) { return self.view.rows; })
      .def_prop_ro("cols", [](const PanelStore& self) { return self.view.cols; })
      .def_prop_ro("nbytes", [](const PanelStore& self) { return self.view.nbytes(); })
      .def_prop_ro("stride", [](const PanelStore& self) { return self.view.stride(); })
      .def_prop_ro("address", [](const PanelStore& self) { return reinterpret_cast<uintptr_t>(self.view.data); })
      .def("pack_gguf", pack_gguf_rows, nb::arg("ggml_type"), nb::arg("address"), nb::arg("first"), nb::arg("count"),
           Released())
      .def("pack_dense", pack_dense_rows, nb::arg("type"), nb::arg("address"), nb::arg("stride"), nb::arg("first"),
           nb::arg("count"), Released())
      .def("pack_codes", pack_code_rows, nb::arg("first"), nb::arg("count"), nb::kw_only(), nb::arg("codes"),
           nb::arg("code_limit"), nb::arg("group"), nb::arg("scales"), nb::arg("zeros"), nb::arg("levels"),
           nb::arg("tables"), Released())
      .def("unpack_rows", unpack_rows, nb::arg("rows_address"), nb::arg("count"), nb::arg("out_address"), Released());
  module.def("dequantize", dequantize, nb::arg("ggml_type"), nb::arg("address"), nb::arg("rows"), nb::arg("cols"),
             nb::arg("out"), Released());
  module.def(
      "arena_use",
      [] {
        ArenaUse use = arena_use();
        return nb::make_tuple(use.regions, use.bytes);
      },
      "Regions of memory that packed matrices take, and the address space of these in bytes.");
}

}  // namespace quire
