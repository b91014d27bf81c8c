// GGUF's quantised blocks, from codes and scales: what DecodeGroup of gguf_blocks.h reads.
#pragma once

#include <cstdint>
#include <cstring>

#include "gguf_blocks.h"

namespace {

// One block's parts, as small numbers; what a type has no room for is unused.
struct BlockParts {
  uint16_t d, dmin;     // half floats
  uint8_t codes[256];
  uint8_t scales[16];   // of groups, signed ones as they are stored
  uint8_t minima[16];
};

inline void PutHalf(uint8_t* p, uint16_t half) { std::memcpy(p, &half, 2); }

// Code k and code k + n share a byte.
inline void PutNibbles(const uint8_t* codes, int n, uint8_t* p) {
  for (int k = 0; k < n; ++k) p[k] = uint8_t((codes[k] & 15) | (codes[k + n] & 15) << 4);
}

// Two bits of each of 256 codes: of four that are 32 apart in a byte.
inline void PutPairs(const uint8_t* codes, int shift, uint8_t* p) {
  for (int n = 0; n < 2; ++n)
    for (int k = 0; k < 32; ++k) {
      const uint8_t* c = codes + 128 * n + k;
      int byte = 0;
      for (int i = 0; i < 4; ++i) byte |= (c[32 * i] >> shift & 3) << 2 * i;
      p[32 * n + k] = uint8_t(byte);
    }
}

// One bit of each: of codes that are 32 apart in a byte.
inline void PutBits(const uint8_t* codes, int count, int shift, uint8_t* p) {
  for (int k = 0; k < 32; ++k) {
    int byte = 0;
    for (int i = 0; 32 * i < count; ++i) byte |= (codes[32 * i + k] >> shift & 1) << i;
    p[k] = uint8_t(byte);
  }
}

// The fifth bits of 32 codes.
inline void PutFifths(const uint8_t* codes, uint8_t* p) {
  uint32_t bits = 0;
  for (int k = 0; k < 32; ++k) bits |= uint32_t(codes[k] >> 4 & 1) << k;
  std::memcpy(p, &bits, 4);
}

// Eight scales and minima of six bits in twelve bytes, as KScale reads them.
inline void PutKScales(const BlockParts& parts, uint8_t* p) {
  for (int j = 0; j < 4; ++j) {
    const int s = parts.scales[j + 4], m = parts.minima[j + 4];
    p[j] = uint8_t(parts.scales[j] | s >> 4 << 6);
    p[j + 4] = uint8_t(parts.minima[j] | m >> 4 << 6);
    p[j + 8] = uint8_t((s & 15) | (m & 15) << 4);
  }
}

// Sixteen scales of six bits in twelve bytes, as Q3_K has them.
inline void PutQ3Scales(const uint8_t* scales, uint8_t* p) {
  PutNibbles(scales, 8, p);
  for (int i = 0; i < 4; ++i) {
    int byte = 0;
    for (int j = 0; j < 4; ++j) byte |= (scales[4 * j + i] >> 4) << 2 * j;
    p[8 + i] = uint8_t(byte);
  }
}

inline void PutIq4Scales(const uint8_t* scales, uint8_t* high, uint8_t* low) {
  uint16_t bits = 0;
  for (int j = 0; j < 8; ++j) bits = uint16_t(bits | (scales[j] >> 4) << 2 * j);
  PutHalf(high, bits);
  for (int j = 0; j < 4; ++j)
    low[j] = uint8_t((scales[2 * j] & 15) | (scales[2 * j + 1] & 15) << 4);
}

inline void EncodeBlock(GgufType type, const BlockParts& parts, uint8_t* b) {
  const uint8_t* codes = parts.codes;
  switch (type) {
    case GgufType::kQ4_0:
    case GgufType::kIQ4_NL:
      PutHalf(b, parts.d);
      return PutNibbles(codes, 16, b + 2);
    case GgufType::kQ4_1:
      PutHalf(b, parts.d);
      PutHalf(b + 2, parts.dmin);
      return PutNibbles(codes, 16, b + 4);
    case GgufType::kQ5_0:
      PutHalf(b, parts.d);
      PutFifths(codes, b + 2);
      return PutNibbles(codes, 16, b + 6);
    case GgufType::kQ5_1:
      PutHalf(b, parts.d);
      PutHalf(b + 2, parts.dmin);
      PutFifths(codes, b + 4);
      return PutNibbles(codes, 16, b + 8);
    case GgufType::kQ8_0:
      PutHalf(b, parts.d);
      for (int k = 0; k < 32; ++k) b[2 + k] = codes[k] ^ 0x80;
      return;
    case GgufType::kQ2_K:  // scales[16] qs[64] d dmin
      for (int j = 0; j < 16; ++j) b[j] = uint8_t(parts.scales[j] | parts.minima[j] << 4);
      PutPairs(codes, 0, b + 16);
      PutHalf(b + 80, parts.d);
      return PutHalf(b + 82, parts.dmin);
    case GgufType::kQ3_K:  // hmask[32] qs[64] scales[12] d
      PutBits(codes, 256, 2, b);
      PutPairs(codes, 0, b + 32);
      PutQ3Scales(parts.scales, b + 96);
      return PutHalf(b + 108, parts.d);
    case GgufType::kQ4_K:    // d dmin scales[12] qs[128]
    case GgufType::kQ5_K: {  // d dmin scales[12] qh[32] qs[128]
      const bool five = type == GgufType::kQ5_K;
      PutHalf(b, parts.d);
      PutHalf(b + 2, parts.dmin);
      PutKScales(parts, b + 4);
      if (five) PutBits(codes, 256, 4, b + 16);
      for (int n = 0; n < 4; ++n) PutNibbles(codes + 64 * n, 32, b + (five ? 48 : 16) + 32 * n);
      return;
    }
    case GgufType::kQ6_K:  // ql[128] qh[64] scales[16] d
      for (int n = 0; n < 2; ++n) PutNibbles(codes + 128 * n, 64, b + 64 * n);
      PutPairs(codes, 4, b + 128);
      std::memcpy(b + 192, parts.scales, 16);
      return PutHalf(b + 208, parts.d);
    case GgufType::kIQ4_XS:  // d scales_h scales_l[4] qs[128]
      PutHalf(b, parts.d);
      PutIq4Scales(parts.scales, b + 2, b + 4);
      for (int j = 0; j < 8; ++j) PutNibbles(codes + 32 * j, 16, b + 8 + 16 * j);
      return;
  }
}

}  // namespace
