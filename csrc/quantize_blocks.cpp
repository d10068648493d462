// Implements quantize_blocks.h. A type is a struct: how its scales are found and stored, how they are read back, and how
// its codes are stored. Codes are assigned after the scales were rounded to their stored form.
#include "quantize_blocks.h"

#include <cstring>

#include "block_fit.h"
#include "half.h"

namespace quire {
namespace {

using fit::Grid;
using fit::Limits;
using fit::Run;

constexpr int kSmall = 32, kLarge = 256;  // values of a block

float half_at(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return half_to_float(bits);
}

// Stores a float16 and returns its value. What is too large becomes the largest number.
float put_half(uint8_t* at, float value) {
  const uint16_t bits = float_to_half(std::min(std::max(value, -65504.0f), 65504.0f));
  std::memcpy(at, &bits, 2);
  return half_to_float(bits);
}

template <int N>
void load(Run<N>& run, const float* x, const float* w) {
  std::memcpy(run.x, x, sizeof(run.x));
  std::memcpy(run.w, w, sizeof(run.w));
}

// Two values a byte: `run` values in the low halves of `run` bytes, the next in their high halves.
void put_nibbles(const uint8_t* q, int size, int run, uint8_t* out) {
  for (int first = 0; first < size; first += run) {
    for (int i = 0; i < run; i++) {
      out[first + i] = static_cast<uint8_t>((q[2 * first + i] & 15) | (q[2 * first + run + i] & 15) << 4);
    }
  }
}

// Bits `from` and `from` + 1 of 128 codes in 32 bytes, four codes a byte.
void put_crumbs(const uint8_t* q, int size, int from, uint8_t* out) {
  std::memset(out, 0, static_cast<size_t>(size));
  for (int first = 0; first < size; first += 32) {
    for (int shift = 0; shift < 8; shift += 2, q += 32) {
      for (int i = 0; i < 32; i++) out[first + i] |= static_cast<uint8_t>((q[i] >> from & 3) << shift);
    }
  }
}

// Bit 4 of 32 codes, lowest bit first.
void put_fifth_bits(const uint8_t* q, uint8_t* out) {
  std::memset(out, 0, 4);
  for (int i = 0; i < kSmall; i++) out[i / 8] |= static_cast<uint8_t>((q[i] >> 4 & 1) << i % 8);
}

// Bit `from` of 256 codes: a bit of 32 bytes for each 32 codes.
void put_bit_planes(const uint8_t* q, int from, uint8_t* out) {
  std::memset(out, 0, 32);
  for (int plane = 0; plane < 8; plane++, q += 32) {
    for (int i = 0; i < 32; i++) out[i] |= static_cast<uint8_t>((q[i] >> from & 1) << plane);
  }
}

// Types of 32 values with a scale, and with or without a base.
template <int low, int high>
struct ScaleOnly {
  static constexpr int values = kSmall, run = kSmall;
  static constexpr Limits limits = {low, high};

  static void fit_block(const float* x, const float* w, uint8_t* block) {
    Run<kSmall> run_of_block;
    load(run_of_block, x, w);
    put_half(block, fit_scale(run_of_block, limits));
  }
  static Grid grid(const uint8_t* block, int) { return {half_at(block), 0}; }
};

template <int top>
struct ScaleAndBase {
  static constexpr int values = kSmall, run = kSmall;
  static constexpr Limits limits = {0, top};

