// The Python class `Ranks`. Python keeps the shared page mapped for the lifetime of the object.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings.h"
#include "ranks.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace quire {
namespace {

void construct(Ranks* self, uintptr_t page, int rank, int size, bool crowded) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    throw nb::value_error(("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                           " cannot be: there are 1 to " + std::to_string(kMaxRanks) + " ranks.").c_str());
  }
  if (page == 0 || page % kCacheLine != 0) throw nb::value_error("the page is null or not aligned.");
  new (self) Ranks(page, rank, size, crowded);
}

}  // namespace

void bind_ranks(nb::module_& module) {
  using Released = nb::call_guard<ReleasedGil>;
  nb::class_<Ranks>(module, "Ranks")
      .def("__init__", construct, "page"_a, "rank"_a, "size"_a, "crowded"_a)
      .def("meet", &Ranks::meet, Released())
      .def("ring", &Ranks::ring)
      .def("wait_until_done", &Ranks::wait_until_done, Released())
      .def("wait_for_command", &Ranks::wait_for_command, Released())
      .def("report_done", &Ranks::report_done)
      .def("set_broken", &Ranks::set_broken)
      .def_prop_ro("broken", &Ranks::broken);
  module.attr("MAX_RANKS") = kMaxRanks;
  module.attr("RANK_PAGE_BYTES") = sizeof(RankPage);
  module.def("end_with_parent", end_with_parent);
}

}  // namespace quire
