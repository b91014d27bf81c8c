// Half floats, one at a time; see simd.h for 16.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "format.h"

// To nearest, ties to even.
LLMJAX_INLINE uint16_t ToHalf(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint16_t sign = bits >> 16 & 0x8000;
  f = std::fabs(f);
  if (!(f < 65520.0f)) return sign | 0x7c00;
  if (f < 0x1p-14f) return sign | uint16_t(std::nearbyint(f * 0x1p24f));
  std::memcpy(&bits, &f, 4);
  bits += 0xfff + (bits >> 13 & 1);
  return sign | uint16_t((bits - 0x38000000) >> 13);
}

LLMJAX_INLINE float FromHalf(uint16_t h) {
  const uint32_t magnitude = uint32_t(h & 0x7fff) << 13, sign = uint32_t(h & 0x8000) << 16;
  float f;
  std::memcpy(&f, &magnitude, 4);
  f *= 0x1p112f;
  return sign ? -f : f;
}
