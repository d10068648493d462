// Python bindings of what happens to logits after the head: soft cap, bitmask, penalties, sampling, log probabilities.
// Arrays are addresses, rows are (address, stride). Python keeps them valid during a call. Ids and rows that come from
// other arrays are checked. All functions release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "bindings.h"
#include "logprobs.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace quire {
namespace {

// Columns are divided in units of this many, so that threads seldom write to the same cache line.
constexpr int64_t kGrain = 1024;

const int64_t* ids(Address address) { return reinterpret_cast<const int64_t*>(address); }

// Ids that Python passes in an array. Raises IndexError.
void check_ids(const int64_t* values, int64_t count, int64_t size, const char* what) {
  for (int64_t nth = 0; nth < count; nth++) {
    if (values[nth] >= 0 && values[nth] < size) continue;
    throw nb::index_error((std::string(what) + " " + std::to_string(values[nth]) + " is not below " +
                           std::to_string(size) + ".").c_str());
  }
}

void check_counts(int64_t size, int64_t count, int64_t num_top) {
  const int64_t most = std::max(count, num_top), least = std::min(count, num_top);
  if (size >= 1 && least >= 0 && most <= size) return;
  throw nb::value_error((std::to_string(least < 0 ? least : most) + " of " + std::to_string(size) +
                         " tokens cannot be selected.").c_str());
}

TopTokens top_tokens(int64_t count, Address tokens, Address logprobs) {
  return {count, reinterpret_cast<int64_t*>(tokens), reinterpret_cast<float*>(logprobs)};
}

// Runs f(row) for each of `rows` rows. A thread takes the next row that no thread has begun, because rows differ in
// their work, and a thread may have lost its core.
template <class F>
void over_rows(int threads, int64_t rows, F f) {
  struct Job {
    std::atomic<int64_t> next{0};
    int64_t rows;
    F& f;
    Job(int64_t rows, F& f) : rows(rows), f(f) {}
  } job(rows, f);
  const auto run = [](void* argument, Worker) {
    Job& job = *static_cast<Job*>(argument);
    for (int64_t row = job.next++; row < job.rows; row = job.next++) job.f(row);
  };
  run_team(static_cast<int>(std::min<int64_t>(threads, std::max<int64_t>(rows, 1))), run, &job);
}

// Runs f(span) for spans of `size` columns, one for each thread.
template <class F>
void over_columns(int threads, int64_t size, F f) {
  struct Job {
    int64_t size;
    F& f;
  } job{size, f};
  const auto run = [](void* argument, Worker worker) {
    const Job& job = *static_cast<Job*>(argument);
    job.f(share(worker, job.size, kGrain));
  };
  run_team(threads, run, &job);
}

void sample(const std::string& isa, int threads, View logits, int64_t rows, int64_t size, Address settings,
            Address seeds, Address positions, Address tokens, Address largest) {
  const SampleCall call{kernels_named(isa).sample, floats(logits), logits.second, rows, size,
                        reinterpret_cast<const double*>(settings), ids(seeds), ids(positions),
                        reinterpret_cast<int64_t*>(tokens), reinterpret_cast<float*>(largest)};
  ReleasedGil released;
  over_rows(threads, rows, [&](int64_t row) { sample_row(call, row); });
}

// The noise of a few ids of each row: seeds, positions [rows], tokens, out [rows, count].
void gumbel(Address seeds, Address positions, Address tokens, int64_t rows, int64_t count, Address out) {
  auto* values = reinterpret_cast<float*>(out);
  ReleasedGil released;
  for (int64_t row = 0; row < rows; row++) {
    const Noise noise = noise_of(ids(seeds)[row], ids(positions)[row]);
    for (int64_t at = row * count; at < (row + 1) * count; at++)
      values[at] = gumbel_score(0.0f, token_word(noise, ids(tokens)[at]));
  }
}

void penalize(View logits, int64_t num_rows, View counts, int64_t num_counts, int64_t size, View index,
              int64_t num_more, Address penalties, int64_t count, int32_t in_prompt) {
  for (int64_t nth = 0; nth < count; nth++) {
    const int64_t* line = ids(index.first) + nth * index.second;
    check_ids(line, 1, num_rows, "row");
    check_ids(line + 1, 1, num_counts, "row of counts");
    for (int64_t more = 0; more < num_more; more++) {
      if (line[2 + more] >= 0) check_ids(line + 2 + more, 1, size, "token");
    }
  }
  ReleasedGil released;
  for (int64_t nth = 0; nth < count; nth++) {
    const auto* line = reinterpret_cast<const int64_t*>(index.first) + nth * index.second;
    const auto* its = reinterpret_cast<const float*>(penalties) + 3 * nth;
    penalize_row({floats(logits) + line[0] * logits.second,
                  reinterpret_cast<const int32_t*>(counts.first) + line[1] * counts.second, size, line + 2, num_more,
                  its[0], its[1], its[2], in_prompt});
  }
}

// counts [num_rows, size] int32; rows, tokens [count] int64. A pair may occur more than once.
void count_tokens(View counts, int64_t num_rows, int64_t size, Address rows, Address tokens, int64_t count) {
  check_ids(ids(rows), count, num_rows, "row");
  check_ids(ids(tokens), count, size, "token");
  ReleasedGil released;
  auto* values = reinterpret_cast<int32_t*>(counts.first);
  for (int64_t nth = 0; nth < count; nth++) values[ids(rows)[nth] * counts.second + ids(tokens)[nth]]++;
}

// logits [num_rows, size]; rows [count] int64; bits [count, num_bytes] uint8. Threads divide the columns, because a row
// may occur more than once.
void apply_token_bitmask(const std::string& isa, int threads, View logits, int64_t num_rows, int64_t size, Address rows,
                         int64_t count, View bits, int64_t num_bytes) {
  check_ids(ids(rows), count, num_rows, "row");
  const LogitsKernels& kernels = kernels_named(isa).logits;
  ReleasedGil released;
  over_columns(threads, size, [&](Span span) {
    for (int64_t nth = 0; nth < count; nth++)
      kernels.apply_bitmask(floats(logits) + ids(rows)[nth] * logits.second,
                            reinterpret_cast<const uint8_t*>(bits.first) + nth * bits.second, num_bytes, span);
  });
}

void softcap(const std::string& isa, int threads, View values, int64_t rows, int64_t size, float cap) {
  const LogitsKernels& kernels = kernels_named(isa).logits;
  ReleasedGil released;
  over_columns(threads, size, [&](Span span) {
    for (int64_t row = 0; row < rows; row++) kernels.softcap(floats(values) + row * values.second, cap, span);
  });
}

void logprobs(const std::string& isa, int threads, View logits, int64_t rows, int64_t size, Address tokens,
              int64_t num_top, Address out, Address ranks, Address top, Address top_logprobs) {
  check_ids(ids(tokens), rows, size, "token");
  check_counts(size, 0, num_top);
  const LogprobsCall call{kernels_named(isa).sample, floats(logits), logits.second, rows, size, ids(tokens),
                          reinterpret_cast<float*>(out), reinterpret_cast<int64_t*>(ranks),
                          top_tokens(num_top, top, top_logprobs)};
  ReleasedGil released;
  over_rows(threads, rows, [&](int64_t row) { logprobs_row(call, row); });
}

// `banned`: logits in which minus infinity bans a token, or an address of 0.
void beam_candidates(const std::string& isa, int threads, View logits, View banned, int64_t rows, int64_t size,
                     int64_t count, int64_t num_top, Address tokens, Address out, Address ranks, Address top,
                     Address top_logprobs) {
  check_counts(size, count, num_top);
  const BeamCall call{kernels_named(isa).sample, floats(logits), logits.second, floats(banned), banned.second, rows,
                      size, top_tokens(count, tokens, out), reinterpret_cast<int64_t*>(ranks),
                      top_tokens(num_top, top, top_logprobs)};
  ReleasedGil released;
  over_rows(threads, rows, [&](int64_t row) { beam_row(call, row); });
}

}  // namespace