  static void fit_block(const float* x, const float* w, uint8_t* block) {
    Run<kSmall> run_of_block;
    load(run_of_block, x, w);
    const Grid found = fit_affine(run_of_block, top, false);
    put_half(block, found.scale);
    put_half(block + 2, found.base);
  }
  static Grid grid(const uint8_t* block, int) { return {half_at(block), half_at(block + 2)}; }
};

struct Q4_0 : ScaleOnly<-8, 7> {
  static constexpr int bytes = 18;
  static void put_codes(const uint8_t* q, uint8_t* block) { put_nibbles(q, 16, 16, block + 2); }
};

struct Q5_0 : ScaleOnly<-16, 15> {
  static constexpr int bytes = 22;
  static void put_codes(const uint8_t* q, uint8_t* block) {
    put_fifth_bits(q, block + 2);
    put_nibbles(q, 16, 16, block + 6);
  }
};

struct Q8_0 : ScaleOnly<-127, 127> {
  static constexpr int bytes = 34;
  static void put_codes(const uint8_t* q, uint8_t* block) {
    for (int i = 0; i < kSmall; i++) block[2 + i] = static_cast<uint8_t>(q[i] - 127);
  }
};

struct Q4_1 : ScaleAndBase<15> {
  static constexpr int bytes = 20;
  static void put_codes(const uint8_t* q, uint8_t* block) { put_nibbles(q, 16, 16, block + 4); }
};

struct Q5_1 : ScaleAndBase<31> {
  static constexpr int bytes = 24;
  static void put_codes(const uint8_t* q, uint8_t* block) {
    put_fifth_bits(q, block + 4);
    put_nibbles(q, 16, 16, block + 8);
  }
};

constexpr int kRounds = 3;  // of improving the whole numbers of a large block, and then its float16 scales

// Whole numbers for the scales of the runs, and the float16 that they are multiplied with.
template <int num_runs>
struct Shared {
  float unit;
  int number[num_runs];

  static Shared of(const float* wanted, const float* weights, Limits limits) {
    Run<16> run = {};
    for (int i = 0; i < num_runs; i++) {
      run.x[i / fit::kWidth][i % fit::kWidth] = wanted[i];
      run.w[i / fit::kWidth][i % fit::kWidth] = weights[i];
    }
    Shared shared = {half_to_float(float_to_half(fit_scale(run, limits))), {}};
    assign(run, fit::inverse_of(shared.unit), 0.0f, limits);
    for (int i = 0; i < num_runs; i++) shared.number[i] = static_cast<int>(run.q[i / fit::kWidth][i % fit::kWidth]);
    return shared;
  }
};

inline int clamped(int number, Limits limits) {
  return std::min(std::max(number, static_cast<int>(limits.low)), static_cast<int>(limits.high));
}

inline float to_half(double value) {
  return half_to_float(float_to_half(static_cast<float>(std::min(std::max(value, -65504.0), 65504.0))));
}

// 256 values with a whole number as the scale of each run and a float16 for the block: Q3_K and Q6_K.
template <int low, int high, int least, int most>
struct SuperScale {
  static constexpr int values = kLarge, run = 16, num_runs = 16;
  static constexpr Limits limits = {low, high}, numbers = {least, most};

  struct Block {
    Run<run> runs[num_runs];
    Shared<num_runs> scales;

    Grid grid(int number) const { return {scales.unit * static_cast<float>(number), 0}; }

    double choose_numbers() {
      double total = 0;
      for (int i = 0; i < num_runs; i++) {
        int best = scales.number[i];
        double error = assign_error(runs[i], grid(best), limits);
        for (int number : {best - 1, best + 1}) {
          number = clamped(number, numbers);
          const double other = assign_error(runs[i], grid(number), limits);
          if (other < error) error = other, best = number;
        }
        scales.number[i] = best;
        assign_error(runs[i], grid(best), limits);
        total += error;
      }
      return total;
    }

    float best_unit() const {
      double xq = 0, qq = 0;
      for (int i = 0; i < num_runs; i++) {
        const fit::Sums sums = sums_of(runs[i]);
        const double number = scales.number[i];
        xq += number * sums.xq;
        qq += number * number * sums.qq;
      }
      return qq > 0 ? to_half(xq / qq) : scales.unit;
    }
  };

