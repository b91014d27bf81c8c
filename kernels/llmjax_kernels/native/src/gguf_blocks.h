// GGUF's quantised blocks, 32 weights at a time: codes with a scale and a minimum for each half,
// which are small integers times a unit of the whole block, or that unit itself.
// Layouts are ggml's (ggml-common.h); the numbers of the types are those of the file format.
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"

enum class GgufType : int64_t {
  kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8,
  kQ2_K = 10, kQ3_K = 11, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kIQ4_NL = 20, kIQ4_XS = 23,
};

struct Group {
  uint8_t codes[32];
  float unit, minimum_unit;     // of the block; half floats, but for their sign
  int8_t scale[2], minimum[2];  // of each half; where a format has no minima these are unused

  void Units(float s, float m = 0) {
    unit = s;
    minimum_unit = m;
  }
  void Halves(int s, int m = 1) {
    scale[0] = scale[1] = int8_t(s);
    minimum[0] = minimum[1] = int8_t(m);
  }
  void Set(float s, float m = 0) {
    Units(s, m);
    Halves(1);
  }
  float Scale(int half) const { return unit * float(scale[half]); }
  float Minimum(int half) const { return minimum_unit * float(minimum[half]); }
  // Low halves of 16 bytes, then high halves.
  void Nibbles(const uint8_t* q) {
    for (int i = 0; i < 16; ++i) {
      codes[i] = q[i] & 15;
      codes[i + 16] = q[i] >> 4;
    }
  }
};

inline float HalfAt(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return FromHalf(h);
}

inline void Decode32(const uint8_t* b, const uint8_t* high_bits, Group& g) {
  uint32_t high;
  std::memcpy(&high, high_bits, 4);
  g.Nibbles(b);
  for (int i = 0; i < 32; ++i) g.codes[i] |= (high >> i & 1) << 4;
}

// Scale and minimum j of the eight that Q4_K and Q5_K pack in 12 bytes.
inline void KScale(const uint8_t* q, int j, int& scale, int& minimum) {
  if (j < 4) {
    scale = q[j] & 63;
    minimum = q[j + 4] & 63;
  } else {
    scale = (q[j + 4] & 15) | (q[j - 4] >> 6) << 4;
    minimum = (q[j + 4] >> 4) | (q[j] >> 6) << 4;
  }
}

inline int64_t BlockWeights(GgufType type) {
  return type <= GgufType::kQ8_0 || type == GgufType::kIQ4_NL ? 32 : 256;
}

inline int64_t BlockBytes(GgufType type) {
  switch (type) {
    case GgufType::kQ4_0: return 18;
    case GgufType::kQ4_1: return 20;
    case GgufType::kQ5_0: return 22;
    case GgufType::kQ5_1: return 24;
    case GgufType::kQ8_0: return 34;
    case GgufType::kQ2_K: return 84;
    case GgufType::kQ3_K: return 110;
    case GgufType::kQ4_K: return 144;
    case GgufType::kQ5_K: return 176;
    case GgufType::kQ6_K: return 210;
    case GgufType::kIQ4_NL: return 18;
    case GgufType::kIQ4_XS: return 136;
  }
  return 0;
}

// Group `j` of the block at `b` (of one group, or of eight).
inline void DecodeGroup(GgufType type, const uint8_t* b, int j, Group& g) {
  const int n = j / 4, shift = 2 * (j % 4);
  switch (type) {
    case GgufType::kQ4_0:
      g.Nibbles(b + 2);
      return g.Set(HalfAt(b));
    case GgufType::kQ4_1:
      g.Nibbles(b + 4);
      return g.Set(HalfAt(b), HalfAt(b + 2));
    case GgufType::kQ5_0:
      Decode32(b + 6, b + 2, g);
      return g.Set(HalfAt(b));
    case GgufType::kQ5_1:
      Decode32(b + 8, b + 4, g);
      return g.Set(HalfAt(b), HalfAt(b + 2));
    case GgufType::kQ8_0:
      for (int i = 0; i < 32; ++i) g.codes[i] = b[2 + i] ^ 0x80;
      return g.Set(HalfAt(b));
    case GgufType::kQ2_K: {  // scales[16] qs[64] d dmin
      g.Units(HalfAt(b + 80), -HalfAt(b + 82));
      for (int i = 0; i < 32; ++i) g.codes[i] = b[16 + 32 * n + i] >> shift & 3;
      for (int h = 0; h < 2; ++h) {
        g.scale[h] = b[2 * j + h] & 15;
        g.minimum[h] = b[2 * j + h] >> 4;
      }
      return;
    }
    case GgufType::kQ3_K: {  // hmask[32] qs[64] scales[12] d
      const uint8_t* s = b + 96;
      g.Units(HalfAt(b + 108));
      for (int i = 0; i < 32; ++i)
        g.codes[i] = (b[32 + 32 * n + i] >> shift & 3) | (b[i] >> j & 1) << 2;
      for (int h = 0; h < 2; ++h) {
        const int i = 2 * j + h;
        const int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
        g.scale[h] = int8_t((low | (s[8 + i % 4] >> 2 * (i / 4) & 3) << 4) - 32);
      }
      return;
    }
    case GgufType::kQ4_K:    // d dmin scales[12] qs[128]
    case GgufType::kQ5_K: {  // d dmin scales[12] qh[32] qs[128]
      int scale, minimum;
      KScale(b + 4, j, scale, minimum);
      const bool five = type == GgufType::kQ5_K;
      const uint8_t* q = b + (five ? 48 : 16) + 32 * (j / 2);
      for (int i = 0; i < 32; ++i) {
        g.codes[i] = j % 2 ? q[i] >> 4 : q[i] & 15;
        if (five) g.codes[i] |= (b[16 + i] >> j & 1) << 4;
      }
      g.Units(HalfAt(b), -HalfAt(b + 2));
      return g.Halves(scale, minimum);
    }
    case GgufType::kQ6_K: {  // ql[128] qh[64] scales[16] d
      g.Units(HalfAt(b + 208));
      const uint8_t* low = b + 64 * n + 32 * (j % 2);
      for (int i = 0; i < 32; ++i) {
        const int four = j % 4 < 2 ? low[i] & 15 : low[i] >> 4;
        g.codes[i] = uint8_t(four | (b[128 + 32 * n + i] >> shift & 3) << 4);
      }
      for (int h = 0; h < 2; ++h) g.scale[h] = int8_t(b[192 + 2 * j + h]);
      return;
    }
    case GgufType::kIQ4_NL:
      g.Nibbles(b + 2);
      return g.Set(HalfAt(b));
    case GgufType::kIQ4_XS: {  // d scales_h scales_l[4] qs[128]
      uint16_t high;
      std::memcpy(&high, b + 2, 2);
      const int low = b[4 + j / 2] >> 4 * (j % 2) & 15;
      g.Nibbles(b + 8 + 16 * j);
      g.Units(HalfAt(b));
      return g.Halves((low | (high >> 2 * j & 3) << 4) - 32);
    }
  }
}
