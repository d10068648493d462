// The tables of formats whose 4-bit codes are indices (Codes::T4). Python names them in quire/quant/code_format.py.
//
// `values` are exact. Products multiply `levels`, which are bytes: value = step * (level - 128). E2M1 and IQ4 are whole
// multiples of their step. NF4 and FP4 are not: their levels are the nearest ones, for the step with the smallest mean
// square error over the 16 values. That error, 0.0017 and 0.0011 of the largest value, is below the one that rounding
// activations to int8 makes.
#pragma once

#include <cstdint>

namespace quire {

struct CodeTable {
  float values[16];
  float step;
  alignas(64) uint8_t levels[64];  // four times the same 16
};

constexpr CodeTable make_table(const float (&values)[16], float step, const int (&levels)[16]) {
  CodeTable table{};
  table.step = step;
  for (int i = 0; i < 64; i++) table.levels[i] = static_cast<uint8_t>(levels[i % 16] + 128);
  for (int i = 0; i < 16; i++) table.values[i] = values[i];
  return table;
}

inline constexpr CodeTable kE2M1 = make_table(
    {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f}, 0.5f,
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12});

// The same as GGUF files have it: whole numbers, with half the scale and without a negative zero.
inline constexpr CodeTable kDoubledE2M1 = make_table(
    {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 6.0f, 8.0f, 12.0f, 0.0f, -1.0f, -2.0f, -3.0f, -4.0f, -6.0f, -8.0f, -12.0f}, 1.0f,
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12});

inline constexpr CodeTable kIQ4 = make_table(
    {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f, 1.0f, 13.0f, 25.0f, 38.0f, 53.0f, 69.0f, 89.0f,
     113.0f},
    1.0f, {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113});

inline constexpr CodeTable kNF4 = make_table(
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
     -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
     0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
    1.0f / 112.03f, {-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112});

inline constexpr CodeTable kFP4 = make_table(
    {0.0f, 0.0625f / 12.0f, 8.0f / 12.0f, 1.0f, 4.0f / 12.0f, 6.0f / 12.0f, 2.0f / 12.0f, 3.0f / 12.0f, 0.0f,
     -0.0625f / 12.0f, -8.0f / 12.0f, -1.0f, -4.0f / 12.0f, -6.0f / 12.0f, -2.0f / 12.0f, -3.0f / 12.0f},
    1.0f / 120.0f, {0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30});

}  // namespace quire
