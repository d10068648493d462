// Packs GGUF blocks into panels, on any processor. Words and nibbles are moved to their lanes; no value changes. Lanes
// are written in ascending order. Lanes after the last row are not written, so a panel must be zero before.
// pack_dense.cpp packs dense rows, and unpack.cpp unpacks.
#include "pack.h"

#include <cassert>
#include <cstring>

#include "half.h"
#include "tables.h"

namespace quire {
namespace {

constexpr uint32_t kLowNibbles = 0x0f0f0f0fu;
constexpr int64_t kVector = kLanes * 4;  // bytes of a vector of quads

uint32_t load_word(const uint8_t* at) {
  uint32_t word;
  std::memcpy(&word, at, 4);
  return word;
}

void store_word(uint8_t* vector, int lane, uint32_t word) { std::memcpy(vector + 4 * lane, &word, 4); }

void copy_half(uint8_t* halves, int lane, const uint8_t* source) { std::memcpy(halves + 2 * lane, source, 2); }

// Copies 16 bytes with value i in the low nibble and value i + 16 in the high one, which is the order of a panel.
void copy_nibbles(uint8_t* codes, int lane, const uint8_t* source) {
  for (int j = 0; j < 4; ++j) store_word(codes + j * kVector, lane, load_word(source + 4 * j));
}

// Packs the low (shift 0) or the high (shift 4) nibbles of 32 bytes.
void pair_nibbles(uint8_t* codes, int lane, const uint8_t* source, int shift) {
  for (int j = 0; j < 4; ++j) {
    uint32_t low = load_word(source + 4 * j) >> shift & kLowNibbles;
    uint32_t high = load_word(source + 16 + 4 * j) >> shift & kLowNibbles;
    store_word(codes + j * kVector, lane, low | high << 4);
  }
}

// Stores four bits of mask j. An even lane clears the other half of the byte, which the next lane writes.
void store_mask(uint8_t* masks, int j, int lane, uint32_t nibble) {
  uint8_t* at = masks + 8 * j + lane / 2;
  *at = static_cast<uint8_t>(lane % 2 == 0 ? nibble : *at | nibble << 4);
}

// Stores 32 bits, one for each value.
void spread_bits(uint8_t* masks, int lane, uint32_t bits) {
  for (int j = 0; j < 8; ++j) store_mask(masks, j, lane, bits >> 4 * j & 15);
}

// Stores bit `plane` of 32 bytes.
void gather_plane(uint8_t* masks, int lane, const uint8_t* source, int plane) {
  for (int j = 0; j < 8; ++j) {
    uint32_t ones = load_word(source + 4 * j) >> plane & 0x01010101u;
    store_mask(masks, j, lane, (ones | ones >> 7 | ones >> 14 | ones >> 21) & 15);
  }
}

// Packs bits `shift` and `shift` + 1 of 32 bytes.
void pair_crumbs(uint8_t* crumbs, int lane, const uint8_t* source, int shift) {
  for (int h = 0; h < 2; ++h) {
    uint32_t word = 0;
    for (int t = 0; t < 4; ++t) word |= (load_word(source + 16 * h + 4 * t) >> shift & 0x03030303u) << 2 * t;
    store_word(crumbs + h * kVector, lane, word);
  }
}

// Unpacks the 6-bit scales of Q4_K and Q5_K: 12 bytes into 8 times (s, t).
void split_scales(uint8_t* scales, int lane, const uint8_t* source) {
  for (int i = 0; i < 4; ++i) {
    int a = source[i], b = source[4 + i], c = source[8 + i];
    uint8_t* near = scales + i * 32 + lane;
    uint8_t* far = near + 4 * 32;
    near[0] = static_cast<uint8_t>(a & 63);
    near[16] = static_cast<uint8_t>(b & 63);
    far[0] = static_cast<uint8_t>((c & 15) | (a >> 2 & 48));
    far[16] = static_cast<uint8_t>(c >> 4 | (b >> 2 & 48));
  }
}

// For each type: its panel format, the values, bytes and panel scale bytes of a block, and how a block is packed.

struct Q4_0 {
  static constexpr Format format{Codes::U4, Scales::D, 8};
  static constexpr int64_t values = 32, bytes = 18, scale_bytes = 32;
  static void pack(uint8_t* codes, uint8_t* scales, int lane, const uint8_t* block) {
    copy_half(scales, lane, block);
    copy_nibbles(codes, lane, block + 2);
  }
};

struct Q4_1 {
  static constexpr Format format{Codes::U4, Scales::DM, 0};
  static constexpr int64_t values = 32, bytes = 20, scale_bytes = 64;
  static void pack(uint8_t* codes, uint8_t* scales, int lane, const uint8_t* block) {
    copy_half(scales, lane, block);
    copy_half(scales + 32, lane, block + 2);
    copy_nibbles(codes, lane, block + 4);
  }
};

struct Q5_0 {
  static constexpr Format format{Codes::U5, Scales::D, 16};
  static constexpr int64_t values = 32, bytes = 22, scale_bytes = 32;
  static void pack(uint8_t* codes, uint8_t* scales, int lane, const uint8_t* block) {
    copy_half(scales, lane, block);
    spread_bits(codes + 4 * kVector, lane, load_word(block + 2));
    copy_nibbles(codes, lane, block + 6);
  }
};

struct Q5_1 {
  static constexpr Format format{Codes::U5, Scales::DM, 0};
  static constexpr int64_t values = 32, bytes = 24, scale_bytes = 64;
  static void pack(uint8_t* codes, uint8_t* scales, int lane, const uint8_t* block) {
    copy_half(scales, lane, block);
    copy_half(scales + 32, lane, block + 2);
    spread_bits(codes + 4 * kVector, lane, load_word(block + 4));
    copy_nibbles(codes, lane, block + 8);
  }
};

struct Q8_0 {
  static constexpr Format format{Codes::U8, Scales::D, 128};
  static constexpr int64_t values = 32, bytes = 34, scale_bytes = 32;
  static void pack(uint8_t* codes, uint8_t* scales, int lane, const uint8_t* block) {
    copy_half(scales, lane, block);
    for (int j = 0; j < 8; ++j) store_word(codes + j * kVector, lane, load_word(block + 2 + 4 * j) ^ 0x80808080u);
  }
};

struct Q4_K {
  static constexpr Format format{Codes::U4, Scales::SUPER_DM, 0};
  static constexpr int64_t values = 256, bytes = 144, scale_bytes = 320;
  static void pack(uint8_t* codes, uint8_t* scales, int lane, const uint8_t* block) {
    copy_half(scales, lane, block);
    copy_half(scales + 32, lane, block + 2);
    split_scales(scales + 64, lane, block + 4);
    for (int k = 0; k < kSuper; ++k) {
      pair_nibbles(codes + k * block_bytes(Codes::U4), lane, block + 16 + k / 2 * 32, k % 2 * 4);
    }
  }
};

struct Q5_K {
  static constexpr Format format{Codes::U5, Scales::SUPER_DM, 0};
  static constexpr int64_t values = 256, bytes = 176, scale_bytes = 320;
  static void pack(uint8_t* codes, uint8_t* scales, int lane, const uint8_t* block) {
    copy_half(scales, lane, block);
    copy_half(scales + 32, lane, block + 2);
    split_scales(scales + 64, lane, block + 4);
    for (int k = 0; k < kSuper; ++k, codes += block_bytes(Codes::U5)) {
      pair_nibbles(codes, lane, block + 48 + k / 2 * 32, k % 2 * 4);
      gather_plane(codes + 4 * kVector, lane, block + 16, k);
    }
  }
};

struct Q6_K {
  static constexpr Format format{Codes::U6, Scales::SUPER_D16, 32};
  static constexpr int64_t values = 256, bytes = 210, scale_bytes = 288;
  static void pack(uint8_t* codes, uint8_t* scales, int lane, const uint8_t* block) {
    copy_half(scales, lane, block + 208);
    for (int i = 0; i < 16; ++i) scales[32 + i * kLanes + lane] = block[192 + i];
    for (int k = 0; k < kSuper; ++k, codes += block_bytes(Codes::U6)) {
      int half = k / 4, quarter = k % 4;
      pair_nibbles(codes, lane, block + half * 64 + quarter % 2 * 32, quarter / 2 * 4);
      pair_crumbs(codes + 4 * kVector, lane, block + 128 + half * 32, quarter * 2);
    }
  }
};

void store_float(uint8_t* scales, int lane, float value) { std::memcpy(scales + 4 * lane, &value, 4); }

struct IQ4_NL {
  static constexpr Format format{Codes::T4, Scales::GROUP, 0, &kIQ4};
  static constexpr int64_t values = 32, bytes = 18, scale_bytes = 64;
  static void pack(uint8_t* codes, uint8_t* scales, int lane, const uint8_t* block) {
    uint16_t d;
    std::memcpy(&d, block, 2);
    store_float(scales, lane, half_to_float(d));
    copy_nibbles(codes, lane, block + 2);
  }
};

struct IQ4_XS {
  static constexpr Format format{Codes::T4, Scales::GROUP, 0, &kIQ4};
  static constexpr int64_t values = 256, bytes = 136, scale_bytes = 512;
  static void pack(uint8_t* codes, uint8_t* scales, int lane, const uint8_t* block) {
    for (int k = 0; k < kSuper; ++k) {
      store_float(scales + 64 * k, lane, iq4_scale(block, k));
      copy_nibbles(codes + k * block_bytes(Codes::T4), lane, block + 8 + 16 * k);
    }
  }
};

struct MXFP4 {
  static constexpr Format format{Codes::T4, Scales::GROUP, 0, &kDoubledE2M1};
  static constexpr int64_t values = 32, bytes = 17, scale_bytes = 64;
  static void pack(uint8_t* codes, uint8_t* scales, int lane, const uint8_t* block) {
    store_float(scales, lane, exponent_to_half_scale(block[0]));
    copy_nibbles(codes, lane, block + 1);
  }
};

template <class Type>
void pack_panel(const Panels& panels, int64_t panel, const uint8_t* source, int64_t row_bytes, int live) {
  uint8_t* codes = panels.codes(panel);
  uint8_t* scales = panels.scales(panel);
  for (int64_t at = 0; at < row_bytes; at += Type::bytes) {
    for (int lane = 0; lane < live; ++lane) Type::pack(codes, scales, lane, source + lane * row_bytes + at);
    codes += Type::values / kBlock * block_bytes(Type::format.codes);
    scales += Type::scale_bytes;
  }
}

template <class Type>
void pack_rows(const Panels& panels, const uint8_t* source, int64_t first, int64_t count) {
  assert(panels.format == Type::format && panels.cols % Type::values == 0);
  int64_t row_bytes = panels.cols / Type::values * Type::bytes;
  for (int64_t row = 0; row < count; row += kLanes) {
    int live = static_cast<int>(count - row < kLanes ? count - row : kLanes);
    pack_panel<Type>(panels, (first + row) / kLanes, source + row * row_bytes, row_bytes, live);
  }
}

template <Codes type>
void copy_rows(const Panels& panels, const uint8_t* source, int64_t first, int64_t count) {
  pack_dense(panels, type, source, panels.cols, first, count);
}

struct Entry {
  int number;  // of the type in a GGUF file
  Format format;
  void (*pack)(const Panels&, const uint8_t*, int64_t, int64_t);
};

template <class Type>
constexpr Entry blocks_of(int number) {
  return {number, Type::format, pack_rows<Type>};
}

template <Codes type>
constexpr Entry values_of(int number) {
  return {number, {type, Scales::NONE, 0}, copy_rows<type>};
}

constexpr Entry kEntries[] = {
    values_of<Codes::F32>(0), values_of<Codes::F16>(1), values_of<Codes::BF16>(30),
    blocks_of<Q4_0>(2),       blocks_of<Q4_1>(3),       blocks_of<Q5_0>(6),
    blocks_of<Q5_1>(7),       blocks_of<Q8_0>(8),       blocks_of<Q4_K>(12),
    blocks_of<Q5_K>(13),      blocks_of<Q6_K>(14),      blocks_of<IQ4_NL>(20),
    blocks_of<IQ4_XS>(23),    blocks_of<MXFP4>(39),
};

const Entry* find_entry(int ggml_type) {
  for (const Entry& entry : kEntries) {
    if (entry.number == ggml_type) return &entry;
  }
  return nullptr;
}

}  // namespace

void pack_gguf(const Panels& panels, int ggml_type, const uint8_t* source, int64_t first, int64_t count) {
  const Entry* entry = find_entry(ggml_type);
  assert(entry != nullptr && entry->format == panels.format && first % kLanes == 0);
  entry->pack(panels, source, first, count);
}

bool format_of_gguf(int ggml_type, Format* format) {
  const Entry* entry = find_entry(ggml_type);
  if (entry != nullptr) *format = entry->format;
  return entry != nullptr;
}

}  // namespace quire