  static Shared<num_runs> search(const float* x, const float* w) {
    Block block;
    float wanted[num_runs], weights[num_runs];
    for (int i = 0; i < num_runs; i++) {
      load(block.runs[i], x + run * i, w + run * i);
      wanted[i] = fit_scale(block.runs[i], limits);
      assign_error(block.runs[i], {wanted[i], 0}, limits);
      weights[i] = static_cast<float>(sums_of(block.runs[i]).qq);
    }
    block.scales = Shared<num_runs>::of(wanted, weights, numbers);
    Shared<num_runs> best = block.scales;
    double least_error = 1e300;
    for (int round = 0; round < kRounds; round++) {
      const double error = block.choose_numbers();
      if (error < least_error) least_error = error, best = block.scales;
      block.scales.unit = block.best_unit();
    }
    return best;
  }
};

struct Q6_K : SuperScale<-32, 31, -128, 127> {
  static constexpr int bytes = 210;
  static void fit_block(const float* x, const float* w, uint8_t* block) {
    const Shared<16> scales = search(x, w);
    for (int i = 0; i < 16; i++) block[192 + i] = static_cast<uint8_t>(scales.number[i]);
    put_half(block + 208, scales.unit);
  }
  static Grid grid(const uint8_t* block, int i) {
    return {half_at(block + 208) * static_cast<float>(static_cast<int8_t>(block[192 + i])), 0};
  }
  static void put_codes(const uint8_t* q, uint8_t* block) {
    put_nibbles(q, 128, 64, block);
    put_crumbs(q, 64, 4, block + 128);
  }
};

struct Q3_K : SuperScale<-4, 3, -32, 31> {
  static constexpr int bytes = 110;
  static void fit_block(const float* x, const float* w, uint8_t* block) {
    const Shared<16> scales = search(x, w);
    std::memset(block + 96, 0, 12);
    for (int i = 0; i < 16; i++) {
      const int number = scales.number[i] + 32;
      block[96 + i % 8] |= static_cast<uint8_t>((number & 15) << (i < 8 ? 0 : 4));
      block[104 + i % 4] |= static_cast<uint8_t>(number >> 4 << 2 * (i / 4));
    }
    put_half(block + 108, scales.unit);
  }
  static Grid grid(const uint8_t* block, int i) {
    const int low = block[96 + i % 8] >> (i < 8 ? 0 : 4) & 15, high = block[104 + i % 4] >> 2 * (i / 4) & 3;
    return {half_at(block + 108) * static_cast<float>((low | high << 4) - 32), 0};
  }
  static void put_codes(const uint8_t* q, uint8_t* block) {
    put_bit_planes(q, 2, block);
    put_crumbs(q, 64, 0, block + 32);
  }
};

// 256 values with whole numbers as the scale and the minimum of each run: Q2_K, Q4_K and Q5_K.
template <int top, int run_size, int most>
struct SuperAffine {
  static constexpr int values = kLarge, run = run_size, num_runs = kLarge / run_size;
  static constexpr Limits limits = {0, top}, numbers = {0, most};

  struct Found {
    Shared<num_runs> scales, minima;
  };

  struct Block {
    Run<run> runs[num_runs];
    Found found;

    Grid grid(int scale, int minimum) const {
      return {found.scales.unit * static_cast<float>(scale), -(found.minima.unit * static_cast<float>(minimum))};
    }

    double choose_numbers() {
      double total = 0;
      for (int i = 0; i < num_runs; i++) {
        const int scale = found.scales.number[i], minimum = found.minima.number[i];
        int best_scale = scale, best_minimum = minimum;
        double error = assign_error(runs[i], grid(scale, minimum), limits);
        for (int s = scale - 1; s <= scale + 1; s++) {
          for (int t = minimum - 1; t <= minimum + 1; t++) {
            const int other_scale = clamped(s, numbers), other_minimum = clamped(t, numbers);
            const double other = assign_error(runs[i], grid(other_scale, other_minimum), limits);
            if (other < error) error = other, best_scale = other_scale, best_minimum = other_minimum;
          }
        }
        found.scales.number[i] = best_scale;
        found.minima.number[i] = best_minimum;
        assign_error(runs[i], grid(best_scale, best_minimum), limits);
        total += error;
      }
      return total;
    }

