// Reads the strings of a GGUF file, and encodes text with a vocabulary of such strings. A string is its length in 8 bytes
// and then UTF-8. Vocabularies have hundreds of thousands of strings; as Python objects they would take a quarter of the
// start time.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>

#include <cstdint>
#include <cstring>
#include <memory>

#include "bindings.h"
#include "bpe.h"

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

// The strings as views of the bytes; nothing if one of them is incomplete.
std::optional<std::vector<std::string_view>> view_strings(const Bytes& bytes, uint64_t at, uint64_t count) {
  std::vector<std::string_view> views;
  const char* text;
  uint64_t length;
  for (uint64_t i = 0; i < count; i++) {
    if (!bytes.next(at, text, length)) return std::nullopt;
    views.emplace_back(text, length);
  }
  return views;
}

// Each string is followed by a zero byte, so that an incomplete character at the end of one is not valid UTF-8 either.
bool are_utf8(const std::vector<std::string_view>& strings) {
  std::string all;
  for (std::string_view string : strings) all.append(string).push_back('\0');
  return decode(all.data(), all.size()).is_valid();
}

// What Python calls a BPE.
struct Vocabulary {
  Bpe bpe;
  AddedTokens added;
};

// A vocabulary without added tokens; None if the strings are not UTF-8 or not a vocabulary with its merges.
std::unique_ptr<Vocabulary> make_bpe(nb::handle data, uint64_t tokens_at, uint64_t num_tokens, uint64_t merges_at,
                                     uint64_t num_merges) {
  const Bytes bytes(data);
  const auto tokens = view_strings(bytes, tokens_at, num_tokens);
  const auto merges = view_strings(bytes, merges_at, num_merges);
  if (!tokens || !merges || !are_utf8(*tokens)) return nullptr;
  auto vocabulary = std::make_unique<Vocabulary>();
  const ReleasedGil released;
  return vocabulary->bpe.build(*tokens, *merges) ? std::move(vocabulary) : nullptr;
}

nb::object to_text(std::string_view text) { return decode(text.data(), text.size()); }

uint32_t count_tokens(const Vocabulary& vocabulary) { return vocabulary.bpe.size(); }

nb::object get_token(const Vocabulary& vocabulary, int64_t id) {
  if (id < 0 || id >= vocabulary.bpe.size()) return nb::none();
  return to_text(vocabulary.bpe.token(static_cast<uint32_t>(id)));
}

std::optional<uint32_t> find_token(const Vocabulary& vocabulary, std::string_view text) {
  return vocabulary.bpe.find(text);
}

nb::list list_tokens(const Vocabulary& vocabulary) {
  nb::list tokens;
  for (uint32_t id = 0; id < vocabulary.bpe.size(); id++) tokens.append(to_text(vocabulary.bpe.token(id)));
  return tokens;
}

nb::list list_merges(const Vocabulary& vocabulary) {
  nb::list merges;
  for (const auto& [left, right] : vocabulary.bpe.merges()) {
    merges.append(nb::make_tuple(to_text(vocabulary.bpe.token(left)), to_text(vocabulary.bpe.token(right))));
  }
  return merges;
}

void add_token(Vocabulary& vocabulary, std::string_view text, uint32_t id) { vocabulary.added.add(text, id); }

nb::list encode_words(const Vocabulary& vocabulary, nb::list words, bool ignore_merges) {
  std::vector<uint32_t> ids;
  for (nb::handle word : words) vocabulary.bpe.encode(nb::cast<std::string_view>(word), ignore_merges, ids);
  nb::list result;
  for (const uint32_t id : ids) result.append(id);
  return result;
}

// The ids of the added tokens in a text, and the text between them.
nb::list split_added(const Vocabulary& vocabulary, std::string_view text) {
  nb::list parts;
  uint64_t at = 0;
  while (const auto match = vocabulary.added.find(text, at)) {
    if (match->start > at) parts.append(to_text(text.substr(at, match->start - at)));
    parts.append(match->id);
    at = match->end;
  }
  if (at < text.size()) parts.append(to_text(text.substr(at)));
  return parts;
}

void bind_bpe(nb::module_& module) {
  nb::class_<Vocabulary>(module, "BPE")
      .def("__len__", count_tokens)
      .def("token", get_token, "id"_a)
      .def("find", find_token, "text"_a)
      .def("tokens", list_tokens)
      .def("merges", list_merges)
      .def("add_token", add_token, "text"_a, "id"_a)
      .def("split_added", split_added, "text"_a)
      .def("encode_words", encode_words, "words"_a, "ignore_merges"_a);
  module.def("make_bpe", make_bpe, "data"_a, "tokens_at"_a, "num_tokens"_a, "merges_at"_a, "num_merges"_a);
}

}  // namespace

void bind_text(nb::module_& module) {
  bind_bpe(module);
  module.def("skip_strings", skip_strings, "data"_a, "at"_a, "count"_a);
  module.def("read_strings", read_strings, "data"_a, "at"_a, "count"_a);
  module.def("read_pairs", read_pairs, "data"_a, "at"_a, "count"_a);
}

}  // namespace quire
