// Python bindings of drafts from repeated text. Tokens are read from Python sequences, only those that are new since
// the last call. Indexing and proposing release the GIL. Calls for one request or one tenant must not overlap, and a
// request must not occur twice in one call.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "suffix.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace quire {
namespace {

uint32_t read_token(PyObject* object) {
  if (!object) throw nb::python_error();
  const long long token = PyLong_AsLongLong(object);
  if (token == -1 && PyErr_Occurred()) throw nb::python_error();
  if (token < 0 || token > kMaxToken) {
    throw nb::value_error(("There is no token " + std::to_string(token) + ".").c_str());
  }
  return static_cast<uint32_t>(token);
}

uint32_t count_tokens(nb::handle tokens) {
  const Py_ssize_t size = PySequence_Size(tokens.ptr());
  if (size < 0) throw nb::python_error();
  if (size > kMaxToken) throw nb::value_error("A text has fewer than 2^31 tokens.");
  return static_cast<uint32_t>(size);
}

uint32_t read_nth(nb::handle tokens, uint32_t nth) {
  if (PyList_CheckExact(tokens.ptr()) && PyLong_CheckExact(PyList_GET_ITEM(tokens.ptr(), nth))) {
    return read_token(PyList_GET_ITEM(tokens.ptr(), nth));
  }
  return read_token(nb::steal(PySequence_GetItem(tokens.ptr(), nth)).ptr());
}

std::vector<uint32_t> read_tokens(nb::handle tokens, uint32_t from) {
  const uint32_t size = count_tokens(tokens);
  std::vector<uint32_t> read;
  read.reserve(size - from);
  for (uint32_t nth = from; nth < size; nth++) read.push_back(read_nth(tokens, nth));
  return read;
}

// The tokens that `request` does not have yet. If the text is not a continuation of what it has, `request` is cleared.
std::vector<uint32_t> read_new(RequestText& request, nb::handle tokens) {
  const uint32_t size = request.size(), new_size = count_tokens(tokens);
  const bool continues = size == 0 || (new_size >= size && read_nth(tokens, size - 1) == request.token(size - 1));
  if (!continues) request.clear();
  return read_tokens(tokens, request.size());
}

// What one request needs in a call of `propose`, and what it gets.
struct Row {
  RequestText* request;
  const TenantText* tenant;
  std::vector<uint32_t> tokens;
  uint32_t max_drafts;
  DraftTree drafts;
};

nb::object to_python(const DraftTree& drafts) {
  if (drafts.tokens.empty()) return nb::none();
  nb::list tokens, odds;
  for (const uint32_t token : drafts.tokens) tokens.append(token);
  for (const float each : drafts.odds) odds.append(each);
  if (drafts.is_chain) return nb::make_tuple(tokens, nb::none(), odds);
  nb::list parents;
  for (const int32_t parent : drafts.parents) parents.append(parent);
  return nb::make_tuple(tokens, parents, odds);
}

// For each request (tokens, parents, odds), or None. `parents` is None for a chain. An entry of `tenants` may be None.
nb::list propose(nb::list requests, nb::list tenants, nb::list tokens, nb::list max_drafts, bool only_chains) {
  const size_t count = requests.size();
  if (tenants.size() != count || tokens.size() != count || max_drafts.size() != count) {
    throw nb::value_error("propose needs a tenant, tokens and a number of drafts for each request.");
  }
  std::vector<Row> rows(count);
  for (size_t nth = 0; nth < count; nth++) {
    Row& row = rows[nth];
    row.request = nb::cast<RequestText*>(requests[nth]);
    row.tenant = tenants[nth].is_none() ? nullptr : nb::cast<TenantText*>(tenants[nth]);
    row.max_drafts = static_cast<uint32_t>(std::max<int64_t>(0, nb::cast<int64_t>(max_drafts[nth])));
    row.tokens = read_new(*row.request, tokens[nth]);
  }
  {
    const ReleasedGil released;
    for (Row& row : rows) {
      row.request->append(row.tokens.data(), static_cast<uint32_t>(row.tokens.size()));
      row.request->propose(row.tenant, row.max_drafts, only_chains, row.drafts);
    }
  }
  nb::list proposed;
  for (const Row& row : rows) proposed.append(to_python(row.drafts));
  return proposed;
}

void make_request(RequestText* request, uint64_t owner, nb::handle prediction, uint32_t num_prompt) {
  new (request) RequestText(owner, read_tokens(prediction, 0), num_prompt);
}

// Indexes what is new of a request's tokens and appends the new part of its answer to the tenant's text.
void publish(RequestText& request, TenantText& tenant, nb::handle tokens) {
  const std::vector<uint32_t> read = read_new(request, tokens);
  const ReleasedGil released;
  request.append(read.data(), static_cast<uint32_t>(read.size()));
  request.publish(tenant);
}

// For tests: (token that follows, length) of each place where the request's last tokens occur, in its own text or in a
// tenant's.
nb::list find_occurrences(const RequestText& request, const TenantText* tenant, uint32_t max_found) {
  std::vector<Occurrence> found;
  const SuffixIndex& index = tenant ? tenant->index() : request.index();
  if (tenant) tenant->find(request.owner(), request.index().tail(), max_found, found);
  else request.index().find_own(max_found, found);
  nb::list occurrences;
  for (const Occurrence& each : found) {
    const bool is_end = each.next == index.end() || index.token(each.next) == kSeparator;
    occurrences.append(nb::make_tuple(is_end ? nb::none() : nb::object(nb::int_(index.token(each.next))), each.length));
  }
  return occurrences;
}

}  // namespace

void bind_suffix(nb::module_& module) {
  nb::class_<TenantText>(module, "TenantText")
      .def(nb::init<uint32_t>(), "limit"_a)
      .def("__len__", [](const TenantText& text) { return text.index().end() - text.index().begin(); })
      .def_prop_ro("num_bytes", [](const TenantText& text) { return text.index().num_bytes(); });
  nb::class_<RequestText>(module, "RequestText")
      .def("__init__", make_request, "owner"_a, "prediction"_a, "num_prompt"_a)
      .def("__len__", [](const RequestText& text) { return text.size(); })
      .def("occurrences", find_occurrences, "tenant"_a.none() = nb::none(), "max_found"_a = kMaxFound)
      .def_prop_ro("num_bytes", [](const RequestText& text) { return text.index().num_bytes(); });
  module.def("propose_repeats", propose, "requests"_a, "tenants"_a, "tokens"_a, "max_drafts"_a, "only_chains"_a);
  module.def("publish_answer", publish, "request"_a, "tenant"_a, "tokens"_a);
}

}  // namespace quire