void bind_sampling(nb::module_& module) {
  module.def("sample", sample, "isa"_a, "threads"_a, "logits"_a, "rows"_a, "size"_a, "settings"_a, "seeds"_a,
             "positions"_a, "tokens"_a, "largest"_a);
  module.def("gumbel", gumbel, "seeds"_a, "positions"_a, "tokens"_a, "rows"_a, "count"_a, "out"_a);
  module.def("penalize", penalize, "logits"_a, "num_rows"_a, "counts"_a, "num_counts"_a, "size"_a, "index"_a,
             "num_more"_a, "penalties"_a, "count"_a, "in_prompt"_a);
  module.def("count_tokens", count_tokens, "counts"_a, "num_rows"_a, "size"_a, "rows"_a, "tokens"_a, "count"_a);
  module.def("apply_token_bitmask", apply_token_bitmask, "isa"_a, "threads"_a, "logits"_a, "num_rows"_a, "size"_a,
             "rows"_a, "count"_a, "bits"_a, "num_bytes"_a);
  module.def("softcap", softcap, "isa"_a, "threads"_a, "values"_a, "rows"_a, "size"_a, "cap"_a);
  module.def("logprobs", logprobs, "isa"_a, "threads"_a, "logits"_a, "rows"_a, "size"_a, "tokens"_a, "num_top"_a,
             "logprobs"_a, "ranks"_a, "top_tokens"_a, "top_logprobs"_a);
  module.def("beam_candidates", beam_candidates, "isa"_a, "threads"_a, "logits"_a, "banned"_a, "rows"_a, "size"_a,
             "count"_a, "num_top"_a, "tokens"_a, "logprobs"_a, "ranks"_a, "top_tokens"_a, "top_logprobs"_a);
}

}  // namespace quire
