// Reads the strings of a GGUF file. A string is its length in 8 bytes and then UTF-8. Vocabularies have hundreds of
// thousands of strings; reading them one by one in Python would take a quarter of the start time.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>

#include "bindings.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace quire {
namespace {

// The bytes of any Python object with the buffer protocol. They are valid for the lifetime of this object.
class Bytes {
 public:
  explicit Bytes(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }

  uint64_t size() const { return static_cast<uint64_t>(view_.len); }

  // Reads the string at `at` and advances `at` to its end. Returns false if the string exceeds the bytes.
  bool next(uint64_t& at, const char*& text, uint64_t& length) const {
    if (at > size() || size() - at < 8) return false;
    const char* from = static_cast<const char*>(view_.buf) + at;
    std::memcpy(&length, from, 8);
    if (size() - at - 8 < length) return false;
    text = from + 8;
    at += 8 + length;
    return true;
  }

 private:
  Py_buffer view_;
};

nb::object decode(const char* text, uint64_t length) {
  PyObject* made = PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(length), "strict");
  if (!made) PyErr_Clear();
  return nb::steal(made);
}

// How many of `count` strings are complete from `at` on, and the offset where the last of them ends.
nb::tuple skip_strings(nb::handle data, uint64_t at, uint64_t count) {
  const Bytes bytes(data);
  const char* text;
  uint64_t length, done = 0;
  while (done < count && bytes.next(at, text, length)) done++;
  return nb::make_tuple(done, at);
}

// The strings, up to the first one that is incomplete or not UTF-8.
nb::list read_strings(nb::handle data, uint64_t at, uint64_t count) {
  const Bytes bytes(data);
  nb::list strings;
  const char* text;
  uint64_t length;
  for (uint64_t i = 0; i < count && bytes.next(at, text, length); i++) {
    nb::object string = decode(text, length);
    if (!string) break;
    strings.append(string);
  }
  return strings;
}

// The same, with each string split at its first space, up to the first one with an empty side.
nb::list read_pairs(nb::handle data, uint64_t at, uint64_t count) {
  const Bytes bytes(data);
  nb::list pairs;
  const char* text;
  uint64_t length;
  for (uint64_t i = 0; i < count && bytes.next(at, text, length); i++) {
    const char* space = static_cast<const char*>(std::memchr(text, ' ', length));
    if (!space || space == text || space == text + length - 1) break;
    const uint64_t left = static_cast<uint64_t>(space - text);
    nb::object first = decode(text, left), second = decode(space + 1, length - left - 1);
    if (!first || !second) break;
    pairs.append(nb::make_tuple(first, second));
  }
  return pairs;
}

}  // namespace

void bind_text(nb::module_& module) {
  module.def("skip_strings", skip_strings, "data"_a, "at"_a, "count"_a);
  module.def("read_strings", read_strings, "data"_a, "at"_a, "count"_a);
  module.def("read_pairs", read_pairs, "data"_a, "at"_a, "count"_a);
}

}  // namespace quire
