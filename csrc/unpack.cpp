// Unpacks rows of panels to float32 with the formulas of panels.h. Every product and every sum is rounded, so the bits
// equal those of quire/quant/unpack.py. Used for embeddings and tests. Matrix products read the packed panels.
#include <cstring>

#include "half.h"
#include "pack.h"
#include "tables.h"

namespace quire {
namespace {

uint16_t load_half(const uint8_t* halves, int64_t index) {
  uint16_t bits;
  std::memcpy(&bits, halves + 2 * index, 2);
  return bits;
}

float half_at(const uint8_t* halves, int lane) { return half_to_float(load_half(halves, lane)); }

void read_nibbles(const uint8_t* vectors, int lane, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    uint8_t byte = vectors[i / 4 * 64 + 4 * lane + i % 4];
    q[i] = byte & 15;
    q[i + 16] = byte >> 4;
  }
}

void read_masks(const uint8_t* masks, int lane, uint8_t* q) {
  for (int i = 0; i < kBlock; ++i) {
    int bit = 4 * lane + i % 4;
    q[i] |= static_cast<uint8_t>((masks[i / 4 * 8 + bit / 8] >> bit % 8 & 1) << 4);
  }
}

void read_crumbs(const uint8_t* vectors, int lane, uint8_t* q) {
  for (int i = 0; i < kBlock; ++i) {
    uint8_t byte = vectors[i / 16 * 64 + 4 * lane + i % 4];
    q[i] |= static_cast<uint8_t>((byte >> i / 4 % 4 * 2 & 3) << 4);
  }
}

void read_bytes(const uint8_t* vectors, int lane, uint8_t* q) {
  for (int i = 0; i < kBlock; ++i) q[i] = vectors[i / 4 * 64 + 4 * lane + i % 4];
}

// The values of U2 panels.
void read_pairs(const uint8_t* vectors, int lane, uint8_t* q) {
  for (int i = 0; i < kBlock; ++i) q[i] = vectors[i / 16 * 64 + 4 * lane + i % 4] >> i / 4 % 4 * 2 & 3;
}

void read_third_bits(const uint8_t* masks, int lane, uint8_t* q) {
  for (int i = 0; i < kBlock; ++i) {
    int bit = 4 * lane + i % 4;
    q[i] |= static_cast<uint8_t>((masks[i / 4 * 8 + bit / 8] >> bit % 8 & 1) << 2);
  }
}

void read_codes(Codes codes, const uint8_t* block, int lane, uint8_t* q) {
  if (codes == Codes::U2 || codes == Codes::U3) {
    read_pairs(block, lane, q);
    if (codes == Codes::U3) read_third_bits(block + 128, lane, q);
    return;
  }
  if (codes == Codes::U8) return read_bytes(block, lane, q);
  read_nibbles(block, lane, q);
  if (codes == Codes::U5) read_masks(block + 256, lane, q);
  if (codes == Codes::U6) read_crumbs(block + 256, lane, q);
}

// The scale and the minimum of 16 values: d * (q - offset) + m. A format without a minimum has no m.
struct Step {
  float d, m;
};

// Reads those of values 16 * half to 16 * half + 15 of a block.
Step read_step(Scales kind, const uint8_t* scales, int64_t block, int half, int lane) {
  int64_t super = block / kSuper, place = block % kSuper;
  switch (kind) {
    case Scales::D: return {half_at(scales + block * 32, lane), 0};
    case Scales::DM: return {half_at(scales + block * 64, lane), half_at(scales + block * 64 + 32, lane)};
    case Scales::SUPER_DM: {
      const uint8_t* base = scales + super * 320;
      const uint8_t* small = base + 64 + place * 32 + lane;
      return {half_at(base, lane) * small[0], -(half_at(base + 32, lane) * small[kLanes])};
    }
    case Scales::SUPER_D16: {
      const uint8_t* base = scales + super * 288;
      int8_t small = static_cast<int8_t>(base[32 + (place * 2 + half) * kLanes + lane]);
      return {half_at(base, lane) * small, 0};
    }
    default: return {0, 0};
  }
}

void unpack_quantized(const Panels& panels, int64_t panel, int lane, float* out) {
  const Format format = panels.format;
  const bool minimum = format.scales == Scales::DM || format.scales == Scales::SUPER_DM;
  uint8_t q[kBlock];
  for (int64_t block = 0; block < panels.blocks(); ++block) {
    read_codes(format.codes, panels.codes(panel) + block * block_bytes(format.codes), lane, q);
    for (int half = 0; half < 2; ++half) {
      Step step = read_step(format.scales, panels.scales(panel), block, half, lane);
      for (int i = 16 * half; i < 16 * half + 16; ++i, ++out) {
        float scaled = step.d * static_cast<float>(q[i] - format.offset);
        *out = minimum ? scaled + step.m : scaled;
      }
    }
  }
}

float group_scale(const Panels& panels, int64_t panel, int64_t group, int lane) {
  float d;
  std::memcpy(&d, panels.scales(panel) + group * 64 + 4 * lane, 4);
  return d;
}

// Each value is one product, rounded to float32: as `dequantize` of quire/quant/code_format.py.
void unpack_grouped(const Panels& panels, int64_t panel, int lane, float* out) {
  const Format format = panels.format;
  const uint8_t* zeros = panels.scales(panel) + panels.groups() * 64;
  uint8_t q[kBlock];
  for (int64_t block = 0; block < panels.blocks(); ++block) {
    read_codes(format.codes, panels.codes(panel) + block * block_bytes(format.codes), lane, q);
    for (int i = 0; i < kBlock; ++i, ++out) {
      const int64_t group = format.scales == Scales::HALVES ? 2 * block + i / 16 : block >> format.shift;
      const int zero = format.scales == Scales::GROUP_Z ? zeros[group * kLanes + lane] : format.offset;
      const float level = format.codes == Codes::T4 ? format.table->values[q[i]] : static_cast<float>(q[i] - zero);
      *out = group_scale(panels, panel, group, lane) * level;
    }
  }
}

void unpack_float8(const Panels& panels, int64_t panel, int lane, float* out) {
  const uint8_t* codes = panels.codes(panel);
  for (int64_t k = 0; k < panels.cols; ++k) {
    const float level = float8_to_float(codes[k * kLanes + lane]);
    out[k] = group_scale(panels, panel, k / kBlock >> panels.format.shift, lane) * level;
  }
}

void unpack_dense(const Panels& panels, int64_t panel, int lane, float* out) {
  const uint8_t* values = panels.codes(panel);
  for (int64_t k = 0; k < panels.cols; ++k) {
    int64_t index = k * kLanes + lane;
    switch (panels.format.codes) {
      case Codes::F32: std::memcpy(out + k, values + 4 * index, 4); break;
      case Codes::BF16: out[k] = bfloat_to_float(load_half(values, index)); break;
      default: out[k] = half_to_float(load_half(values, index)); break;
    }
  }
}

}  // namespace

void unpack_row(const Panels& panels, int64_t row, float* out) {
  int64_t panel = row / kLanes;
  int lane = static_cast<int>(row % kLanes);
  if (panels.format.codes == Codes::F8) {
    unpack_float8(panels, panel, lane, out);
  } else if (panels.format.grouped()) {
    unpack_grouped(panels, panel, lane, out);
  } else if (panels.format.quantized()) {
    unpack_quantized(panels, panel, lane, out);
  } else {
    unpack_dense(panels, panel, lane, out);
  }
}

}  // namespace quire