    // Least squares for both units, with the codes and whole numbers as they are.
    void choose_units() {
      double ss = 0, st = 0, tt = 0, xs = 0, xt = 0;
      for (int i = 0; i < num_runs; i++) {
        const fit::Sums sums = sums_of(runs[i]);
        const double s = found.scales.number[i], t = -found.minima.number[i];
        ss += s * s * sums.qq;
        st += s * t * sums.q;
        tt += t * t * sums.w;
        xs += s * sums.xq;
        xt += t * sums.x;
      }
      const double determinant = ss * tt - st * st;
      if (determinant > 0) {
        found.scales.unit = to_half((tt * xs - st * xt) / determinant);
        found.minima.unit = to_half((ss * xt - st * xs) / determinant);
      } else if (ss > 0) {
        found.scales.unit = to_half(xs / ss);
      }
    }
  };

  static Found search(const float* x, const float* w) {
    Block block;
    float scales[num_runs], minima[num_runs], scale_weights[num_runs], weights[num_runs];
    for (int i = 0; i < num_runs; i++) {
      load(block.runs[i], x + run * i, w + run * i);
      const Grid found = fit_affine(block.runs[i], top, true);
      assign_error(block.runs[i], found, limits);
      const fit::Sums sums = sums_of(block.runs[i]);
      scales[i] = found.scale;
      minima[i] = -found.base;
      scale_weights[i] = static_cast<float>(sums.qq);
      weights[i] = static_cast<float>(sums.w);
    }
    block.found = {Shared<num_runs>::of(scales, scale_weights, numbers), Shared<num_runs>::of(minima, weights, numbers)};
    Found best = block.found;
    double least_error = 1e300;
    for (int round = 0; round < kRounds; round++) {
      const double error = block.choose_numbers();
      if (error < least_error) least_error = error, best = block.found;
      block.choose_units();
    }
    return best;
  }
};

struct Q2_K : SuperAffine<3, 16, 15> {
  static constexpr int bytes = 84;
  static void fit_block(const float* x, const float* w, uint8_t* block) {
    const Found found = search(x, w);
    for (int i = 0; i < 16; i++) {
      block[i] = static_cast<uint8_t>(found.scales.number[i] | found.minima.number[i] << 4);
    }
    put_half(block + 80, found.scales.unit);
    put_half(block + 82, found.minima.unit);
  }
  static Grid grid(const uint8_t* block, int i) {
    const float scale = half_at(block + 80), minimum = half_at(block + 82);
    return {scale * static_cast<float>(block[i] & 15), -(minimum * static_cast<float>(block[i] >> 4))};
  }
  static void put_codes(const uint8_t* q, uint8_t* block) { put_crumbs(q, 64, 0, block + 16); }
};

template <int top>
struct SixBits : SuperAffine<top, 32, 63> {
  static void fit_block(const float* x, const float* w, uint8_t* block) {
    const auto found = SuperAffine<top, 32, 63>::search(x, w);
    uint8_t *a = block + 4, *b = block + 8, *c = block + 12;
    put_half(block, found.scales.unit);
    put_half(block + 2, found.minima.unit);
    for (int i = 0; i < 4; i++) {
      const int s = found.scales.number[i], t = found.minima.number[i];
      const int later_s = found.scales.number[i + 4], later_t = found.minima.number[i + 4];
      a[i] = static_cast<uint8_t>(s | later_s >> 4 << 6);
      b[i] = static_cast<uint8_t>(t | later_t >> 4 << 6);
      c[i] = static_cast<uint8_t>((later_s & 15) | (later_t & 15) << 4);
    }
  }
  static Grid grid(const uint8_t* block, int run) {
    const uint8_t *a = block + 4, *b = block + 8, *c = block + 12;
    const int i = run % 4;
    const int s = run < 4 ? a[i] & 63 : (c[i] & 15) | (a[i] >> 2 & 48);
    const int t = run < 4 ? b[i] & 63 : c[i] >> 4 | (b[i] >> 2 & 48);
    return {half_at(block) * static_cast<float>(s), -(half_at(block + 2) * static_cast<float>(t))};
  }
};

struct Q4_K : SixBits<15> {
  static constexpr int bytes = 144;
  static void put_codes(const uint8_t* q, uint8_t* block) { put_nibbles(q, 128, 32, block + 16); }
};

struct Q5_K : SixBits<31> {
  static constexpr int bytes = 176;
  static void put_codes(const uint8_t* q, uint8_t* block) {
    put_bit_planes(q, 4, block + 16);
    put_nibbles(q, 128, 32, block + 48);
  }
};

// Calls f with the struct of a type. Returns false if there is none.
template <class F>
bool with_type(int ggml_type, F f) {
  switch (ggml_type) {
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
    default: return false;
  }
}

template <class Type>
void put_float_codes(const float* codes, uint8_t* block) {
  uint8_t q[Type::values];
  for (int i = 0; i < Type::values; i++) q[i] = static_cast<uint8_t>(codes[i] - Type::limits.low);
  Type::put_codes(q, block);
}

// The nearest codes of a block whose scales are stored.
template <class Type>
void put_nearest(const float* x, uint8_t* block) {
  float codes[Type::values];
  for (int first = 0; first < Type::values; first += Type::run) {
    Run<Type::run> run = {};
    std::memcpy(run.x, x + first, sizeof(run.x));
    const Grid grid = Type::grid(block, first / Type::run);
    assign(run, fit::inverse_of(grid.scale), grid.base, Type::limits);
    std::memcpy(codes + first, run.q, sizeof(run.q));
  }
  put_float_codes<Type>(codes, block);
}

// The weights of a block's values: the importance of their columns, more for large values.
template <int values>
void weigh(const float* x, const float* importance, float* w) {
  float squares = 0;
  for (int i = 0; i < values; i++) squares += x[i] * x[i];
  const float mean = squares / values;
  for (int i = 0; i < values; i++) w[i] = (importance ? importance[i] : 1.0f) * std::sqrt(mean + x[i] * x[i]);
}

}  // namespace

bool can_quantize(int ggml_type) {
  return with_type(ggml_type, [](auto) {});
}

void quantize_blocks(int ggml_type, const float* values, int64_t rows, int64_t cols, const float* importance,
                     uint8_t* out) {
  with_type(ggml_type, [&](auto type) {
    using Type = decltype(type);
    float w[Type::values];
    for (int64_t row = 0; row < rows; row++) {
      for (int64_t col = 0; col < cols; col += Type::values, values += Type::values, out += Type::bytes) {
        weigh<Type::values>(values, importance ? importance + col : nullptr, w);
        Type::fit_block(values, w, out);
        put_nearest<Type>(values, out);
      }
    }
  });
}

void read_grids(int ggml_type, const uint8_t* blocks, int64_t count, float* scales, float* bases) {
  with_type(ggml_type, [&](auto type) {
    using Type = decltype(type);
    for (int64_t nth = 0; nth < count; nth++, blocks += Type::bytes) {
      for (int i = 0; i < Type::values; i++) {
        const Grid grid = Type::grid(blocks, i / Type::run);
        *scales++ = grid.scale;
        *bases++ = grid.base;
      }
    }
  });
}

void code_limits(int ggml_type, float* low, float* high) {
  with_type(ggml_type, [&](auto type) {
    *low = decltype(type)::limits.low;
    *high = decltype(type)::limits.high;
  });
}

void write_codes(int ggml_type, uint8_t* blocks, int64_t count, const float* codes) {
  with_type(ggml_type, [&](auto type) {
    using Type = decltype(type);
    for (int64_t nth = 0; nth < count; nth++) put_float_codes<Type>(codes + nth * Type::values, blocks + nth * Type::bytes);
  });
}

}  // namespace quire
