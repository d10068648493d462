// Implements dequantize.h. A type is a struct: the values and bytes of its blocks, and how a block is unpacked. Codes
// are extracted first and scaled then, in runs of values that share a scale.
#include "dequantize.h"

#include <cstring>

#include "half.h"
#include "tables.h"

namespace quire {
namespace {

constexpr int kSmall = 32, kLarge = 256;  // values of a block

float half_at(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return half_to_float(bits);
}

// Two values a byte: the low halves of `run` bytes, then their high halves.
void read_nibbles(const uint8_t* packed, int size, int run, uint8_t* q) {
  for (int first = 0; first < size; first += run) {
    for (int i = 0; i < run; i++) {
      q[2 * first + i] = packed[first + i] & 15;
      q[2 * first + run + i] = packed[first + i] >> 4;
    }
  }
}

// Four values a byte: bits 0 and 1 of 32 bytes, then bits 2 and 3 of them, and so on. They are combined with q as bits
// `to` and `to` + 1.
void add_crumbs(const uint8_t* packed, int size, int to, uint8_t* q) {
  for (int first = 0; first < size; first += 32) {
    for (int shift = 0; shift < 8; shift += 2, q += 32) {
      for (int i = 0; i < 32; i++) q[i] |= static_cast<uint8_t>((packed[first + i] >> shift & 3) << to);
    }
  }
}

// Eight values a byte, lowest bit first, byte by byte. They become bit 4 of 32 codes.
void add_fifth_bits(const uint8_t* packed, uint8_t* q) {
  for (int i = 0; i < kSmall; i++) q[i] |= static_cast<uint8_t>((packed[i / 8] >> i % 8 & 1) << 4);
}

// Eight values a byte: bit 0 of 32 bytes, then bit 1 of them, and so on. They become bit `to` of 256 codes.
void add_bit_planes(const uint8_t* packed, int to, uint8_t* q) {
  for (int plane = 0; plane < 8; plane++, q += 32) {
    for (int i = 0; i < 32; i++) q[i] |= static_cast<uint8_t>((packed[i] >> plane & 1) << to);
  }
}

// scale * (q - offset)
template <int run>
void scale_run(const uint8_t* q, int offset, float scale, float* out) {
  for (int i = 0; i < run; i++) out[i] = static_cast<float>(q[i] - offset) * scale;
}

// scale * q + minimum
template <int run>
void scale_run_from(const uint8_t* q, float scale, float minimum, float* out) {
  for (int i = 0; i < run; i++) out[i] = static_cast<float>(q[i]) * scale + minimum;
}

struct F32 {
  static constexpr int64_t values = 1, bytes = 4;
  static void unpack(const uint8_t* block, float* out) { std::memcpy(out, block, 4); }
};

struct F16 {
  static constexpr int64_t values = 1, bytes = 2;
  static void unpack(const uint8_t* block, float* out) { *out = half_at(block); }
};

struct BF16 {
  static constexpr int64_t values = 1, bytes = 2;
  static void unpack(const uint8_t* block, float* out) {
    uint16_t bits;
    std::memcpy(&bits, block, 2);
    *out = bfloat_to_float(bits);
  }
};

struct Q4_0 {
  static constexpr int64_t values = kSmall, bytes = 18;
  static void unpack(const uint8_t* block, float* out) {
    uint8_t q[values];
    read_nibbles(block + 2, 16, 16, q);
    scale_run<kSmall>(q, 8, half_at(block), out);
  }
};

struct Q4_1 {
  static constexpr int64_t values = kSmall, bytes = 20;
  static void unpack(const uint8_t* block, float* out) {
    uint8_t q[values];
    read_nibbles(block + 4, 16, 16, q);
    scale_run_from<kSmall>(q, half_at(block), half_at(block + 2), out);
  }
};

struct Q5_0 {
  static constexpr int64_t values = kSmall, bytes = 22;
  static void unpack(const uint8_t* block, float* out) {
    uint8_t q[values];
    read_nibbles(block + 6, 16, 16, q);
    add_fifth_bits(block + 2, q);
    scale_run<kSmall>(q, 16, half_at(block), out);
  }
};

struct Q5_1 {
  static constexpr int64_t values = kSmall, bytes = 24;
  static void unpack(const uint8_t* block, float* out) {
    uint8_t q[values];
    read_nibbles(block + 8, 16, 16, q);
    add_fifth_bits(block + 4, q);
    scale_run_from<kSmall>(q, half_at(block), half_at(block + 2), out);
  }
};

struct Q8_0 {
  static constexpr int64_t values = kSmall, bytes = 34;
  static void unpack(const uint8_t* block, float* out) {
    const float scale = half_at(block);
    for (int i = 0; i < kSmall; i++) out[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * scale;
  }
};

struct Q2_K {
  static constexpr int64_t values = kLarge, bytes = 84;
  static void unpack(const uint8_t* block, float* out) {
    const float scale = half_at(block + 80), minimum = half_at(block + 82);
    uint8_t q[values] = {};
    add_crumbs(block + 16, 64, 0, q);
    for (int run = 0; run < 16; run++) {
      const float d = scale * static_cast<float>(block[run] & 15), m = -(minimum * static_cast<float>(block[run] >> 4));
      scale_run_from<16>(q + 16 * run, d, m, out + 16 * run);
    }
  }
};

struct Q3_K {
  static constexpr int64_t values = kLarge, bytes = 110;
  // The 6-bit scale of a run: four bits in bytes 96 to 103, two in bytes 104 to 107.
  static int scale_of(const uint8_t* block, int run) {
    const int low = block[96 + run % 8] >> (run < 8 ? 0 : 4) & 15, high = block[104 + run % 4] >> 2 * (run / 4) & 3;
    return (low | high << 4) - 32;
  }
  static void unpack(const uint8_t* block, float* out) {
    const float scale = half_at(block + 108);
    uint8_t q[values] = {};
    add_crumbs(block + 32, 64, 0, q);
    add_bit_planes(block, 2, q);
    for (int run = 0; run < 16; run++)
      scale_run<16>(q + 16 * run, 4, scale * static_cast<float>(scale_of(block, run)), out + 16 * run);
  }
};

// The 8 scales and minimums of a Q4_K or Q5_K block: 6 bits each, in 12 bytes from byte 4.
void scale_runs_of_32(const uint8_t* block, const uint8_t* q, float* out) {
  const float scale = half_at(block), minimum = half_at(block + 2);
  const uint8_t *a = block + 4, *b = block + 8, *c = block + 12;
  for (int run = 0; run < 8; run++) {
    const int i = run % 4;
    const int s = run < 4 ? a[i] & 63 : (c[i] & 15) | (a[i] >> 2 & 48);
    const int t = run < 4 ? b[i] & 63 : c[i] >> 4 | (b[i] >> 2 & 48);
    const float d = scale * static_cast<float>(s), m = -(minimum * static_cast<float>(t));
    scale_run_from<32>(q + 32 * run, d, m, out + 32 * run);
  }
}

struct Q4_K {
  static constexpr int64_t values = kLarge, bytes = 144;
  static void unpack(const uint8_t* block, float* out) {
    uint8_t q[values];
    read_nibbles(block + 16, 128, 32, q);
    scale_runs_of_32(block, q, out);
  }
};

struct Q5_K {
  static constexpr int64_t values = kLarge, bytes = 176;
  static void unpack(const uint8_t* block, float* out) {
    uint8_t q[values];
    read_nibbles(block + 48, 128, 32, q);
    add_bit_planes(block + 16, 4, q);
    scale_runs_of_32(block, q, out);
  }
};

struct Q6_K {
  static constexpr int64_t values = kLarge, bytes = 210;
  static void unpack(const uint8_t* block, float* out) {
    const float scale = half_at(block + 208);
    uint8_t q[values];
    read_nibbles(block, 128, 64, q);
    add_crumbs(block + 128, 64, 4, q);
    for (int run = 0; run < 16; run++) {
      const auto small = static_cast<int8_t>(block[192 + run]);
      scale_run<16>(q + 16 * run, 32, scale * static_cast<float>(small), out + 16 * run);
    }
  }
};

// The 32 values of 16 bytes, by a table.
void look_up_run(const CodeTable& table, const uint8_t* packed, float scale, float* out) {
  uint8_t q[kSmall];
  read_nibbles(packed, 16, 16, q);
  for (int i = 0; i < kSmall; i++) out[i] = scale * table.values[q[i]];
}

struct IQ4_NL {
  static constexpr int64_t values = kSmall, bytes = 18;
  static void unpack(const uint8_t* block, float* out) { look_up_run(kIQ4, block + 2, half_at(block), out); }
};

struct IQ4_XS {
  static constexpr int64_t values = kLarge, bytes = 136;
  static void unpack(const uint8_t* block, float* out) {
    for (int k = 0; k < 8; k++) look_up_run(kIQ4, block + 8 + 16 * k, iq4_scale(block, k), out + 32 * k);
  }
};

struct MXFP4 {
  static constexpr int64_t values = kSmall, bytes = 17;
  static void unpack(const uint8_t* block, float* out) {
    look_up_run(kDoubledE2M1, block + 1, exponent_to_half_scale(block[0]), out);
  }
};

// Calls f with the struct of a type. Returns false if there is none.
template <class F>
bool with_type(int ggml_type, F f) {
  switch (ggml_type) {
    case 0: return f(F32{}), true;
    case 1: return f(F16{}), true;
    case 2: return f(Q4_0{}), true;
    case 3: return f(Q4_1{}), true;
    case 6: return f(Q5_0{}), true;
    case 7: return f(Q5_1{}), true;
    case 8: return f(Q8_0{}), true;
    case 10: return f(Q2_K{}), true;
    case 11: return f(Q3_K{}), true;
    case 12: return f(Q4_K{}), true;
    case 13: return f(Q5_K{}), true;
    case 14: return f(Q6_K{}), true;
    case 20: return f(IQ4_NL{}), true;
    case 23: return f(IQ4_XS{}), true;
    case 30: return f(BF16{}), true;
    case 39: return f(MXFP4{}), true;
    default: return false;
  }
}

}  // namespace

BlockSize block_size_of(int ggml_type) {
  BlockSize size = {0, 0};
  with_type(ggml_type, [&](auto type) { size = {type.values, type.bytes}; });
  return size;
}

void dequantize_blocks(int ggml_type, const uint8_t* blocks, int64_t count, float* out) {
  with_type(ggml_type, [&](auto type) {
    for (int64_t nth = 0; nth < count; nth++) type.unpack(blocks + nth * type.bytes, out + nth * type.values);
  });
}

}  // namespace quire
