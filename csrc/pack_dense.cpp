// Packs dense rows into panels: copied, rounded to another float type, or quantized to quire's own int8 and int4.
// pack.cpp packs the quantized types of GGUF files.
#include <cassert>
#include <cstring>

#include "half.h"
#include "levels.h"
#include "pack.h"

namespace quire {
namespace {

constexpr Format kOwnInt8{Codes::U8, Scales::D, 128};
constexpr Format kOwnInt4{Codes::U4, Scales::DM, 0};

// The rows of one panel. Only the first `live` lanes are written.
struct Source {
  Codes type;
  const uint8_t* values;
  int64_t row_bytes;
  int live;

  const uint8_t* at(int lane, int64_t k) const { return values + lane * row_bytes + k * value_bytes(type); }
};

template <float (*convert)(uint16_t)>
void widen(const uint8_t* from, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, 2);
    out[i] = convert(bits);
  }
}

void load_values(const Source& source, int lane, int64_t k, int64_t count, float* out) {
  const uint8_t* from = source.at(lane, k);
  switch (source.type) {
    case Codes::F32: std::memcpy(out, from, static_cast<size_t>(count) * 4); break;
    case Codes::BF16: widen<bfloat_to_float>(from, count, out); break;
    default: widen<half_to_float>(from, count, out); break;
  }
}

// Copies values that have the panel's type.
template <class Value>
void transpose_panel(const Source& source, int64_t cols, uint8_t* codes) {
  for (int64_t k = 0; k < cols; ++k, codes += kLanes * sizeof(Value)) {
    for (int lane = 0; lane < source.live; ++lane) {
      std::memcpy(codes + lane * sizeof(Value), source.at(lane, k), sizeof(Value));
    }
  }
}

void store_value(Codes type, uint8_t* codes, int64_t index, float value) {
  if (type == Codes::F32) {
    std::memcpy(codes + 4 * index, &value, 4);
    return;
  }
  uint16_t bits = type == Codes::BF16 ? float_to_bfloat(value) : float_to_half(value);
  std::memcpy(codes + 2 * index, &bits, 2);
}

void convert_panel(const Source& source, int64_t cols, Codes type, uint8_t* codes) {
  float values[kBlock];
  for (int64_t k = 0; k < cols; k += kBlock) {
    int64_t count = cols - k < kBlock ? cols - k : kBlock;
    for (int lane = 0; lane < source.live; ++lane) {
      load_values(source, lane, k, count, values);
      for (int64_t i = 0; i < count; ++i) store_value(type, codes, (k + i) * kLanes + lane, values[i]);
    }
  }
}

void store_half(uint8_t* halves, int lane, uint16_t half) { std::memcpy(halves + 2 * lane, &half, 2); }

void store_quad(uint8_t* vector, int lane, const uint8_t* bytes) { std::memcpy(vector + 4 * lane, bytes, 4); }

// The largest |x|, or NaN if there is one. The bits of magnitudes have the order of their values, with infinity and NaN
// last.
float largest_magnitude(const float* x) {
  uint32_t largest = 0;
  for (int i = 0; i < kBlock; ++i) {
    uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return bits_float(largest);
}

float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

void quantize_u8(const float* x, int lane, uint8_t* codes, uint8_t* scales) {
  Rounded d(largest_magnitude(x) / 127.0f);
  float inverse = d.value > 0 ? 1.0f / d.value : 0.0f;
  uint8_t q[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    q[i] = static_cast<uint8_t>(static_cast<int>(clamp(x[i] * inverse + 128.5f, 1.0f, 255.0f)));
  }
  store_half(scales, lane, d.half);
  for (int j = 0; j < 8; ++j) store_quad(codes + 64 * j, lane, q + 4 * j);
}

void quantize_u4(const float* x, int lane, uint8_t* codes, uint8_t* scales) {
  Rounded{largest_magnitude(x)};  // throws if a value is not finite or too large
  Quad quads[kBlock / 4];
  std::memcpy(quads, x, sizeof(quads));
  const Levels levels = best_levels(quads);
  store_half(scales, lane, levels.d.half);
  store_half(scales + 32, lane, levels.m.half);
  for (int j = 0; j < 4; ++j) {
    QuadCodes pairs = levels.codes(quads[j]) | levels.codes(quads[j + 4]) << 4;
    for (int i = 0; i < 4; ++i) codes[64 * j + 4 * lane + i] = static_cast<uint8_t>(pairs[i]);
  }
}

using Quantize = void (*)(const float* x, int lane, uint8_t* codes, uint8_t* scales);

void quantize_panel(const Source& source, const Panels& panels, int64_t panel, Quantize quantize) {
  const int64_t code_bytes = block_bytes(panels.format.codes), scale_bytes = panels.scale_bytes() / panels.blocks();
  float values[kBlock];
  for (int64_t block = 0; block < panels.blocks(); ++block) {
    for (int lane = 0; lane < source.live; ++lane) {
      load_values(source, lane, block * kBlock, kBlock, values);
      quantize(values, lane, panels.codes(panel) + block * code_bytes, panels.scales(panel) + block * scale_bytes);
    }
  }
}

void pack_panel(const Source& source, const Panels& panels, int64_t panel) {
  const Codes codes = panels.format.codes;
  if (panels.format.quantized()) {
    quantize_panel(source, panels, panel, panels.format == kOwnInt8 ? quantize_u8 : quantize_u4);
  } else if (codes != source.type) {
    convert_panel(source, panels.cols, codes, panels.codes(panel));
  } else if (codes == Codes::F32) {
    transpose_panel<uint32_t>(source, panels.cols, panels.codes(panel));
  } else {
    transpose_panel<uint16_t>(source, panels.cols, panels.codes(panel));
  }
}

}  // namespace

void pack_dense(const Panels& panels, Codes type, const void* source, int64_t source_stride, int64_t first,
                int64_t count) {
  assert(dense_packable(panels.format) && first % kLanes == 0);
  const int64_t row_bytes = source_stride * value_bytes(type);
  for (int64_t row = 0; row < count; row += kLanes) {
    const auto* values = static_cast<const uint8_t*>(source) + row * row_bytes;
    int live = static_cast<int>(count - row < kLanes ? count - row : kLanes);
    pack_panel({type, values, row_bytes, live}, panels, (first + row) / kLanes);
  }
}

bool dense_packable(const Format& format) {
  return (!format.quantized() && !format.grouped()) || format == kOwnInt8 || format == kOwnInt4;
}

}  // namespace quire
