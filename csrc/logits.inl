// Functions that change logits in place or copy them (LogitsKernels in sample.h).
#pragma once

#include <cmath>

#include "sample.h"

namespace quire {
namespace QUIRE_ISA {

static void ban(const float* x, const float* banned, int64_t size, float* out) {
  over_lanes(size, [&](int64_t at, int lanes) {
    const f32 none = set1(-INFINITY);
    const uint32_t bits = same(load_lanes(banned + at, lanes), none);
    store_lanes(out + at, select(bits, none, load_lanes(x + at, lanes)), lanes);
  });
}

static void apply_bitmask(float* x, const uint8_t* bits, int64_t num_bytes, Span span) {
  over_lanes(span.last - span.first, [&](int64_t at, int lanes) {
    const int64_t byte = (span.first + at) / 8;
    const uint32_t low = byte < num_bytes ? bits[byte] : 0, high = byte + 1 < num_bytes ? bits[byte + 1] : 0;
    float* here = x + span.first + at;
    store_lanes(here, select(low | high << 8, load_lanes(here, lanes), set1(-INFINITY)), lanes);
  });
}

static void softcap(float* x, float cap, Span span) {
  over_lanes(span.last - span.first, [&](int64_t at, int lanes) {
    float* here = x + span.first + at;
    store_lanes(here, set1(cap) * precise_tanh(load_lanes(here, lanes) / set1(cap)), lanes);
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire
